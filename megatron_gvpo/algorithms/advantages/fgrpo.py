"""FGRPO: rewards under constraints, by Lagrange multipliers that follow them (arXiv 2604.08476)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.estimator import component, normalised
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class LagrangianEstimator(Advantage):
    """A_i = A_task + sum_j lambda_j A_j, each (value - mean) / (std + eps) over the group; fp32 [n].

    A_task is the advantage of the whole reward, A_j that of its component j, whose mean shall be at least
    tau_j; `constraints` gives tau_j by the name of j. After every optimizer step

        lambda_j <- clip(lambda_j + rate (tau_j - mean of c_j over the step's responses), 0, limit).

    Give these components the weight 0 in `rewards.components`, or they count twice. rate and limit are
    second-hand knowledge. The multipliers go into checkpoints.
    """

    name: Literal["lagrangian"] = "lagrangian"
    constraints: dict[str, float] = Field(min_length=1)
    rate: float = Field(0.01, gt=0)
    limit: float = Field(5.0, gt=0)
    start: float = Field(0.0, ge=0)  # the first value of every multiplier
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)

    @property
    def components_read(self) -> tuple[Component, ...]:
        return tuple(self.constraints)

    def build(self) -> Multipliers:
        return Multipliers(self)

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        """Advantages under the multipliers that a run begins with."""
        return self.combined(rows, dict.fromkeys(self.constraints, self.start)), {}

    def combined(self, rows: TrainBatch, multipliers: Mapping[str, float]) -> Tensor:
        """Advantages under these multipliers."""
        advantage_n = normalised(rows, rows.reward_n, self.ddof, self.eps)
        for name in self.constraints:
            value_n = component(rows, name, "constraints")
            advantage_n = advantage_n + multipliers[name] * normalised(rows, value_n, self.ddof, self.eps)
        return advantage_n.float()

    def moved(self, rows: TrainBatch, multipliers: Mapping[str, float]) -> dict[str, float]:
        """The multipliers after a step with these rows."""
        moved = {}
        for name, tau in self.constraints.items():
            short = tau - float(component(rows, name, "constraints").mean())
            moved[name] = min(max(multipliers[name] + self.rate * short, 0.0), self.limit)
        return moved


class Multipliers:
    """The estimator of a run, with its multipliers."""

    def __init__(self, options: LagrangianEstimator) -> None:
        self._options = options
        self.values = dict.fromkeys(options.constraints, options.start)

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """The rows with their advantages; the multipliers are then those of the next step."""
        filled = rows.with_columns(advantage_n=self._options.combined(rows, self.values))
        metrics = {f"lambda_{name}": torch.tensor(value) for name, value in self.values.items()}
        self.values = self._options.moved(rows, self.values)
        return filled, metrics

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values |= {name: float(value) for name, value in state.items() if name in self.values}
