"""Checks that the rollout engine computes the same policy as the trainer, by their log-probs.

Both compute the log-prob of every sampled token. With the same weights, temperature and model, the two
differ by rounding only. A larger difference means that the responses come from another policy than the one
that is trained. The check uses log-probs that training needs anyway, never an extra forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_gvpo.types import TrainBatch

# KL in nats a token, by the trainer's dtype. On the quickstart's policies, rounding alone gave 2e-13 in fp32
# and 4e-5 in bf16. A temperature of 0.8 instead of 1.0 gave 3e-3 to 6e-3, and the weights of another training
# stage gave 0.1 to 0.4. On SmolLM2-135M, rounding in bf16 gave 4e-4 to 2e-3 and that temperature 5e-2. The
# mean absolute difference separates the cases less well: on the quickstart's policies 0.002 for rounding in
# bf16, 0.007 to 0.03 for the temperature.
THRESHOLDS = {"float32": 1e-6, "bfloat16": 4e-3}

CAUSES = (
    "the engine has other weights: a push failed, or it restarted from its checkpoint",
    "it samples at another temperature, top-p, top-k or penalty than `rollout` says",
    "it computes in another precision (bf16, FP8, a quantised cache) or with other kernels",
    "it saw other tokens: its own chat template, start token, tokenizer or vocabulary",
    "a mixture-of-experts router chose other experts than in the trainer",
)


class MismatchWatch:
    """Collects the comparisons of a step; returns metrics, and a warning if the KL exceeds `threshold`.

    `threshold` is in nats a token. After a warning, another one comes only if the KL has grown tenfold
    since.
    """

    def __init__(self, threshold: float) -> None:
        self.gap = 0.0  # mean of (trainer - engine) a token, in nats, over the rows compared last
        self._threshold = self._bar = threshold
        self._differences: list[tuple[Tensor, Tensor]] = []

    def compare(self, rows: TrainBatch, logp_r: Tensor, version: int) -> None:
        """Compare the trainer's `logp_r` [r] of `rows`, under the weights of `version`, with the engine's.

        Tokens sampled by other weights are left out: their difference includes the policy's own change. Rows
        without the engine's log-probs are ignored.
        """
        if rows.engine_logp_r is None:
            return
        current_r = rows.sampled_by(version)
        difference_r = (logp_r.double() - rows.engine_logp_r.double())[current_r]
        if len(difference_r):
            length_n = torch.bincount(rows.seq_r[current_r], minlength=len(rows))
            self._differences.append((difference_r, length_n[length_n > 0]))
            # A token that is left out counts with the previous gap: a mean over a few new tokens is noisy.
            previous = (len(current_r) - len(difference_r)) * self.gap
            gap = (float(difference_r.sum()) + previous) / len(current_r)
            self.gap = gap if math.isfinite(gap) else self.gap

    def corrected(self, rows: TrainBatch) -> Tensor:
        """Return the engine's log-probs plus `gap`, fp32 [r], as an estimate of the trainer's own.

        Without the gap, sums over a sequence would be off by its length times the gap: a bonus on length.
        Raises ValueError if the engine gave no log-probs.
        """
        if rows.engine_logp_r is None:
            raise ValueError("algorithm.reference_logprobs=engine: the rollout engine gave no log-probs")
        return rows.engine_logp_r + self.gap

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON values: the gap that `corrected` adds."""
        return {"gap": self.gap}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.gap = state.get("gap", 0.0)

    def take(self) -> dict[str, float]:
        """Return the metrics of the comparisons since the last take; empty without any."""
        if not self._differences:
            return {}
        parts_r, parts_n = zip(*self._differences, strict=True)
        self._differences = []
        values = mismatch(torch.cat(parts_r), torch.cat(parts_n))
        return {f"mismatch/{name}": value for name, value in values.items()}

    def warning(self, step: int, metrics: dict[str, float]) -> str | None:
        """Return a warning for the user about these metrics of `take`, or None (the usual case)."""
        value = metrics.get("mismatch/kl", 0.0)
        value = math.inf if math.isnan(value) else value
        if value <= self._bar:
            return None
        self._bar = 10 * value
        return (
            f"step {step}: the policy that samples is not the one that is trained. On the same tokens the "
            f"engine's log-probs differ from the trainer's by {metrics['mismatch/abs_mean']:.2g} (mean) and "
            f"{metrics['mismatch/abs_max']:.2g} (at most), a KL of {value:.2g} nats a token where "
            f"rollout.mismatch_threshold={self._threshold:g}. Usual causes:"
            + "".join(f"\n  - {cause}" for cause in CAUSES)
        )


def mismatch(difference_r: Tensor, length_n: Tensor) -> dict[str, float]:
    """Measure the distance between two policies' log-probs of the same tokens.

    `difference_r` fp64 [r] is D = trainer - engine, for sequences of `length_n` tokens one after the other.

        abs_mean, abs_max  of D, per token
        kl              mean of exp(D) - 1 - D, the k3 estimate of KL(engine || trainer) per token
                        (http://joschu.net/blog/kl-approx.html): the samples are the engine's
        gap             mean of D per token; its expectation is -KL, so noise alone makes it negative
        slope           least-squares slope of a sequence's sum of D against its length, in nats a token: a
                        method that compares sums gives this bonus on length; absent if all lengths are equal
        residual_slope  the slope after `gap` is subtracted from every token
        tokens          number of compared tokens
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
