"""DPO: Direct Preference Optimization (arXiv 2305.18290), on pairs of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import Loss, Metrics, Reference, References
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import LossInputs, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class DPO(Loss):
    """-log sigmoid(beta (d_w - d_l)), d = l - l_ref, mean over a group's pairs, then over groups (eq. 7).

    A pair is two responses to a prompt with r_w > r_l. `pairs`: all of them, or those of a best response and
    a worst one. A group whose rewards are equal has no pair: it counts in the mean as 0.

    Several responses may be best, or worst: with rewards 0 and 1, all right and all wrong ones. Then
    `best_worst` has every pair of a best and a worst one. Their mean is the expected loss of one of these
    pairs drawn at random, without the noise of the draw; iterative DPO on right and wrong answers has several
    pairs a prompt as well (arXiv 2404.19733). Taking the first of each by the order of the rows would prefer
    responses by the sorting, such as by length.
    """

    name: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    reference: Reference = Reference(name="fixed")
    pairs: Literal["all", "best_worst"] = "best_worst"

    signal: ClassVar[Literal["reward"]] = "reward"
    couples_groups: ClassVar[bool] = True

    @property
    def reference_policies(self) -> References:
        return {"ref": self.reference}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        rows, totals = inputs.rows, inputs.totals
        assert rows.ref_logp_r is not None, "DPO needs the reference's log-probs (reference_policies)"
        drift_n = rows.sequence_sum(inputs.logp_r - rows.ref_logp_r)
        better_p, worse_p, coef_p = self._pairs(rows)
        coef_p = coef_p / totals.groups
        margin_p = self.beta * (drift_n[better_p] - drift_n[worse_p])
        loss = -(coef_p * torch.nn.functional.logsigmoid(margin_p)).sum()
        return loss, {
            "preferred": (coef_p * (margin_p.detach() > 0)).sum(),
            "margin": (coef_p * margin_p.detach()).sum(),
        }

    def _pairs(self, rows: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the better and the worse of each pair, int64 [p]; 1 / (pairs of its group), fp32 [p]."""
        reward = rows.reward_n.tolist()
        better: list[int] = []
        worse: list[int] = []
        coef: list[float] = []
        for group in rows.rows_of_groups:
            pairs = [(i, j) for i in group for j in group if reward[i] > reward[j]]
            if self.pairs == "best_worst":
                most, least = max(reward[i] for i in group), min(reward[i] for i in group)
                pairs = [(i, j) for i, j in pairs if (reward[i], reward[j]) == (most, least)]
            better += [i for i, _ in pairs]
            worse += [j for _, j in pairs]
            coef += [1 / len(pairs) for _ in pairs]
        device = rows.reward_n.device
        pairs_p = torch.tensor([better, worse], dtype=torch.int64, device=device)
        return pairs_p[0], pairs_p[1], torch.tensor(coef, dtype=torch.float32, device=device)
