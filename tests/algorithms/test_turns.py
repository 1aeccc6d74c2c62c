"""Rewards and ratios of a conversation's turns, against their definitions token by token in fp64."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from helpers.inputs.rows import make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.algorithms.advantages.gae import GAE
from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.groups import Group, Prompt, Rollout, group_fields, group_of
from megatron_gvpo.settings.rewards import RewardConfig, RewardsConfig
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import BatchTotals, TrainBatch


class Talk(NamedTuple):
    """A conversation: for every turn, its number of own tokens and what the environment paid for it."""

    turns: list[tuple[int, float | None]]
    weight: float  # of the component `environment`
    others: float  # what the other components give

    @property
    def own(self) -> int:
        return sum(tokens for tokens, _ in self.turns)

    @property
    def reward(self) -> float:
        return self.weight * sum(paid or 0.0 for _, paid in self.turns) + self.others

    def rollout(self) -> Rollout:
        turns, begin = [], 0
        for number, (tokens, paid) in enumerate(self.turns):
            turns.append(Turn(begin, number - 1, None, (7,) * number, reward=paid))
            begin += tokens
        return Rollout([5] * begin, [-0.5] * begin, "", "stop", turns=turns, reward=self.reward)


def batch(talks: list[Talk]) -> TrainBatch:
    groups = [Group(Prompt(str(i), (1,), ""), [talk.rollout()]) for i, talk in enumerate(talks)]
    rows = TrainBatch.from_groups(groups, turn_weight=talks[0].weight)
    return rows.with_columns(
        **dict(zip(("value_r", "old_logp_r", "ref_logp_r"), torch.randn(3, rows.offsets[-1]), strict=True))
    )


def advantages_by_definition(
    talk: Talk, values: list[float], kl: list[float], gamma: float, lam: float, kl_coef: float
) -> list[float]:
    """GAE over the steps of a conversation, which are its own tokens: turn after turn, token after token."""
    steps = [(paid or 0.0) if i == tokens - 1 else 0.0 for tokens, paid in talk.turns for i in range(tokens)]
    rewards = [talk.weight * paid - kl_coef * k for paid, k in zip(steps, kl, strict=True)]
    rewards[-1] += talk.others
    advantages, ahead, next_value = list[float](), 0.0, 0.0
    for reward, value in reversed(list(zip(rewards, values, strict=True))):
        ahead = reward + gamma * next_value - value + gamma * lam * ahead
        next_value = value
        advantages.insert(0, ahead)
    return advantages


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3]))
def test_gae_steps_over_own_tokens_and_pays_every_turn_at_its_last(seed: int, kl_coef: float) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    gamma, lam, weight = rng.random(), rng.random(), rng.choice([1.0, -0.5])

    def turns() -> list[tuple[int, float | None]]:
        return [(rng.randint(1, 4), rng.choice([None, rng.random()])) for _ in range(rng.randint(1, 4))]

    talks = [Talk(turns(), weight, rng.random()) for _ in range(3)]
    rows = batch(talks)
    filled, _ = GAE(gamma=gamma, lam=lam, kl_coef=kl_coef, whiten="none").fill(rows)
    for i, talk in enumerate(talks):
        span = slice(rows.offsets[i], rows.offsets[i + 1])
        values = rows.value_r[span].double().tolist()
        kl = (rows.old_logp_r[span].double() - rows.ref_logp_r[span].double()).tolist()
        wanted = advantages_by_definition(talk, values, kl, gamma, lam, kl_coef)
        assert filled.advantage_r[span].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        returns = [a + v for a, v in zip(wanted, values, strict=True)]
        assert filled.return_r[span].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)


def test_the_rewards_of_the_steps_add_up_to_the_conversations_reward() -> None:
    """With gamma and lambda 1 and no values, the first token's advantage is the sum of all rewards."""
    talks = [Talk([(2, 0.25), (1, None), (3, 1.0)], 2.0, 0.5), Talk([(1, 0.5)], 2.0, -1.0)]
    rows = batch(talks)
    advantage_r, _ = GAE(values="zero", lam=1.0, whiten="none")(rows)
    assert (
        advantage_r[rows.offsets[0]].item() == 3.0 == talks[0].reward
        and advantage_r[rows.offsets[1]].item() == 0.0
    )
    assert advantage_r[:6].tolist() == [3.0, 3.0, 2.5, 2.5, 2.5, 2.5], "a turn is paid where it ends"
    assert rows.reward_n.tolist() == [3.0, 0.0]
    shaped = rows.with_columns(reward_n=rows.reward_n - 1)  # by a shaper: paid at the end
    assert GAE(values="zero", lam=1.0, whiten="none")(shaped)[0][:6].tolist() == [2.0, 2.0, *[1.5] * 4]


def test_without_rewards_of_turns_all_is_paid_at_the_end_bit_for_bit() -> None:
    rows = make_rows([[0.3, 0.7], [0.1]]).with_columns(value_r=None)
    nothing = rows.with_columns(turn_reward_r=torch.zeros(rows.offsets[-1]))
    block = GAE(values="zero", gamma=0.9, lam=0.7, kl_coef=0.1)
    assert torch.equal(block(rows)[0], block(nothing)[0])
    unpaid = [Talk([(2, None), (2, 0.0)], 1.0, 0.3), Talk([(2, 0.0)], 1.0, 0.0)]
    assert batch(unpaid).turn_reward_r is None
    single = Group(Prompt("p", (1,), ""), [Rollout([5, 6], [-1.0, -1.0], "", "stop", reward=0.3)])
    together = TrainBatch.from_groups(
        [Group(Prompt("t", (1,), ""), [Talk([(1, 1.0)], 1.0, 0).rollout()]), single], turn_weight=1.0
    )
    alone = GAE(values="zero", gamma=0.9, whiten="none")(TrainBatch.from_groups([single]))[0]
    assert torch.equal(GAE(values="zero", gamma=0.9, whiten="none")(together)[0][1:], alone)


def test_a_turn_without_tokens_is_paid_with_the_token_before_it() -> None:
    rows = batch([Talk([(0, 1.0), (2, None), (0, 4.0), (1, 2.0)], 1.0, 0.0)])
    assert rows.turn_reward_r.tolist() == [1.0, 4.0, 2.0] and rows.turn_r.tolist() == [1, 1, 3]
    silent = batch([Talk([(0, 1.0)], 1.0, 0.0), Talk([(1, 1.0)], 1.0, 0.0)])
    assert silent.turn_reward_r.tolist() == [1.0]


def test_the_weight_of_the_environments_component_is_that_of_its_turns() -> None:
    own = RewardConfig(name="mine", function="m:f")
    paid = RewardConfig(name="environment", weight=0.5)
    assert RewardsConfig(components=(own, paid)).turn_weight == 0.5
    assert RewardsConfig(components=(own,)).turn_weight == 0.0
    of_a_user = RewardConfig(name="environment", function="m:f")
    assert RewardsConfig(components=(of_a_user,)).turn_weight == 0.0


def test_rewards_of_turns_survive_a_checkpoint() -> None:
    rollout = Talk([(1, None), (2, 0.5)], 1.0, 0.0).rollout()
    group = Group(Prompt("p", (1,), ""), [rollout])
    assert group_of(json.loads(json.dumps(group_fields(group)))) == group
    former = group_fields(group)
    former["rollouts"][0]["turns"] = [turn[:-1] for turn in former["rollouts"][0]["turns"]]
    assert [turn.reward for turn in group_of(former).rollouts[0].turns] == [None, None]


def test_a_ratio_of_a_turn_is_the_geometric_mean_of_its_tokens() -> None:
    rows = replace(
        make_rows([[1.0, 0.0]], [4, 3]),
        turns=[[Turn(0), Turn(1, 0, None, (9,))], []],
        old_logp_r=torch.tensor([-1.0, -1.1, -1.2, -1.3, -0.5, -0.6, -0.7]),
        advantage_n=torch.tensor([1.0, 1.0]),
    )
    logp_r = torch.tensor([-0.9, -1.0, -1.0, -1.0, -0.4, -0.7, -0.4])
    change = [0.1, 0.1, 0.2, 0.3, 0.1, -0.1, 0.3]
    turns = [(0, 1), (1, 4), (4, 7)]
    wanted = [0.0] * 7
    for first, end in turns:
        ratio = math.exp(sum(change[first:end]) / (end - first))
        for t in range(first, end):
            wanted[t] = -ratio / 7
    loss = PPO(ratio="turn", clip_high=0.5, aggregation="token_mean")
    _, metrics = token_weights(loss, rows, logp_r, BatchTotals.of(rows))
    assert metrics["loss"].item() == pytest.approx(sum(wanted), rel=1e-5)
    by_sequence = PPO(ratio="sequence", clip_high=0.5, aggregation="token_mean")
    single = replace(rows, turns=None)
    weights = [
        token_weights(block, single, logp_r, BatchTotals.of(single))[0] for block in (loss, by_sequence)
    ]
    assert torch.equal(*weights), "a single response is one turn"


def test_the_parts_of_responses_are_told_apart_without_a_wait_for_the_device() -> None:
    """Fails on the old code, which read their number from the device: a rehearsed GPU has no numbers."""
    turns = [[Turn(0), Turn(0), Turn(0)], [Turn(0), Turn(1)]]  # two turns without a token come first
    rows = replace(make_rows([[1.0, 0.0]], [1, 2]), turns=turns, old_logp_r=torch.zeros(3))
    loss, logp_r = PPO(ratio="turn", clip_low=0.99, clip_high=9.0), torch.tensor([0.1, 0.2, 0.4])
    ratio_r, _ = loss._ratio(rows, logp_r)
    assert ratio_r.tolist() == pytest.approx([math.exp(x) for x in (0.1, 0.2, 0.4)])
    without_numbers = torch.device("meta")
    ratio_r, _ = loss._ratio(rows.to(without_numbers), logp_r.to(without_numbers))
    assert ratio_r.shape == (3,)
