"""Runs a method's shapers on scored groups, on all ranks alike.

A shaper changes rewards, masks or drops responses before the estimator reads them (`algorithm.shapers`). Most
only compute, and every rank computes the same. One that calls other programs, such as a judge, may answer
differently the second time, so rank 0 alone calls it and every rank gets its rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_gvpo.algorithms.shapers.base import rewarded
from megatron_gvpo.core.collectives import call_on_rank0
from megatron_gvpo.groups import Group

if TYPE_CHECKING:
    from megatron_gvpo.algorithms.shapers.base import Shaper


def run_shapers(
    shapers: Sequence[Shaper], groups: list[Group], step: int
) -> tuple[list[Group], dict[str, int]]:
    """Run `algorithm.shapers`, one after the other, on every rank alike. A collective.

    Args:
        shapers: in the order of the configuration; each gets the groups that the one before has left.
        groups: the batch's scored groups, equal on all ranks.
        step: the training step, which schedules of shapers read and errors name.

    Returns the groups that are left, and how many each shaper dropped, by its key and name, such as
    "algorithm.shapers.0 (drop)". Raises RolloutError on every rank as `run_shaper` does.
    """
    remaining, dropped = groups, dict[str, int]()
    for i, shaper in enumerate(shapers):
        before, remaining = len(remaining), run_shaper(shaper, remaining, step)
        if before > len(remaining):
            dropped[f"algorithm.shapers.{i} ({shaper.name})"] = before - len(remaining)
    return remaining, dropped


def run_shaper(shaper: Shaper, groups: list[Group], step: int) -> list[Group]:
    """Run `shaper(groups, step)` on every rank, or on rank 0 alone if it calls other programs.

    A collective. Raises RolloutError on every rank if such a program fails, or if a reward is not finite.
    """
    if not shaper.outside:
        return shaper(groups, step)

    def rewards_from_outside() -> list[list[float]]:
        rewards = [group.rewards for group in shaper(groups, step)]
        if wrong := [reward for of_group in rewards for reward in of_group if not math.isfinite(reward)]:
            raise ValueError(f"{len(wrong)} rewards are not finite, such as {wrong[0]}")
        return rewards

    rewards: list[list[float]] = call_on_rank0(
        f"step {step}: algorithm.shapers: {shaper.name}", rewards_from_outside
    )
    return [rewarded(group, group_rewards) for group, group_rewards in zip(groups, rewards, strict=True)]
