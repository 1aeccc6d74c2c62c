"""Advantages that are not only normalised by the group.

They are normalised by component or stratum, by a Beta density, or with other rewards or constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.advantages.estimator import component, normalised, rewards_differ, whitened
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.errors import RewardError
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


# GDPO: normalise every component of the reward separately (NVIDIA, arXiv 2601.05242).


class ComponentEstimator(Advantage):
    """A_i = sum_j w_j (r_ij - mean_j) / (std_j + eps), j over the reward's components; fp32 [n].

    Mean and std are of the group; then whitened over the responses that the optimizer step trains ((A - mean)
    / (std + 1e-4), in responses as in TRL or in tokens as in verl). `weights`: of the components that count,
    by name; null: all, with weight 1. These weights apply after the normalisation, unlike those of
    `rewards.components`.
    """

    by_components: ClassVar[bool] = True

    name: Literal["components"] = "components"
    weights: dict[str, float] | None = None
    # Whiten over the batch: not at all, with each response once, or with each token once.
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
    demonstration k (imitate A_y - align mean A). Goes with the loss pg and sequence_mean. The paper's values
    of its two coefficients are unknown here: 1 is a choice.
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

    A group in which every response fails has negative advantages. A group whose rewards all equal `reward`
    has advantages of 0.
    """

    needs_group: ClassVar[bool] = False  # a response can be compared with the virtual ones

    name: Literal["virtual"] = "virtual"
    reward: float = 1.0
    count: PositiveInt = 1
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        virtual = rows.reward_n.new_tensor(self.reward).double()  # rounded to the dtype of the rewards
        reward_n = rows.reward_n.double()
        index_n, size_g = rows.groups
        k_n = size_g[index_n]
        all_n = k_n + self.count
        mean_n = (k_n * rows.group_mean(reward_n) + self.count * virtual) / all_n
        squares_n = k_n * rows.group_mean((reward_n - mean_n) ** 2) + self.count * (virtual - mean_n) ** 2
        std_n = (squares_n / (all_n - self.ddof)).sqrt()
        # If all are equal, only rounding errors would be divided by the std.
        differ_n = rewards_differ(rows) | (reward_n != virtual)
        return ((reward_n - mean_n) / (std_n + self.eps)).where(differ_n, 0).float(), {}


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


# BNPO: scaled by a Beta density (arXiv 2506.02864).

LARGEST = 1e6  # weight, as in the paper's code


class BNPO(Advantage):
    """A_i = (r_i - p) / Beta(p; a, b), p the mean reward of the group, rewards in [0, 1]; fp32 [n].

    a and b come from the mean m and variance v (ddof 1) of p over the prompts of the optimizer step:

        c = m (1 - m) / v - 1,  a = max(1, 1 + c m / 3),  b = max(1, 1 + c (1 - m) / 3)

    a = b = 1 is REINFORCE with a baseline, a = b = 3/2 GRPO up to a constant. `components`: the mean of the
    advantages of every component of the reward, instead of the advantage of the whole reward.
    """

    name: Literal["bnpo"] = "bnpo"
    components: bool = False

    @property
    def by_components(self) -> bool:  # type: ignore[override]
        return self.components

    @property
    def components_read(self) -> tuple[Component, ...]:
        return (0,) if self.components else ()

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        values = list(rows.component_n.values()) if self.components else [rows.reward_n]
        parts = [self._advantage(rows, value_n.double()) for value_n in values]
        advantage_n = torch.stack([advantage_n for advantage_n, _, _ in parts]).mean(0)
        return advantage_n.float(), {"beta_a": parts[0][1], "beta_b": parts[0][2]}

    def _advantage(self, rows: TrainBatch, reward_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if reward_n.min() < 0 or reward_n.max() > 1:
            needed = "components of the reward" if self.components else "rewards"
            remedy = "components=false takes the whole reward" if self.components else "map them by `affine`"
            raise RewardError(
                f"algorithm.estimator=bnpo needs {needed} in [0, 1], and there are some from "
                f"{float(reward_n.min()):g} to {float(reward_n.max()):g}: {remedy}"
            )
        p_n = rows.group_mean(reward_n)
        index_n, size_g = rows.groups
        p_g = torch.zeros(len(size_g), dtype=p_n.dtype).index_copy(0, index_n, p_n)
        a, b = _shape(p_g)
        density_n = torch.exp(_log_beta(p_n, a, b))
        weight_n = (1 / density_n).clamp(max=LARGEST)
        # A group without differences has no signal, whatever its density.
        return ((reward_n - p_n) * weight_n).where(reward_n != p_n, 0), a, b


def _shape(p_g: Tensor) -> tuple[Tensor, Tensor]:
    """Beta's a and b, scalars."""
    mean, one = p_g.mean(), torch.ones((), dtype=p_g.dtype)
    variance = p_g.var() if len(p_g) > 1 else torch.zeros_like(mean)
    if variance == 0:
        return one, one  # the spread is unknown: plain REINFORCE with a baseline
    c = mean * (1 - mean) / variance - 1
    return torch.maximum(one, 1 + c * mean / 3), torch.maximum(one, 1 + c * (1 - mean) / 3)


def _log_beta(p_n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    inside_n = p_n.clamp(1e-12, 1 - 1e-12)
    norm = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    return norm + (a - 1) * inside_n.log() + (b - 1) * (1 - inside_n).log()


# FGRPO: rewards under constraints, by Lagrange multipliers that follow them (arXiv 2604.08476).


class LagrangianEstimator(Advantage):
    """A_i = A_task + sum_j lambda_j A_j, each (value - mean) / (std + eps) over the group; fp32 [n].

    A_task is the advantage of the whole reward, A_j that of its component j, whose mean shall be at least
    tau_j; `constraints` gives tau_j by the name of j. After every optimizer step

        lambda_j <- clip(lambda_j + rate (tau_j - mean of c_j over the step's responses), 0, limit).

    Give these components the weight 0 in `rewards.components`, or they count twice. rate and limit were not
    read in the paper, but in descriptions by others. The multipliers go into checkpoints.
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
        """Advantages with the multipliers at their start; `Multipliers` has those that a run moves."""
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
        """The rows with their advantages; then moves the multipliers for the next step."""
        filled = rows.with_columns(advantage_n=self._options.combined(rows, self.values))
        metrics = {f"lambda_{name}": torch.tensor(value) for name, value in self.values.items()}
        self.values = self._options.moved(rows, self.values)
        return filled, metrics

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values |= {name: float(value) for name, value in state.items() if name in self.values}
