"""Advantages normalised otherwise than by the group alone: by component or stratum, or with other rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.advantages.estimator import component, normalised, whitened
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


# GDPO: normalise every component of the reward separately (NVIDIA, arXiv 2601.05242).


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


# GRAO: a group and a reference answer beside it (arXiv 2508.07750).


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


# NGRPO: learn from groups that all failed, by virtual successes (arXiv 2509.18851).


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


# Stratified GRPO: compare like with like (arXiv 2510.06214).


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
