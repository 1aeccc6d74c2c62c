"""NGRPO: learn from groups that all failed, by virtual successes (arXiv 2509.18851)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.base import Advantage, Metrics
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class VirtualEstimator(Advantage):
    """A_i = (r_i - m) / (s + eps), fp32 [n]: m, s of the rewards and of `count` virtual ones, each `reward`.

    A group in which every response fails has negative advantages. One whose rewards all equal `reward` has
    none.
    """

    needs_group: ClassVar[bool] = False  # a response can be compared with the virtual ones

    name: Literal["virtual"] = "virtual"
    reward: float = 1.0
    count: PositiveInt = 1
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        reward_n = rows.reward_n.double()
        index_n, size_g = rows.groups
        k_n = size_g[index_n]
        all_n = k_n + self.count
        mean_n = (k_n * rows.group_mean(reward_n) + self.count * self.reward) / all_n
        squares_n = k_n * rows.group_mean((reward_n - mean_n) ** 2) + self.count * (self.reward - mean_n) ** 2
        std_n = (squares_n / (all_n - self.ddof)).sqrt()
        return ((reward_n - mean_n) / (std_n + self.eps)).float(), {}
