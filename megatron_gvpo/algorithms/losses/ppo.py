"""Clipped importance ratios (PPO without a critic), as GRPO, Dr. GRPO, DAPO and GSPO use these ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import (
    STEP_START,
    Loss,
    MemberTrait,
    Metrics,
    Reference,
    References,
    only_with,
)
from megatron_gvpo.algorithms.importance.base import effective_share
from megatron_gvpo.algorithms.losses import bounded
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.algorithms.losses.pg import AnyImportance
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import LossInputs, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class PPO(Loss):
    """L = sum_it c_it [ -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3 ].

    rho = pi / pi_old with pi_old the policy at step start, A the advantage of the token or its response, c
    from `aggregation`, w the token's weight by `importance` (1 without), k3 = x_ref/x - 1 - log(x_ref/x) >= 0
    the estimate of KL(pi || pi_ref) with x = pi(y_it) (arXiv 2402.03300 eq. 3-4). Without kl_coef no
    reference policy is kept. Exponentials are bounded (`bounded.py`): rho at e^20, k3's slope from 10 nats.

    ratio           token     rho_it = pi(y_it) / pi_old(y_it)
                    sequence  exp of the mean over the response of log rho_it: GSPO (arXiv 2507.18071 eq. 7)
                    item      the same over an item of a list: Rank-GRPO (arXiv 2510.20150)
                    turn      the same over a turn of a conversation; a single response is one turn
    dual_clip       bounds the term of a negative advantage: it is at most -dual_clip * A (arXiv 1912.09729)
    demonstrations  the ratio of given solutions, which no policy sampled:
                    ratio        pi / pi_old like any other's
                    unclipped    the same, and never clipped
                    probability  pi, as if pi_old were 1
                    shaped       pi / (pi + shape), unclipped (LUFFY, arXiv 2504.14945)
                    likelihood   none: the term is -likelihood_coef log pi (ExPO, arXiv 2507.02834)
    """

    name: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    ratio: Literal["token", "sequence", "item", "turn"] = "token"
    dual_clip: float | None = Field(None, gt=1)
    kl_coef: float = Field(0.0, ge=0)
    reference: Reference = Reference(name="fixed")
    aggregation: Aggregation = Aggregation(name="sequence_mean")
    importance: AnyImportance | None = None  # corrects for the policy that sampled
    demonstrations: Literal["ratio", "unclipped", "probability", "shaped", "likelihood"] = "ratio"
    shape: float = Field(0.1, gt=0)
    likelihood_coef: float = Field(0.1, ge=0)
    cross_context: bool = False  # responses to a hinted prompt: pi_old by the engine, with the hint (Guide)

    signal: ClassVar[Literal["advantage"]] = "advantage"

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(
            reference=(self.kl_coef > 0, "kl_coef above 0"),
            shape=(self.demonstrations == "shaped", "demonstrations=shaped"),
            likelihood_coef=(self.demonstrations == "likelihood", "demonstrations=likelihood"),
        )

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START, "ref": self.reference} if self.kl_coef else {"old": STEP_START}

    @property
    def only_after_updates(self) -> tuple[str, ...]:
        of_ratio = ("clip_low", "clip_high", "dual_clip", "ratio")
        of_kl = ("kl_coef",) if self.reference == STEP_START else ()
        # Some responses of members have ratios to other policies than the old one.
        has_own_ratios = self.cross_context or self.demonstrations in ("probability", "shaped")
        return of_kl if has_own_ratios else (*of_ratio, *of_kl)

    @property
    def reads_members(self) -> dict[str, MemberTrait]:
        of_hinted: dict[str, MemberTrait] = {"cross_context=true": "brings_hinted"}
        of_given: dict[str, MemberTrait] = {f"demonstrations={self.demonstrations}": "brings_demonstrations"}
        return (of_hinted if self.cross_context else {}) | (
            of_given if self.demonstrations != "ratio" else {}
        )

    @property
    def needs_items(self) -> bool:
        return self.ratio == "item"

    @property
    def known_at_step_start(self) -> bool:
        # `importance` and the probabilities of demonstrations read log-probs by themselves, and not only as
        # differences from the present ones.
        return (
            self.importance is None
            and not self.cross_context
            and self.demonstrations in ("ratio", "unclipped", "likelihood")
            and all(policy == STEP_START for policy in self.reference_policies.values())
        )

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return effective_share(metrics)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals, logp_r = inputs.rows, inputs.totals, inputs.logp_r
        coef_r = self.aggregation(rows, totals)
        advantage_r = rows.token_advantages()
        ratio_r, free_r = self._ratio(rows, logp_r)
        unclipped_r = ratio_r * advantage_r
        clipped_r = ratio_r.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage_r
        clipped_r = clipped_r.where(~free_r, unclipped_r)
        gain_r = unclipped_r.minimum(clipped_r)
        if self.dual_clip is not None:
            is_bounded_r = (advantage_r < 0) & ~free_r
            gain_r = gain_r.maximum(self.dual_clip * advantage_r).where(is_bounded_r, gain_r)
        if self.demonstrations == "likelihood" and rows.demonstration_n is not None:
            gain_r = (self.likelihood_coef * logp_r).where(rows.demonstration_n[rows.seq_r], gain_r)
        drift_r = (logp_r - _old(rows)).detach()
        metrics = {
            "clip_fraction": (clipped_r < unclipped_r).sum() / totals.tokens,
            "kl": bounded.k3(drift_r).sum() / totals.tokens,
        }
        loss_r = -gain_r
        if self.importance:
            importance_r, shares = self.importance(rows, totals)
            # Hinted tokens: the ratio is to the policy that sampled them.
            if (hinted_r := self._hinted(rows)) is not None:
                importance_r = importance_r.masked_fill(hinted_r, 1)
            loss_r = importance_r * loss_r
            metrics |= shares
        if self.kl_coef:
            assert rows.ref_logp_r is not None, "kl_coef needs the reference's log-probs (reference_policies)"
            k3_r = bounded.k3(rows.ref_logp_r - logp_r)
            loss_r = loss_r + self.kl_coef * k3_r
            metrics["kl_ref"] = k3_r.detach().sum() / totals.tokens
        return (coef_r * loss_r).sum(), metrics

    def _ratio(self, rows: TrainBatch, logp_r: Tensor) -> tuple[Tensor, Tensor]:
        """rho of every token, and a mask of the tokens that are never clipped, both [r]."""
        log_ratio_r = logp_r - self._sampled_with(rows)
        if self.ratio == "sequence":
            log_ratio_r = rows.sequence_mean(log_ratio_r)[rows.seq_r]
        elif self.ratio == "item":
            assert rows.item_r is not None, "ratio=item needs the items of responses (estimator=rank)"
            log_ratio_r = _part_mean(rows, log_ratio_r, rows.item_r)
        elif self.ratio == "turn":
            log_ratio_r = _part_mean(rows, log_ratio_r, rows.turn_r)
        ratio_r, free_r = bounded.ratio(log_ratio_r), torch.zeros_like(logp_r, dtype=torch.bool)
        if self.demonstrations in ("ratio", "likelihood") or rows.demonstration_n is None:
            return ratio_r, free_r
        given_r = rows.demonstration_n[rows.seq_r]
        if self.demonstrations == "unclipped":
            return ratio_r, given_r
        own_r = rows.sequence_mean(logp_r)[rows.seq_r] if self.ratio == "sequence" else logp_r
        if self.demonstrations == "probability":
            return own_r.exp().where(given_r, ratio_r), free_r
        # e^l / (e^l + c) = sigmoid(l - log c)
        return (own_r - torch.tensor(self.shape).log().item()).sigmoid().where(given_r, ratio_r), given_r

    def _sampled_with(self, rows: TrainBatch) -> Tensor:
        """log pi_old of every token, [r]."""
        old_r, hinted_r = _old(rows), self._hinted(rows)
        if hinted_r is None or rows.engine_logp_r is None:
            return old_r
        return rows.engine_logp_r.where(hinted_r, old_r)

    def _hinted(self, rows: TrainBatch) -> Tensor | None:
        """With `cross_context`, True for tokens that were sampled with a hint, bool [r]; None without any."""
        if not self.cross_context or rows.engine_logp_r is None:
            return None
        return rows.sampled_by(-1) & ~rows.engine_logp_r.isnan()


def _part_mean(rows: TrainBatch, value_r: Tensor, part_r: Tensor) -> Tensor:
    """Mean of a value over each part of each response, numbered by `part_r`, broadcast to [r]."""
    turns = rows.turns or [()] * len(rows)
    # An upper bound of the numbers that the host knows, so that it does not wait for a tensor of the device.
    count = 1 + max((max(map(len, pair)) for pair in zip(rows.response_ids, turns, strict=True)), default=0)
    key_r = rows.seq_r * count + part_r
    sum_k = value_r.new_zeros(len(rows) * count).index_add(0, key_r, value_r)
    size_k = torch.zeros_like(sum_k).index_add(0, key_r, torch.ones_like(value_r))
    return (sum_k / size_k.clamp(min=1))[key_r]


def _old(rows: TrainBatch) -> Tensor:
    assert rows.old_logp_r is not None, "clipping needs the log-probs at step start (reference_policies)"
    return rows.old_logp_r
