"""GDPO: normalise every component of the reward separately (NVIDIA, arXiv 2601.05242)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.estimator import component, normalised, whitened
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.lazy_torch import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class ComponentEstimator(Advantage):
    """A_i = sum_j w_j (r_ij - mean_j) / (std_j + eps), j over the reward's components; fp32 [n].

    Mean and std are of the group; then whitened over what the optimizer step trains ((A - mean) / (std +
    1e-4), in responses as in TRL or in tokens as in verl). `weights`: of the components that count, by name;
    null: all, with weight 1. They act after the normalisation, unlike those of `rewards.components`.
    """

    by_components: ClassVar[bool] = True

    name: Literal["components"] = "components"
    weights: dict[str, float] | None = None
    # over the batch: not at all, by responses, by tokens
    whiten: Literal["none", "sequence", "token"] = "sequence"
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-4, ge=0)

    @property
    def components_read(self) -> tuple[Component, ...]:
        return tuple(self.weights or (0,))

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        weights = self.weights or dict.fromkeys(rows.component_n, 1.0)
        advantage_n = torch.zeros(len(rows), dtype=torch.float64)
        for name, weight in weights.items():
            advantage_n += weight * normalised(rows, component(rows, name, "weights"), self.ddof, self.eps)
        if self.whiten != "none":
            advantage_n = whitened(rows, advantage_n, self.whiten, self.ddof, 1e-4)
        return advantage_n.float(), {}
