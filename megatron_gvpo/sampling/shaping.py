"""Runs the shapers of a method on every batch, and ends a run of which they leave nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from megatron_gvpo.algorithms.shapers.base import Shaper, rewarded
from megatron_gvpo.groups import Group
from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.sampling.on_rank0 import call_on_rank0


def shaped(shaper: Shaper, groups: list[Group], step: int) -> list[Group]:
    """`shaper(groups, step)` on every rank. One that asks outside runs on rank 0 alone. A collective."""
    if not shaper.outside:
        return shaper(groups, step)

    def ask() -> list[list[float]]:
        rewards = [group.rewards for group in shaper(groups, step)]
        if wrong := [reward for mine in rewards for reward in mine if not math.isfinite(reward)]:
            raise ValueError(f"{len(wrong)} rewards are not finite, such as {wrong[0]}")
        return rewards

    rewards = call_on_rank0(f"step {step}: algorithm.shapers: {shaper.name}", ask)
    return [rewarded(group, mine) for group, mine in zip(groups, rewards, strict=True)]


class Shapers:
    """Runs `algorithm.shapers`, one after the other, on every rank alike.

    Raises RolloutError where they leave nothing of `limit` batches in a row: the run would sample for ever.
    """

    def __init__(self, shapers: Sequence[Shaper], limit: int) -> None:
        self._shapers, self._limit = shapers, limit
        self._forget()

    def _forget(self) -> None:
        self._batches, self._rewards = 0, list[float]()
        self._dropped = Counter[str]()  # groups, by the shaper

    def __call__(self, groups: list[Group], step: int) -> list[Group]:
        left = groups
        for i, shaper in enumerate(self._shapers):
            before, left = len(left), shaped(shaper, left, step)
            self._dropped[f"algorithm.shapers.{i} ({shaper.name})"] += before - len(left)
        if left:
            self._forget()
            return left
        self._batches += 1
        self._rewards += [reward for group in groups for reward in group.rewards]
        if self._batches < self._limit:
            return left
        dropped = ", ".join(f"{name} dropped {count}" for name, count in self._dropped.most_common() if count)
        low, high = min(self._rewards), max(self._rewards)
        raise RolloutError(
            f"step {step}: nothing was left to train on of {self._batches} batches in a row: {dropped} "
            f"groups, whose rewards were from {low:g} to {high:g}. If these are not what they should be, see "
            "rewards.components; otherwise loosen these shapers, take other prompts or a larger rollout.n, "
            "or raise train.max_empty_batches"
        )
