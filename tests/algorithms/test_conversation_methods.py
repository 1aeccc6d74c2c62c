"""The agent methods on conversations, each against its paper's formula."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev

import pytest
import torch

from megatron_gvpo.algorithms.advantages.m_grpo import RoleEstimator
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.conversation_rewards import count, environment_reward
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import TrainBatch


def rollout(turns: list[Turn], own: int, **others: object) -> Rollout:
    return Rollout([5] * own, [-0.5] * own, "", "stop", turns=turns, **others)


def group(*rollouts: Rollout) -> Group:
    return Group(Prompt("p", (1, 2), "p"), list(rollouts))


def spans(rows: TrainBatch, values: torch.Tensor) -> list[list[float]]:
    return [values[a:b].tolist() for a, b in pairwise(rows.offsets)]


def standardised(values: list[float]) -> list[float]:
    """GRPO's advantages."""
    return [(v - fmean(values)) / (stdev(values) + 1e-6) for v in values]


def delegation() -> TrainBatch:
    """Planners that call searchers, which start from contexts of their own, and one that calls a coder."""
    planner = [
        Turn(0, agent="planner", reward=0.0),
        Turn(1, -1, 1, (8,), "searcher", 0.2),
        Turn(2, 1, None, (9,), "searcher", 0.4),  # the same call goes on
        Turn(4, 0, None, (7,), "planner", 0.0),
    ]
    twice = [
        Turn(0, agent="planner"),
        Turn(2, -1, 1, (8,), "searcher", 1.0),
        Turn(3, 1, 2, (6,), "searcher", 0.5),  # another call that begins with the same two tokens
        Turn(4, 0, None, (7, 7), "planner"),
        Turn(5, 3, None, (), "coder", 0.3),
    ]
    alone = [Turn(0, agent="planner"), Turn(1, 0, None, (7,), "planner")]
    groups = [group(rollout(planner, 5), rollout(twice, 6), rollout(alone, 3))]
    rows = TrainBatch.from_groups(groups, turn_weight=1.0)
    return rows.with_columns(reward_n=torch.tensor([1.0, 0.0, 0.5]))


def test_m_grpo_compares_the_calls_of_every_agent_with_those_of_the_same() -> None:
    rows, block = delegation(), RoleEstimator(blend=0.5)
    roles = [[(call.role, call.spans) for call in block.calls(rows, row)] for row in range(3)]
    assert roles[0] == [("searcher", [(1, 2), (2, 4)])], "one call of two turns"
    assert roles[1] == [("searcher", [(2, 3)]), ("searcher", [(3, 4)]), ("coder", [(5, 6)])]
    assert roles[2] == []
    advantage_r, metrics = block(rows)
    main = standardised([1.0, 0.0, 0.5])
    # v = (outcome + local) / 2; a rollout's calls count half each where it makes two.
    calls = [[(1.0 + 0.6) / 2], [(0.0 + 1.0) / 2, (0.0 + 0.5) / 2]]
    mean = fmean(map(fmean, calls))
    std = sum(fmean((v - mean) ** 2 for v in values) for values in calls) ** 0.5
    first, second = ([(v - mean) / (std + 1e-6) for v in values] for values in calls)
    wanted = [
        [main[0], *[first[0]] * 3, main[0]],
        [main[1], main[1], *second, main[1], 0.0],  # the only coder has nobody to be compared with
        [main[2]] * 3,
    ]
    for advantages, of_row in zip(spans(rows, advantage_r), wanted, strict=True):
        assert advantages == pytest.approx(of_row, abs=1e-5)
    assert metrics["sub_agent_tokens"] == pytest.approx(6 / 14)


def test_m_grpo_aligns_calls_and_takes_a_component_for_the_local_reward() -> None:
    rows = replace(delegation(), component_n={"format": torch.tensor([1.0, 0.2, 0.0])})
    advantage_r, _ = RoleEstimator(blend=0.25, segments=1, local="format")(rows)
    sub = standardised([0.25 * 1.0 + 0.75 * 1.0, 0.75 * 0.2])
    advantages = spans(rows, advantage_r)
    assert advantages[0][1:4] == pytest.approx([sub[0]] * 3, abs=1e-5)
    assert advantages[1][2:4] == pytest.approx([sub[1], 0.0], abs=1e-5), "calls beyond `segments` have none"


def test_m_grpo_without_agents_is_grpo() -> None:
    rows = replace(delegation(), turns=[[Turn(0), Turn(2, 0, None, (7,))]] * 3)
    wanted = torch.tensor(standardised([1.0, 0.0, 0.5]))[rows.seq_r]
    torch.testing.assert_close(RoleEstimator()(rows)[0], wanted, atol=1e-5, rtol=0)


def test_stratified_grpo_compares_conversations_of_as_many_tool_calls() -> None:
    """A_SAN over the group's conversations with the same number of calls, blended with GRPO over all."""
    calls, rewards = [0, 0, 0, 2, 2, 2], [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    talks = []
    for number, reward in zip(calls, rewards, strict=True):
        turns = [Turn(i, i - 1, None, (7,)) for i in range(number + 1)]
        counts = {"tool_calls": float(number)} if number else {}
        talks.append(rollout(turns, number + 1, counts=counts, reward=reward))
        talks[-1].rewards = {"calls": count(Prompt("p", (1,), ""), talks[-1], of="tool_calls")}
        assert count(Prompt("p", (1,), ""), talks[-1], of="turns") == number + 1
    rows = TrainBatch.from_groups([group(*talks)])
    estimator = AlgorithmConfig.model_validate(
        {"recipe": "stratified_grpo", "estimator": {"stratum": "calls"}}
    ).estimator
    san = [0.577350, -1.154701, 0.577350, -0.577350, -0.577350, 1.154701]
    wanted = [0.8 * s + 0.2 * a for s, a in zip(san, standardised(rewards), strict=True)]
    assert estimator(rows)[0].tolist() == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(ValueError, match="turns of a response that is not a conversation"):
        count(Prompt("p", (1,), ""), rollout([], 1), of="turns")


def test_c_grpo_counts_rubrics_only_where_the_environment_says_right() -> None:
    """r = (1 - a) outcome + a rubric where the outcome is right, else 0, with a = 0.3."""
    talks = []
    for outcome, rubric in zip([1.0, 1.0, 0.0, 0.0], [0.6, 0.3, 0.6, 0.0], strict=True):
        turns = [Turn(0, reward=0.0), Turn(1, 0, None, (7,), reward=outcome)]
        talks.append(rollout(turns, 2, counts={"environment_reward": outcome}))
        paid = environment_reward(Prompt("p", (1,), ""), talks[-1])
        talks[-1].rewards = {"right": paid, "rubric": rubric}
    [shaper] = AlgorithmConfig.model_validate("c_grpo").shapers
    [shaped] = shaper([group(*talks)], 1)
    assert [r.reward for r in shaped.rollouts] == pytest.approx([0.88, 0.79, 0.0, 0.0])
    assert [r.turns for r in shaped.rollouts] == [r.turns for r in talks]
