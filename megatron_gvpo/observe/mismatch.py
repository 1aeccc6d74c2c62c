"""Mismatch watch: whether the rollout engine computes the same policy as the trainer.

Both know the log-prob of every sampled token. They differ by rounding where weights, temperature and model
are the same, and by more where something is wrong; then responses come from another policy than the one
that is trained. The trainer's log-probs are those that training needs anyway, never an extra forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_gvpo.types import TrainBatch

# KL in nats a token, by the trainer's dtype. On the quickstart's policies rounding alone gave 2e-13 in fp32
# and 4e-5 in bf16; a temperature of 0.8 for 1.0 gave 3e-3 to 6e-3, the weights of another stage 0.1 to 0.4.
# The mean absolute difference tells them apart less well: 0.002 in bf16, 0.007 to 0.03 at that temperature.
THRESHOLDS = {"float32": 1e-6, "bfloat16": 1e-3}

CAUSES = (
    "the engine has other weights: a push failed, or it restarted from its checkpoint",
    "it samples at another temperature, top-p, top-k or penalty than `rollout` says",
    "it computes in another precision (bf16, FP8, a quantised cache) or with other kernels",
    "it saw other tokens: its own chat template, start token, tokenizer or vocabulary",
    "a mixture-of-experts router chose other experts than in the trainer",
)
TOP_P = (
    "rollout.top_p is below 1: vLLM's log-probs are then log(p / kept mass), all others are log(p); with "
    "vLLM this difference is expected"
)


class MismatchWatch:
    """Gathers comparisons of a step; gives its metrics, and a warning where they are too large.

    `threshold` is of the KL, in nats a token. A run is warned once, and again only where the KL has grown
    tenfold since. `top_p` is the sampling's: below 1, vLLM renormalises its log-probs (SGLang and the
    embedded engine do not), and the warning says that this may be all.
    """

    def __init__(self, threshold: float, top_p: float = 1.0) -> None:
        self.gap = 0.0  # mean of trainer - engine a token, in nats, of the rows that were compared last
        self._threshold = self._bar = threshold
        self._top_p = top_p
        self._differences: list[tuple[Tensor, Tensor]] = []

    def compare(self, rows: TrainBatch, logp_r: Tensor, version: int) -> None:
        """Take in the trainer's `logp_r` [r] of `rows`, under the weights of `version`.

        Tokens that other weights sampled are left out: their difference is the policy's own change. Rows
        without the engine's log-probs are ignored.
        """
        if rows.engine_logp_r is None:
            return
        current_r = rows.sampled_by(version)
        difference_r = (logp_r.double() - rows.engine_logp_r.double())[current_r]
        if len(difference_r):
            length_n = torch.bincount(rows.seq_r[current_r], minlength=len(rows))
            self._differences.append((difference_r, length_n[length_n > 0]))
            # A token that cannot be measured counts with the gap that was known: few new ones are noisy.
            known = (len(current_r) - len(difference_r)) * self.gap
            gap = (float(difference_r.sum()) + known) / len(current_r)
            self.gap = gap if math.isfinite(gap) else self.gap

    def corrected(self, rows: TrainBatch) -> Tensor:
        """The engine's log-probs plus `gap`, fp32 [r]: what stands for the trainer's own in a reference.

        Without it, sums over a sequence would be off by its length times the gap, a bonus on length. Raises
        ValueError where the engine gave none.
        """
        if rows.engine_logp_r is None:
            raise ValueError("algorithm.reference_logprobs=engine: the rollout engine gave no log-probs")
        return rows.engine_logp_r + self.gap

    def state_dict(self) -> dict[str, float]:
        """What the next step's corrections begin with, as JSON values."""
        return {"gap": self.gap}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.gap = state.get("gap", 0.0)

    def take(self) -> dict[str, float]:
        """Metrics of what was compared since the last take; empty where nothing was."""
        if not self._differences:
            return {}
        parts_r, parts_n = zip(*self._differences, strict=True)
        self._differences = []
        values = mismatch(torch.cat(parts_r), torch.cat(parts_n))
        return {f"mismatch/{name}": value for name, value in values.items()}

    def warning(self, step: int, metrics: dict[str, float]) -> str | None:
        """What to tell the user about these metrics of `take`; usually nothing."""
        value = metrics.get("mismatch/kl", 0.0)
        value = math.inf if math.isnan(value) else value
        if value <= self._bar:
            return None
        self._bar = 10 * value
        causes = [*CAUSES, TOP_P] if self._top_p < 1 else CAUSES
        return (
            f"step {step}: the policy that samples is not the one that is trained. On the same tokens the "
            f"engine's log-probs differ from the trainer's by {metrics['mismatch/abs_mean']:.2g} (mean) and "
            f"{metrics['mismatch/abs_max']:.2g} (at most), a KL of {value:.2g} nats a token where "
            f"rollout.mismatch_threshold={self._threshold:g}. Usual causes:"
            + "".join(f"\n  - {cause}" for cause in causes)
        )


def mismatch(difference_r: Tensor, length_n: Tensor) -> dict[str, float]:
    """How far two policies' log-probs of the same tokens are apart.

    `difference_r` fp64 [r]: trainer minus engine, of sequences with `length_n` tokens one after the other.

        abs_mean, abs_max  per token
        kl              mean of exp(D) - 1 - D, the k3 estimate of KL(engine || trainer) per token
                        (http://joschu.net/blog/kl-approx.html): the samples are the engine's
        gap             mean of D per token; its expectation is -KL, so it is not 0 under mere noise
        slope           least-squares slope of the sums of D over a sequence against its length: a bonus on
                        length, in nats a token, where sums are compared; absent where all lengths are equal
        residual_slope  what is left of it when `gap` is subtracted from every token
        tokens          how many were compared
    """
    metrics = {
        "abs_mean": float(difference_r.abs().mean()),
        "abs_max": float(difference_r.abs().max()),
        "kl": float((torch.expm1(difference_r) - difference_r).mean()),
        "gap": float(difference_r.mean()),
        "tokens": float(len(difference_r)),
    }
    seq_r = torch.repeat_interleave(torch.arange(len(length_n)), length_n)
    sum_n = difference_r.new_zeros(len(length_n)).index_add(0, seq_r, difference_r)
    centred_n = length_n.double() - length_n.double().mean()
    if spread := float((centred_n**2).sum()):
        metrics["slope"] = float((centred_n * sum_n).sum()) / spread
        metrics["residual_slope"] = metrics["slope"] - metrics["gap"]
    return metrics
