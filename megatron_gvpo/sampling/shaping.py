"""Runs the shapers of a method on a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_gvpo.algorithms.shapers.base import Shaper, rewarded
from megatron_gvpo.groups import Group
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


def run_shapers(
    shapers: Sequence[Shaper], groups: list[Group], step: int
) -> tuple[list[Group], dict[str, int]]:
    """Run `algorithm.shapers`, one after the other, on every rank alike. A collective.

    Returns the groups that are left, and how many each shaper dropped, by its key and name.
    """
    left, dropped = groups, dict[str, int]()
    for i, shaper in enumerate(shapers):
        before, left = len(left), shaped(shaper, left, step)
        if before > len(left):
            dropped[f"algorithm.shapers.{i} ({shaper.name})"] = before - len(left)
    return left, dropped
