"""Alerts: each rule on a made-up run, and on a real run that was made to fail that way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_run import GVPO, SHORT, StopAfter, configure, fit

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.core.metric_names import entry
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.observe.alerts import Alert, Finder, alerts_of
from megatron_gvpo.observe.alerts.rules import RULES
from megatron_gvpo.observe.rollout_metrics import rollout_statistics
from megatron_gvpo.sampling.shaping import run_shapers
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer

STEPS = 40
HEALTHY = {
    "reward/mean": lambda step: 0.3 + 0.01 * step,
    "reward/math": lambda step: 0.3 + 0.01 * step,
    "reward/groups_with_signal": lambda step: 0.6,
    "reward/length_correlation": lambda step: -0.1,
    "reward/errors": lambda step: 0.0,
    "response/length": lambda step: 200 + step,
    "response/entropy": lambda step: 0.9 - 0.01 * step,
    "mismatch/kl": lambda step: 1e-4 * (1 + step % 2),
    "server/10.0.0.1:80/relative_time": lambda step: 1.0,
    "server/10.0.0.2:80/relative_time": lambda step: 1.2,
}
Curve = Callable[[int], float]


def run(**changed: Curve) -> list[dict[str, Any]]:
    """The records of a run that is healthy but for these metrics."""
    curves: Mapping[str, Curve] = {**HEALTHY, **changed}
    return [{"step": step, **{n: c(step) for n, c in curves.items()}} for step in range(1, STEPS + 1)]


def late(bad: float, good: float) -> Curve:
    """Bad from step 20 on."""
    return lambda step: bad if step >= 20 else good


def dying(step: int) -> float:
    return step / 100 if step < 20 else 0.0


# A policy that diverged earns no reward, and so gives no signal: easier prompts are not a remedy for it.
LOST = {"reward/mean": late(0.0, 0.4), "reward/groups_with_signal": late(0.0, 0.6)}
LEAP, STEEP = {"train/kl": late(1.5, 0.01)}, {"train/grad_norm": late(224, 2)}
LEAP, STEEP = {"train/kl": late(1.5, 0.01)}, {"train/grad_norm": late(224, 2)}


@pytest.mark.parametrize(
    ("rule", "changed", "step", "words"),
    [
        ("entropy collapse", {"response/entropy": late(0.05, 0.9)}, 24, "from 0.9 to 0.05 nats"),
        (
            "reward for length",
            {"response/length": late(900, 200), "reward/length_correlation": late(0.8, 0.0)},
            23,
            "from 200 to 760 tokens",
        ),
        ("mismatch rises", {"mismatch/kl": late(1e-2, 1e-4)}, 20, "from 0.0001 to 0.0034"),
        ("correction leaves little", {"train/importance": late(0.0, 1.0)}, 21, "leaves 33% of the policy"),
        ("no signal", {"reward/groups_with_signal": late(0.0, 0.6)}, 24, "0% have"),
        ("dead reward component", {"reward/math": dying}, 29, "math gave 0 on average"),
        ("divergence", {**LOST, **LEAP}, 21, "kl came to 1.5 nats a token, and the reward fell from 0.4"),
        ("divergence", {**LOST, **STEEP}, 21, "norm came to 224, and the reward fell from 0.4 to 0.133"),
        ("divergence", {**LOST, **LEAP, **STEEP}, 21, "kl came to 1.5"),
        ("never right", {"eval/pass@1": lambda step: 0.0, "eval/avg@n": lambda step: 0.4}, 2, "score is 0.4"),
        ("slow server", {"server/10.0.0.2:80/relative_time": late(9.0, 1.0)}, 20, "10.0.0.2:80 takes 3.7"),
    ],
)
def test_each_rule_finds_its_trouble(rule: str, changed: dict[str, Curve], step: int, words: str):
    alerts = alerts_of(run(**changed))
    assert {alert.rule for alert in alerts} == {rule}
    assert [alert.step for alert in alerts] == [step]
    assert words in alerts[0].message and str(alerts[0]).startswith(f"step {step}: ")


def test_every_rule_is_tested_here_and_its_metrics_exist():
    marks = test_each_rule_finds_its_trouble.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for mark in marks for case in mark.args[1]} == {rule.name for rule in RULES}
    for rule in RULES:
        for condition in rule.conditions:
            assert entry(condition.metric) is not None, condition.metric


def test_a_healthy_run_has_no_alert():
    assert alerts_of(run()) == []


def solved(step: int) -> float:
    return min(0.2 + 0.05 * step, 0.95)


def no_better(step: int) -> float:
    return 0.2 + 0.1 * (step % 3 == 1)


@pytest.mark.parametrize(
    ("evaluated", "rules"), [(solved, set()), (no_better, {"entropy collapse", "reward for length"})]
)
def test_certain_or_longer_responses_are_no_trouble_where_evaluations_rise(evaluated: Curve, rules: set[str]):
    changed = {
        **{"response/entropy": late(0.05, 0.9), "response/length": late(900, 200)},
        **{"reward/length_correlation": late(0.8, 0.0), "eval/pass@1": evaluated},
    }
    assert {alert.rule for alert in alerts_of(run(**changed))} == rules


@pytest.mark.parametrize("changed", [LOST, LEAP, STEEP])
def test_neither_a_lost_reward_nor_a_leap_alone_is_a_divergence(changed: dict[str, Curve]):
    assert "divergence" not in {alert.rule for alert in alerts_of(run(**changed))}


def test_partial_scores_are_no_trouble_where_some_sample_is_right():
    some = {"eval/pass@1": lambda step: 0.1 * (step % 2), "eval/avg@n": lambda step: 0.4}
    none = {"eval/pass@1": lambda step: 0.0, "eval/avg@n": lambda step: 0.0}
    assert alerts_of(run(**some)) == alerts_of(run(**none)) == []


def test_an_alert_is_said_again_only_after_it_was_over():
    on_off = {"reward/groups_with_signal": lambda step: 0.0 if step % 20 < 8 else 0.6}
    assert [alert.step for alert in alerts_of(run(**on_off))] == [5, 24]  # type: ignore[arg-type]
    flapping = {"mismatch/kl": lambda step: 1e-4 if step < 10 else 1e-2 * (step % 2)}
    assert len(alerts_of(run(**flapping))) == 1  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_left_out():
    finder = Finder()
    for step in range(1, 20):
        bad = {"reward/groups_with_signal": float("nan"), "mismatch/kl": None}
        assert finder.update(step, bad) == []


# --- the metrics that rules need ---


def rollouts(*lengths: int, rewards: tuple[float, ...], **fields: Any) -> Group:
    rows = [
        Rollout([1] * n, [-0.5] * n, "", "stop", reward=reward, **fields)
        for n, reward in zip(lengths, rewards, strict=True)
    ]
    return Group(Prompt("p", (1,), "?"), rows)


def test_reward_and_length_are_compared_inside_groups():
    import numpy as np

    long = rollouts(10, 20, 30, rewards=(0.0, 1.0, 1.0))
    short = rollouts(1, 2, 3, rewards=(9.0, 5.0, 1.0))
    correlation = rollout_statistics([long, short], 0)["reward/length_correlation"]
    lengths = np.array([-10, 0, 10, -1, 0, 1])
    rewards = np.array([-2 / 3, 1 / 3, 1 / 3, 4, 0, -4])
    assert correlation == pytest.approx(np.corrcoef(lengths, rewards)[0, 1])
    assert "reward/length_correlation" not in rollout_statistics([rollouts(2, 2, rewards=(0.0, 1.0))], 0)
    assert rollout_statistics([long], 0)["response/entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "recipe", ["ppo", "reinforce_pp", "spo", "opd", "rejection_sampling", "best_of_n", "grpo"]
)
def test_only_a_method_that_compares_rewards_wants_groups_whose_rewards_differ(recipe: str):
    algorithm = AlgorithmConfig(recipe=recipe)
    n = 4 if algorithm.shapers or algorithm.compares_rewards else 1
    chance, finder, rules = random.Random(1), Finder(), set[str]()
    for step in range(12):
        rewards = [float(chance.random() < 0.5) for _ in range(8)]
        rollouts = [Rollout([1], [-0.5], "", "stop", rewards={"math": r}, reward=r) for r in rewards]
        groups = [Group(Prompt("p", (1,), "?"), [rollout] * n) for rollout in rollouts]
        groups, _ = run_shapers(algorithm.sized(64).shapers, groups, step)
        kind = algorithm.compares_rewards, algorithm.selects_right
        rules |= {alert.rule for alert in finder.update(step, rollout_statistics(groups, step, *kind))}
    assert rules == ({"no signal"} if recipe == "grpo" else set())


def test_a_servers_time_is_compared_with_the_median_server():
    groups = [
        rollouts(10, 10, rewards=(0.0, 1.0), server=f"http://10.0.0.{i}:80", seconds=seconds)
        for i, seconds in enumerate((1.0, 1.1, 5.0), start=1)
    ]
    statistics = rollout_statistics(groups, 0)
    assert statistics["server/10.0.0.3:80/relative_time"] == pytest.approx(5 / 1.1)
    assert statistics["server/10.0.0.2:80/relative_time"] == 1
    assert not [name for name in rollout_statistics(groups[:1], 0) if name.startswith("server/")]


# --- real runs ---

REWARD = """
def same(prompt, rollout): return 0.5
def long(prompt, rollout): return len(rollout.token_ids) / 10
def varied(prompt, rollout): return len(set(rollout.token_ids)) / 12
def sharp(prompt, rollout): return rollout.token_ids.count(rollout.token_ids[0]) / len(rollout.token_ids)
"""


def rules_of(
    task: Path, out: Path, reward: str, *overrides: str, callbacks: tuple[Callback, ...] = ()
) -> set[str]:
    """The rules that a run with this reward gave alerts of."""
    (out.parent / "rewards.py").write_text(REWARD)
    component = [{"name": "made", "function": f"{out.parent}/rewards.py:{reward}"}]
    settings = (*GVPO, *SHORT, f"rewards.components={json.dumps(component)}", *overrides)
    fit(configure(task, out, *settings), callbacks)
    return {alert.rule for alert in alerts_of(read_metrics(out / "metrics.jsonl"))}


@pytest.mark.usefixtures("leave_the_process_group")
class TestRealRuns:
    def test_a_reward_that_is_always_the_same(
        self, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        rules = rules_of(task, tmp_path / "run", "same", "train.steps=11", "logging.tensorboard=true")
        assert rules == {"no signal", "dead reward component"}
        printed = capsys.readouterr().out
        assert "ALERT step 5: nearly all groups are solved or failed" in printed
        assert "ALERT step 10: the reward component made gave 0.5" in printed
        events = b"".join(file.read_bytes() for file in (tmp_path / "run/tensorboard").glob("events*"))
        assert b"the reward component made gave 0.5" in events

    def test_a_resumed_run_remembers(self, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        (tmp_path / "rewards.py").write_text(REWARD)
        component = [{"name": "made", "function": f"{tmp_path}/rewards.py:same"}]
        settings = (*GVPO, *SHORT, f"rewards.components={json.dumps(component)}", "train.steps=7")
        fit(configure(task, tmp_path / "run", *settings), [StopAfter(3)])
        assert "ALERT" not in capsys.readouterr().out
        fit(configure(task, tmp_path / "run", *settings), resume=True)
        assert "ALERT step 5: " in capsys.readouterr().out

    def test_a_reward_for_length(self, task: Path, tmp_path: Path):
        stops = json.dumps(list(range(0, 20, 4)))
        length = ("rollout.max_tokens=30", f"rollout.stop_token_ids={stops}", "train.steps=14", "rollout.n=8")
        lr = ("optimizer.lr=0.002", "optimizer.decay=constant")
        assert "reward for length" in rules_of(task, tmp_path / "run", "long", *length, *lr)

    def test_an_entropy_that_collapses(self, task: Path, tmp_path: Path):
        lr = ("optimizer.lr=0.02", "optimizer.decay=constant", "train.steps=16", "rollout.n=8")
        assert "entropy collapse" in rules_of(task, tmp_path / "run", "sharp", *lr)

    @pytest.mark.parametrize(
        ("recipe", "lr"), [("gvpo", 0.03), pytest.param("grpo", 0.1, marks=pytest.mark.proof)]
    )
    def test_a_learning_rate_that_is_far_too_high(
        self, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, lr: float
    ):
        """The policy repeats one token: KL 0.8 nats a token, and GRPO's gradient has a norm of 450."""
        rate = (f"optimizer.lr={lr}", "optimizer.decay=constant", "train.steps=12", "rollout.n=8")
        rules = rules_of(task, tmp_path / "run", "varied", f"algorithm={recipe}", *rate)
        assert "divergence" in rules and "no signal" not in rules
        assert "lower optimizer.lr" in capsys.readouterr().out

    def test_a_reward_that_never_counts_as_right(self, task: Path, tmp_path: Path):
        """12 different tokens are more than a response has: eval.right_at says from where on it is right."""
        held_out = f"data.eval={{path: {task}/data/test.parquet, limit: 4}}"
        evaluated = (held_out, "eval.every=1", "eval.n=2", "train.steps=3")
        assert "never right" in rules_of(task, tmp_path / "run", "varied", *evaluated)
        lower = (*evaluated, "eval.right_at=0.1")
        assert "never right" not in rules_of(task, tmp_path / "lower", "varied", *lower)
        last = read_metrics(tmp_path / "lower" / "metrics.jsonl")[-1]
        assert last["eval/pass@1"] > 0

    def test_a_correction_whose_bounds_are_narrower_than_rounding(self, task: Path, tmp_path: Path):
        """It drops what it should correct, and the run would end as well as any."""
        narrow = "algorithm={recipe: grpo, loss: {importance: {name: mask, level: geometric}}}"
        rules = rules_of(task, tmp_path / "run", "long", narrow, "model.dtype=bfloat16")
        assert "correction leaves little" in rules

    def test_weights_that_do_not_reach_the_engine(self, task: Path, tmp_path: Path):
        lr = ("optimizer.lr=0.01", "optimizer.decay=constant", "train.steps=8", "optimizer.warmup_steps=0")
        assert "mismatch rises" in rules_of(task, tmp_path / "run", "long", *lr, callbacks=(LosePushes(3),))


class LosePushes(Callback):
    """From a step on, pushes report success and the engine keeps its weights."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == self.step:
            model = trainer.components.engine._model  # type: ignore[attr-defined]
            model.load = lambda weights, version: setattr(model, "version", version)


def test_alerts_are_tuples_that_a_page_can_show():
    values = {"step": 3, "rule": "rule", "message": "words", "advice": "place"}
    assert Alert(3, "rule", "words", "place")._asdict() == values
