"""Problems of reasoning-gym as data, and its scores as reward."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from helpers.tiny_run import GVPO, SHORT, configure, fit, records

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.sources import read_records
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.rewards.math_answer import score_generated
from megatron_gvpo.settings import rewards

SUMS = "reasoning_gym:chain_sum?size=20&min_terms=2&max_terms=2&max_digits=1"


def test_problems_are_generated_the_same_each_time_and_scored() -> None:
    first, again = (list(read_records(SUMS)) for _ in range(2))
    assert first == again and len(first) == 20
    assert first[0].fields["prompt"].startswith("State the final answer to the following arithmetic problem")
    other = [record.fields["prompt"] for record in read_records(SUMS, "test")]
    assert other != [record.fields["prompt"] for record in first]
    prompt = Prompt("p", (1,), first[3].fields["prompt"], record=first[3].fields)
    right = first[3].fields["answer"]
    for text, score in ((right, 1.0), (f"so <answer>{right}</answer>", 1.0), ("no", 0.0), ("", 0.0)):
        assert score_generated(prompt, Rollout([], [], text, "stop")) == pytest.approx(score, abs=0.02)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "reasoning_gym:chain_summ",
            "reasoning-gym has no generator 'chain_summ'; did you mean 'chain_sum'?",
        ),
        ("reasoning_gym:chain_sum?nope=1", "the generator has no option 'nope'; its options: min_terms, "),
        ("reasoning_gym:chain_sum?size=abc", "size=abc: expected a number"),
        ("reasoning_gym:chain_sum?min_terms=0", "min_terms must be positive"),
    ],
)
def test_wrong_generators_are_named(path: str, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^reasoning_gym:.*: {problem}"):
        list(read_records(path))


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_run_trains_on_them(task: Path, tmp_path: Path) -> None:
    data = (f"data.train.path={SUMS}", "data.train.demonstration_key=null", "data.max_prompt_tokens=null")
    rewards = "rewards.components=[{name: reasoning_gym}]"
    fit(configure(task, tmp_path, *GVPO, *SHORT, *data, rewards, "train.steps=1"))
    [line] = [line for line in records(tmp_path) if line["step"] == 1]
    assert line["reward/errors"] == 0


def test_without_the_package_data_and_reward_are_refused(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> Sequence[ModuleSpec] | None:
        return None

    monkeypatch.setattr(rewards, "find_spec", nothing)
    remedy = r"reasoning-gym is not installed: pip install 'megatron-gvpo\[reasoning-gym\]'"
    with pytest.raises(DataError, match=remedy):
        list(read_records(SUMS))
    config = configure(
        task, tmp_path, *GVPO, f"data.train.path={SUMS}", "rewards.components=[{name: reasoning_gym}]"
    )
    with pytest.raises(ConfigError, match=rf"rewards\.components\.0\.name=reasoning_gym: .*{remedy}"):
        preflight(config, "train", 1)
