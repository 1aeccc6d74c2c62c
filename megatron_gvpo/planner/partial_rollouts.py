"""Predicts the savings of partial rollouts of colocated servers (`rollout.over_sampling_prompts`).

A simulation of consecutive steps: each begins with some prompts more than it trains, ends when enough groups
are complete, and leaves the rest to the next step, whose engines read prompt and tokens so far again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

from megatron_gvpo.planner.architecture import Architecture, Gpu
from megatron_gvpo.planner.step_time import decoded, fits, prefill_seconds
from megatron_gvpo.planner.workload import Workload

# Steps of a simulation, and the number of last steps that count: short and long steps alternate in twos or
# threes.
_STEPS, _MEASURED = 10, 6


@dataclass(frozen=True)
class PartialRollouts:
    """Predicted means over steps."""

    prompts: int  # rollout.over_sampling_prompts
    oldest: int  # rollout.async_steps
    seconds: float  # the time until enough groups are complete
    carried: float  # share of the trained responses that several weight versions sampled


@dataclass(eq=False)
class _Group:
    begun: int  # the step in which the group was requested
    lengths: list[float]  # lengths of the complete responses, in tokens
    sampled: list[float] = field(default_factory=list)  # tokens so far
    carried: set[int] = field(default_factory=set)  # responses that were continued in a later step


@cache
def choices(model: Architecture, gpu: Gpu, engines: int, tp: int, work: Workload) -> list[PartialRollouts]:
    """Predicts a quarter more prompts that wait for one step at most, and a half more that wait for two."""
    settings = ((max(1, work.prompts // 4), 1), (max(1, work.prompts // 2), 2))
    return [simulated(model, gpu, engines, tp, work, extra, oldest) for extra, oldest in settings]


def simulated(
    model: Architecture, gpu: Gpu, engines: int, tp: int, work: Workload, extra: int, oldest: int
) -> PartialRollouts:
    """Predicts steps with `extra` further prompts, none trained more than `oldest` steps late.

    The responses to a prompt have independent lengths: with similar lengths, partial rollouts would save
    more. Seconds are infinite if an engine of `tp` GPUs does not fit the longest response.
    """
    if not fits(model, gpu, tp, work):
        return PartialRollouts(extra, oldest, math.inf, 0.0)
    generator = random.Random(0)
    groups: list[_Group] = []
    seconds, carried = list[float](), list[float]()
    for step in range(_STEPS):
        missing = work.prompts + extra - len(groups)
        lengths = work.lengths.sample(missing * work.k)
        generator.shuffle(lengths)
        for i in range(missing):
            own = lengths[i * work.k : (i + 1) * work.k]
            groups.append(_Group(step, own, [0.0] * work.k))
        took, trained = _run(model, gpu, engines, tp, work, groups, step - oldest)
        seconds.append(took)
        carried.append(sum(len(group.carried) for group in trained) / (work.prompts * work.k))
        leaving = set(trained)
        groups = [group for group in groups if group not in leaving]
    return PartialRollouts(extra, oldest, fmean(seconds[-_MEASURED:]), fmean(carried[-_MEASURED:]))


def _run(
    model: Architecture,
    gpu: Gpu,
    engines: int,
    tp: int,
    work: Workload,
    groups: Sequence[_Group],
    due: int,
) -> tuple[float, list[_Group]]:
    """Samples until as many groups as a step trains are complete, and all that were requested by step `due`.

    Returns the seconds, and the groups that are trained. Unfinished responses get the tokens that were
    sampled so far.
    """
    ends: dict[int, float] = {}  # seconds at which each group is complete
    runs = []
    unfinished: list[list[tuple[int, int]]] = [[] for _ in range(engines)]  # group and response
    for g, group in enumerate(groups):
        for i, length in enumerate(group.lengths):
            if group.sampled[i] < length:
                unfinished[g % engines].append((g, i))
    for members in unfinished:
        before = [work.prompt_tokens + groups[g].sampled[i] for g, i in members]
        rest = [groups[g].lengths[i] - groups[g].sampled[i] for g, i in members]
        # A group's responses share the prompt, and each one's own tokens are read again.
        read = sum(before) - work.prompt_tokens * (len(members) - len({g for g, _ in members}))
        begin = prefill_seconds(model, gpu, tp, read, fmean(before)) if members else 0.0
        run = decoded(model, gpu, tp, work, list(zip(before, rest, strict=True)))
        for (g, _), end in zip(members, run.ends, strict=True):
            ends[g] = max(ends.get(g, 0.0), begin + end)
        runs.append((members, begin, run))
    took = sorted(ends.get(g, 0.0) for g in range(len(groups)))[work.prompts - 1]
    took = max(took, *(ends.get(g, 0.0) for g, group in enumerate(groups) if group.begun <= due), 0.0)
    for members, begin, run in runs:
        clock = run.clock_at(max(0.0, took - begin))
        for (g, i), at, end in zip(members, run.begins, run.ends, strict=True):
            group = groups[g]
            if begin + end <= took:
                group.sampled[i] = group.lengths[i]
            elif clock > at:
                group.sampled[i] += clock - at
                group.carried.add(i)
    return took, [group for g, group in enumerate(groups) if ends.get(g, 0.0) <= took][: work.prompts]
