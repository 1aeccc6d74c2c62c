"""`train.stop_early`: a run ends when the metric of `checkpoint.keep_best` no longer improves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.tiny_run import GVPO, configure, fit, records

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.existing_run import newest_step
from megatron_gvpo.runs.record import EarlyStop, measured_otherwise, measurement
from megatron_gvpo.settings.sections import BestConfig, EarlyStopConfig

BEST = BestConfig(metric="eval/avg@n")
KEYS = (
    "train.max_tokens_per_micro_batch=4096",
    "eval.every=1",
    "checkpoint.every=1",
    "checkpoint.keep=1",
    "checkpoint.keep_best={metric: eval/avg@n}",
)


def stops_after(values: list[float], patience: int, min_delta: float = 0.0, order: str = "highest") -> int:
    """The number of evaluations after which a run with these values ends; -1: it does not."""
    best = BestConfig.model_validate({"metric": "eval/avg@n", "order": order})
    stop = EarlyStop(EarlyStopConfig(patience=patience, min_delta=min_delta), best)
    for step, value in enumerate(values):
        stop.offer(step, {"eval/avg@n": value})
        stop.offer(step, {"train/loss": 1.0})  # steps without an evaluation do not count
        if stop.reason is not None:
            return step + 1
    return -1


def test_evaluations_without_an_improvement_are_counted():
    assert stops_after([0.1, 0.2, 0.2, 0.1, 0.3], 2) == 4
    assert stops_after([0.1, 0.2, 0.2, 0.3, 0.3, 0.2], 2) == 6, "an improvement begins the count again"
    assert stops_after([0.3, 0.2, 0.1], 2, order="lowest") == -1
    assert stops_after([0.1, 0.15, 0.19, 0.2, 0.5], 2, min_delta=0.1) == 3
    assert stops_after([0.1, 0.15, 0.21, 0.22], 2, min_delta=0.1) == -1, (
        "small steps add up to an improvement"
    )
    assert stops_after([0.1, float("nan"), float("nan")], 1) == -1


def test_the_count_is_in_checkpoints_and_belongs_to_the_metric():
    stop = EarlyStop(EarlyStopConfig(patience=2), BEST)
    for step in range(3):
        stop.offer(step, {"eval/avg@n": 0.5})
    assert stop.reason is not None and "has not risen above 0.5, its value after step 0" in stop.reason
    for settings, is_stopped in ((BEST, True), (BestConfig(metric="eval/pass@1"), False)):
        resumed = EarlyStop(EarlyStopConfig(patience=2), settings)
        resumed.load_state_dict(stop.state_dict())
        assert (resumed.reason is not None) == is_stopped
    patient = EarlyStop(EarlyStopConfig(patience=3), BEST)
    patient.load_state_dict(stop.state_dict())
    assert patient.reason is None


def test_a_run_stops_says_why_and_goes_on_with_more_patience(task: Path, tmp_path: Path, caplog):
    """No change of the reward exceeds 1, so the second evaluation after the first one ends the run."""
    out, early = tmp_path / "run", "train.stop_early={patience: 2, min_delta: 1}"
    fit(configure(task, out, *GVPO, *KEYS, early))
    assert newest_step(out) == 2 and (out / "hf" / "model.safetensors").is_file()
    message = re.search(
        r"stopped after step 2 of 4: eval/avg@n has not risen by more than 1 above \S+, its value after "
        r"step 0, in 2 evaluations \(train\.stop_early\.patience=2\); the best checkpoint is of step (\d)",
        caplog.text,
    )
    assert message and (out / "checkpoints" / f"step_0000000{message[1]}").is_dir()
    assert (out / "hf_best" / "model.safetensors").is_file()
    before = records(out)

    caplog.clear()
    fit(configure(task, out, *GVPO, *KEYS, early), resume=True)
    assert "this run has stopped early, after step 2 of 4: eval/avg@n has not risen" in caplog.text
    assert "give more patience" in caplog.text and records(out) == before

    fit(configure(task, out, *GVPO, *KEYS, "train.stop_early={patience: 9, min_delta: 1}"), resume=True)
    assert newest_step(out) == 4
    uninterrupted = tmp_path / "whole"
    fit(configure(task, uninterrupted, *GVPO, *KEYS))
    assert records(out) == records(uninterrupted)


def test_values_of_another_evaluation_do_not_count(task: Path, tmp_path: Path, caplog):
    """They were compared: a harder held-out file ended the run, and kept the old checkpoint as the best."""
    how = (*GVPO, *KEYS, "checkpoint.export_hf=false", "checkpoint.keep=9")
    early = "train.stop_early={patience: 1, min_delta: 1}"
    fit(configure(task, tmp_path, *how, "train.steps=2"))
    fit(configure(task, tmp_path, *how, early, "train.steps=3", "eval.n=3", "eval.right_at=0.5"), resume=True)
    assert caplog.text.count("values of eval/avg@n up to here were measured otherwise") == 1
    assert "(eval.n was 2 and is 3; eval.right_at was 1.0 and is 0.5): the next checkpoint" in caplog.text
    state = json.loads((tmp_path / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert state["best"]["step"] == state["early_stop"]["step"] == 3 and "stopped after" not in caplog.text


@pytest.mark.parametrize(
    ("override", "eval_metric", "reward_metric"),
    [
        ("eval.sampling.temperature=0.5", "eval.sampling.temperature", ""),
        ("data.eval.limit=3", "data.eval.limit", ""),
        ("data.eval.path={other}", "data.eval.path", ""),
        ("data.eval.path={copy}", "", ""),
        ("data.train.limit=9", "", "data.train.limit"),
        ("data.system_prompt=Think.", "data.system_prompt", "data.system_prompt"),
        ("rewards.components.0.weight=2", "rewards.components.0.weight", "rewards.components.0.weight"),
        ("rewards.timeout=9", "", ""),
        ("eval.every=2", "", ""),
        ("eval.k=[1]", "", ""),
        ("checkpoint.keep=3", "", ""),
    ],
)
def test_what_measures_a_metric_otherwise(
    task: Path, tmp_path: Path, override: str, eval_metric: str, reward_metric: str
):
    data = (task / "data" / "test.parquet").read_bytes()
    (copy := tmp_path / "copy.parquet").write_bytes(data)
    (other := tmp_path / "other.parquet").write_bytes(data[:-1])
    before = json.loads(json.dumps(measurement(configure(task, tmp_path, *GVPO, *KEYS))))
    config = configure(task, tmp_path, *GVPO, *KEYS, override.format(copy=copy, other=other))
    files = measurement(config)["files"]
    for metric, changed in (("eval/avg@n", eval_metric), ("reward/mean", reward_metric)):
        assert [c.key for c in measured_otherwise(metric, before, config, files)] == (
            [changed] if changed else []
        )


def test_it_needs_a_metric(task: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train\.stop_early needs checkpoint\.keep_best"):
        configure(task, tmp_path, *GVPO, "train.stop_early={patience: 2}")
