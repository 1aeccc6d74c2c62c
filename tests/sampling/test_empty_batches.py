"""Batches that teach nothing: which they are for each loss, the warnings, and the end of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.sampling.empty_batches import EmptyBatches
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import TrainBatch


def group(*rewards: float, errors: dict[str, str] | None = None, finish: str = "stop") -> Group:
    rollouts = [
        Rollout([5, 6], [-1.0, -1.0], "x", finish, reward=r, reward_errors=errors or {}) for r in rewards
    ]
    return Group(Prompt("p", (1, 2), "1+1="), rollouts)


def signal(recipe: str | dict[str, object], *groups: Group) -> bool:
    algorithm = AlgorithmConfig.model_validate(recipe).sized(8)
    rows = TrainBatch.from_groups(groups)
    if algorithm.estimator is not None:
        rows, _ = algorithm.estimator.build().fill(rows)
    return algorithm.loss.has_signal(rows.trained())


EQUAL = [group(1, 1), group(0, 0)]
NO_BASELINE = {"recipe": None, "loss": "pg", "estimator": {"baseline": "none"}}
CUSTOM = {"name": "custom", "function": "operator:pos", "reads": ["reward"]}


@pytest.mark.parametrize(
    ("recipe", "equal", "zero"),
    [
        ("gvpo", False, False),
        ("dpo", False, False),
        ("gpg", False, False),
        ("grpo", False, False),
        ("sft", True, True),
        (NO_BASELINE, True, False),  # a reward is its own advantage, until all are 0
        ({"recipe": None, "loss": CUSTOM}, True, False),
        ({"recipe": None, "loss": {**CUSTOM, "groups": True}}, False, False),
        ({"recipe": None, "loss": {**CUSTOM, "reads": []}}, True, True),
    ],
)
def test_each_loss_says_what_it_learns_from(recipe, equal, zero):
    assert signal(recipe, group(1, 0), group(1, 1))
    assert signal(recipe, *EQUAL) == equal
    assert signal(recipe, group(0, 0), group(0, 0)) == zero


def watch(good, *overrides: str) -> EmptyBatches:
    config = load_config([good], ["train.max_empty_batches=3", *overrides])
    return EmptyBatches(
        config.algorithm, config.rewards, config.rollout.max_tokens, config.train.max_empty_batches
    )


def check(watching: EmptyBatches, step: int, groups: Sequence[Group]) -> list[str]:
    return watching.check(step, groups, [TrainBatch.from_groups(groups)])


def test_a_run_without_signal_is_warned_and_ends(good):
    """Fails on the old code, which trained to the end on nothing."""
    watching = watch(good)
    [message] = check(watching, 1, EQUAL)
    assert message == (
        "step 1: the loss gvpo has no signal in the batch: its rewards differ in no group (rewards: they are "
        "from 0 to 1); the run ends after 3 such batches in a row (train.max_empty_batches)"
    )
    assert check(watching, 2, EQUAL) == []  # said once
    assert check(watching, 3, [group(1, 0)]) == []
    assert check(watching, 4, EQUAL) == check(watching, 5, EQUAL) == []
    with pytest.raises(RolloutError, match=r"step 6: the loss gvpo has no signal .* for 3 batches in a row"):
        check(watching, 6, EQUAL)


def test_a_resumed_run_goes_on_counting(good):
    """A run that is stopped every few steps would never end, not even one that is stopped before the last."""
    watching = watch(good)
    for step in (1, 2):
        check(watching, step, EQUAL)
        resumed = watch(good)
        resumed.load_state_dict(json.loads(json.dumps(watching.state_dict())))
        watching = resumed
    with pytest.raises(RolloutError, match=r"step 3: the loss gvpo has no signal .* for 3 batches in a row"):
        check(watching, 3, EQUAL)


def test_a_mended_run_counts_from_the_beginning(good):
    watching, mended = watch(good), watch(good, "train.max_empty_batches=2")
    check(watching, 1, EQUAL)
    check(watching, 2, EQUAL)
    mended.load_state_dict(watching.state_dict())
    assert check(mended, 3, [group(1, 0)]) == []
    assert len(check(mended, 4, EQUAL)) == 1


def test_updates_that_are_all_skipped_end_the_run(good):
    """Fails on the old code, which trained to the end without changing a weight, and said nothing."""
    watching = watch(good)
    [warning] = watching.check_updates(1, [True, False])
    assert warning.startswith("step 1: the gradient was not finite in 1 of 2 updates")
    assert watching.check_updates(2, [True, False]) == []  # said once
    [warning] = watching.check_updates(3, [True, True])
    assert "not finite in 2 of 2 updates" in warning and "after 3 such batches in a row" in warning
    assert check(watching, 4, [group(1, 0)]) == []  # a batch with signal, whose updates are skipped
    assert watching.check_updates(4, [True, True]) == watching.check_updates(5, [False, True]) == []
    assert watching.check_updates(6, [True]) == watching.check_updates(7, [True]) == []
    with pytest.raises(RolloutError, match=r"step 8: the gradient was not finite .* for 3 batches in a row"):
        watching.check_updates(8, [True])


def test_shapers_that_leave_nothing_end_the_run(good):
    """A draw of which they leave something starts the count again, and is not yet a batch with signal."""
    watching = watch(good)
    draw, dropped = [group(1, 1), group(0, 0)], {"algorithm.shapers.0 (drop)": 2}
    [message] = watching.check_shaped(1, draw, [], dropped)
    assert message.startswith(
        "step 1: nothing is left to train on: algorithm.shapers.0 (drop) dropped 2 groups, whose rewards "
        "were from 0 to 1. "
    )
    assert watching.check_shaped(1, draw, [], dropped) == []
    check(watching, 1, EQUAL)
    assert watching.check_shaped(2, draw, draw[:1], {}) == []
    for _ in range(2):
        assert watching.check_shaped(2, draw, [], dropped) == []
    with pytest.raises(RolloutError, match=r"step 2: nothing is left .* for 3 batches in a row"):
        watching.check_shaped(2, draw, [], dropped)
    watching.check_shaped(3, draw, draw, {})
    check(watching, 3, EQUAL)
    with pytest.raises(RolloutError, match=r"step 4: the loss gvpo has no signal .* for 3 batches in a row"):
        check(watching, 4, EQUAL)


def test_a_reward_that_always_fails_ends_the_run(good):
    seen = "{name: seen, function: x:y, weight: 0}"
    watching = watch(good, f"rewards.components=[{{name: math}}, {{name: mine, function: x:y}}, {seen}]")
    failed = [group(1, 0, errors={"mine": "ValueError: no", "seen": "of no weight"})]
    [message] = check(watching, 1, failed)
    assert message.startswith(
        "step 1: the reward mine failed for all 2 responses of the batch: ValueError: no; "
    )
    check(watching, 2, failed)
    with pytest.raises(RolloutError, match=r"step 3: the reward mine failed for all 2 responses"):
        check(watching, 3, failed)


def test_all_masked_and_all_cut_off(good):
    masked = group(1, 0)
    for rollout in masked.rollouts:
        rollout.trained = False
    [message] = watch(good).check(1, [masked], [])
    assert "no response of the batch is trained: all are masked" in message
    watching = watch(good)
    [message] = check(watching, 1, [group(1, 0, finish="length")])
    assert message.startswith("step 1: every response was cut off at rollout.max_tokens=1024: raise it")
    for step in range(2, 9):  # budgets are legitimate, where rewards differ
        assert check(watching, step, [group(1, 0, finish="length")]) == []
    watching = watch(good)
    assert check(watching, 1, [group(1, 0)]) == []
    [message] = check(watching, 2, [group(1, 0, finish="length")])
    assert "responses of earlier steps ended before it" in message and "lower optimizer.lr" in message
    talks = group(1, 0, finish="length")
    for rollout in talks.rollouts:
        rollout.turns = [Turn(0)]
    [message] = check(watch(good), 1, [talks])
    assert "every conversation ended at a limit, rollout.max_tokens=1024 or one of rollout.conv" in message


def test_advantages_of_tokens_count():
    rows = TrainBatch.from_groups([group(0, 0)])
    loss = AlgorithmConfig.model_validate("gpg").loss
    assert not loss.has_signal(rows.with_columns(advantage_r=torch.zeros(4)))
    assert loss.has_signal(rows.with_columns(advantage_r=torch.tensor([0, 0, 0, 0.5])))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rewards.components=[]"],
            "rewards.components=[]: algorithm.loss=gvpo learns from rewards",
        ),
        (
            ["rewards.components=[]", "algorithm=grpo"],
            "rewards.components=[]: algorithm.loss=ppo learns",
        ),
        (
            ["rewards.components=[]", "data.eval.path=e"],
            "rewards.components=[]: data.eval is given",
        ),
        (["rewards.components=[{name: math, weight: 0}]"], "rewards.components: all weights are 0, so all"),
    ],
)
def test_no_rewards_at_all_are_an_error_at_the_start(good, overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config([good], overrides)
    assert str(error.value).startswith(message)


def test_methods_without_rewards_need_none(good):
    none, solutions = "rewards.components=[]", "data.train.demonstration_key=s"
    assert load_config([good], [none, "algorithm=sft", solutions]).rewards.components == ()
    judged = "algorithm={recipe: gvpo, shapers: [{name: custom, function: 'builtins:sorted'}]}"
    assert load_config([good], [none, judged]).rewards.components == ()
