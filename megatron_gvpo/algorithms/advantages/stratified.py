"""Stratified GRPO: compare like with like (arXiv 2510.06214)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.estimator import component, normalised
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.lazy_torch import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class StratifiedEstimator(Advantage):
    """A = blend A_SAN + (1 - blend) A_GRPO, fp32 [n].

    A_SAN = (r - mean) / (std + eps) over the responses of the prompt in the same stratum, A_GRPO over all of
    them. `stratum` is a component of the reward (of weight 0) that says which stratum a response is in, such
    as its number of search calls. A response alone in its stratum has A_SAN = 0. The paper's blend was not
    found: 0.8 is a choice.
    """

    name: Literal["stratified"] = "stratified"
    stratum: str
    blend: float = Field(0.8, ge=0, le=1)
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)

    @property
    def components_read(self) -> tuple[Component, ...]:
        return (self.stratum,)

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        _, stratum_n = torch.unique(component(rows, self.stratum, "stratum"), return_inverse=True)
        index_n, _ = rows.groups
        strata = rows.with_columns(group_n=index_n * len(rows) + stratum_n)
        san_n = normalised(strata, rows.reward_n, self.ddof, self.eps)
        grpo_n = normalised(rows, rows.reward_n, self.ddof, self.eps)
        advantage_n = self.blend * san_n + (1 - self.blend) * grpo_n
        return advantage_n.float(), {
            "strata": torch.tensor(float(len(strata.groups[1]) / len(rows.groups[1])))
        }
