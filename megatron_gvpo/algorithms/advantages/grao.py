"""GRAO: a group and a reference answer beside it (arXiv 2508.07750)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.estimator import normalised
from megatron_gvpo.algorithms.base import Advantage, Metrics
from megatron_gvpo.core.lazy_torch import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceAnswerEstimator(Advantage):
    """Weights of J = mean_i A_i L_i + imitate A_y L_y + align mean_i A_i (L_i - L_y); fp32 [n].

    L is the mean log-prob a token, y the demonstration in the group, A normalised over the group with it
    (population std). Collected by response, with k of them: a rollout weighs (1 + align) A_i, the
    demonstration k (imitate A_y - align mean A). Goes with the loss pg and sequence_mean. The paper's two
    coefficients were not read: 1 is a choice.
    """

    name: Literal["reference_answer"] = "reference_answer"
    imitate: float = Field(1.0, ge=0)
    align: float = Field(1.0, ge=0)
    eps: float = Field(1e-6, ge=0)  # added to the std, so that nothing is divided by 0

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        advantage_n = normalised(rows, rows.reward_n, 0, self.eps)
        given_n = rows.demonstration_n
        if given_n is None:
            given_n = torch.zeros(len(rows), dtype=torch.bool)
        own_n = (~given_n).double()
        share_n = rows.group_mean(own_n).clamp(min=1e-9)
        index_n, size_g = rows.groups
        count_n = share_n * size_g[index_n]
        mean_n = rows.group_mean(advantage_n * own_n) / share_n
        given_weight_n = count_n * (self.imitate * advantage_n - self.align * mean_n)
        return given_weight_n.where(given_n, (1 + self.align) * advantage_n).float(), {}
