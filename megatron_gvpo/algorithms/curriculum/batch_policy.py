"""The choice of the sampled groups that make up a training batch: all of them, or GPG's accumulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.base import Block, Component
from megatron_gvpo.algorithms.shapers.base import value_of
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.groups import Group, group_fields, group_of


class BatchPolicy(Protocol):
    """Takes sampled batches until it can return a batch to train on; checkpoints contain its state."""

    metrics: dict[str, float]  # metrics of the last batch that was returned

    def offer(self, groups: Sequence[Group]) -> list[Group] | None:
        """The groups to train on, or None: sample another batch and offer that."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The groups that are kept between offers, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BatchRule(Block):
    """A rule by which sampled groups become a training batch."""

    name: str

    @property
    def reads_rewards(self) -> bool:
        """True if the total rewards of responses decide."""
        return False

    def build(self, batch_groups: int) -> BatchPolicy:
        """The rule at work in a run whose batches have nominally `batch_groups` groups."""
        raise NotImplementedError


class KeepAll(BatchRule):
    """Train on every batch as it was sampled."""

    name: Literal["keep_all"] = "keep_all"

    def build(self, batch_groups: int) -> BatchPolicy:
        return Everything()


class Accumulate(BatchRule):
    """GPG's thresholding (arXiv 2504.02546, section 2.2): enough groups whose rewards differ.

    With threshold 1 it is DAPO's dynamic sampling (arXiv 2503.14476 eq. 11): the batch is refilled until all
    groups are valid.

    A group is valid when its rewards differ. While fewer than `threshold` (beta_th) times the nominal
    number of groups are valid, the valid ones are kept and another batch is sampled, up to `max_rounds`
    batches (20 in the paper's code). The nominal number includes groups that members add. See `Accumulator`
    for the groups of the batch.
    """

    needs_rewards: ClassVar[bool] = True
    drops_equal_rewards: ClassVar[bool] = True

    name: Literal["accumulate"] = "accumulate"
    threshold: float = Field(0.6, gt=0, le=1)
    max_rounds: PositiveInt = 20
    by: Component | None = None  # a component of the reward; null: the total reward. DAPO refills by accuracy

    @property
    def components_read(self) -> tuple[Component, ...]:
        return () if self.by is None else (self.by,)

    @property
    def reads_rewards(self) -> bool:
        return self.by is None

    def build(self, batch_groups: int) -> BatchPolicy:
        return Accumulator(batch_groups, self.threshold, self.max_rounds, self.by)


class Everything:
    """Returns every batch unchanged."""

    metrics: dict[str, float] = {}  # noqa: RUF012 - never filled

    def offer(self, groups: Sequence[Group]) -> list[Group] | None:
        return list(groups)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Accumulator:
    """Every valid group of all rounds, plus groups without signal up to the nominal batch size.

    The filling comes from the last round, so that B / (B - M) of the batch is GPG's alpha. Only groups
    without signal are left out, which `metrics` count as "dropped_groups"; "gave_up" is 1 if `max_rounds`
    batches had too few valid groups. A batch may have more groups than the nominal number, because no valid
    group is thrown away.
    """

    def __init__(
        self, batch_groups: int, threshold: float, max_rounds: int, by: Component | None = None
    ) -> None:
        self.by = by
        self.batch_groups = batch_groups
        self.threshold = threshold
        self.max_rounds = max_rounds
        self.metrics: dict[str, float] = {}
        self._pending: list[Group] = []
        self._rounds = 0
        self._offered = 0

    def offer(self, groups: Sequence[Group]) -> list[Group] | None:
        self._rounds += 1
        self._offered += len(groups)
        valid = [is_valid(group, self.by) for group in groups]
        n_valid = len(self._pending) + sum(valid)
        nominal = max(self.batch_groups, len(groups))  # members may add groups
        # The product may be rounded up: 0.55 * 100 is above 55.
        has_enough = n_valid / nominal >= self.threshold
        if not has_enough and self._rounds < self.max_rounds:
            self._pending += [group for group, keep in zip(groups, valid, strict=True) if keep]
            return None

        batch, room = list(self._pending), nominal - n_valid
        for group, keep in zip(groups, valid, strict=True):  # in sampling order, so mini-batches stay mixed
            if keep or room > 0:
                batch.append(group)
                room -= not keep
        self.metrics = {
            "rounds": self._rounds,
            "valid_groups": n_valid,
            "dropped_groups": self._offered - len(batch),
            "gave_up": float(not has_enough),
        }
        self._pending, self._rounds, self._offered = [], 0, 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        pending = [group_fields(group) for group in self._pending]
        return {"pending": pending, "rounds": self._rounds, "offered": self._offered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = [group_of(values) for values in state["pending"]]
        self._rounds, self._offered = state["rounds"], state["offered"]


def is_valid(group: Group, by: Component | None = None) -> bool:
    """True if the rewards of a group (or the component `by`) differ, in fp32 as training sees them."""
    values = [value_of(rollout, by) for rollout in group.rollouts]
    return len(torch.tensor(values, dtype=torch.float32).unique()) > 1
