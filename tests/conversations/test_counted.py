"""Reward components that read what no conversation counts are refused: they would be 0 for every response."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.inputs.digits import TALK, talks
from helpers.tiny_run import GVPO, SHORT, configure, fit

from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.settings.rewards import COUNT, RewardConfig, RewardsConfig
from megatron_gvpo.turns import Turn
from megatron_gvpo.workers.environment import Reply, WrongValue, checked_reply

TOOLS, NONE = "rollout.conversation={tools: [tools.py:add]}", "rollout.conversation=null"
PAID = "rewards.components=[{name: environment}]"


def counts(of: str) -> str:
    return f"rewards.components=[{{name: calls, function: '{COUNT}', options: {{of: {of}}}}}]"


@pytest.mark.parametrize(
    ("talk", "components", "problem"),
    [
        (
            TOOLS,
            counts("tool_cals"),
            r"rewards.components.0.options.of=tool_cals: conversations with tools have no such count; they "
            "have: turns, environment_reward, observation_tokens, tool_calls, tool_errors, observations_d",
        ),
        (TOOLS, PAID, "components.0.name=environment: tools pay nothing"),
        (TOOLS, counts("3"), "options.of=3: want the name of a count"),
        (NONE, counts("turns"), r"components.0 \(calls\) reads conversations: set roll"),
        (NONE, PAID, r"components.0 \(environment\) reads conversations"),
    ],
)
def test_what_no_conversation_counts_is_refused_at_the_start(
    task: Path, tmp_path: Path, talk: str, components: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        configure(task, tmp_path / "out", *TALK, talk, components)


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_misspelt_count_of_an_environment_ends_the_run_at_its_first_batch(
    task: Path, tmp_path: Path
) -> None:
    settings = (*GVPO, *SHORT, *TALK, talks(), "train.steps=2")
    problem = r"components.0.options.of=evne: none of \d+ conversations has such a count; .*: turns, .*even"
    with pytest.raises(RolloutError, match=problem):
        fit(configure(task, tmp_path / "run", *settings, counts("evne")))


def test_the_first_batch_in_which_a_conversation_ended_shows_what_is_counted() -> None:
    component = RewardConfig(name="bad", function=COUNT, options={"of": "bad_calls"})
    known = ("turns", "observations_dropped")

    def batch(*talks: tuple[str, dict[str, float]]) -> list[Group]:
        rollouts = [Rollout([5], [0.0], "", end, turns=[Turn(0)], counts=values) for end, values in talks]
        return [Group(Prompt("p", (1,), "?"), rollouts)]

    pool = RewardPool(RewardsConfig(components=(component,)), known)
    pool.check(batch(("length", {}), ("length", {})))
    with pytest.raises(ConfigError, match=r"of=bad_calls: none of 2 .* let the environment count 0 when"):
        pool.check(batch(("length", {}), ("stop", {"calls": 1.0})))
    pool.check(batch(("stop", {"calls": 1.0}), ("stop", {"bad_calls": 0.0})))
    pool.check(batch(("stop", {"calls": 1.0})))  # later batches may have none
    dropped = component.model_copy(update={"options": {"of": "observations_dropped"}})
    RewardPool(RewardsConfig(components=(dropped,)), known).check(batch(("stop", {})))


@pytest.mark.parametrize(
    "name", ["turns", "lost", "environment_reward", "retried_calls", "a\nb", "", "a" * 65]
)
def test_a_count_cannot_have_the_name_of_another_metric(name: str):
    with pytest.raises(WrongValue, match="step returned a count with the name "):
        checked_reply(Reply("go on", 0.0, {name: 1}))
    assert checked_reply(Reply(None, 0.0, {"tool_calls": 1, "calls": 2}))[2] == {
        "tool_calls": 1.0,
        "calls": 2.0,
    }
