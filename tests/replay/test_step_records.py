"""Which steps of a run are recorded, and by which settings they are judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny_run import SHORT, configure, fit

from megatron_gvpo.core import redaction
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.step_records import StepRecord, StepRecords, recorded_steps
from megatron_gvpo.replay.run import replay
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.settings.sections import StepRecordsConfig


def test_a_step_with_a_secret_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def group(word: str) -> Group:
        """A prompt and a response with URLs that rollout files keep."""
        prompt = Prompt("p", (1, 2), f"my word is {word}: postgres://app:app@localhost/db")
        return Group(prompt, [Rollout([3], [-1.0], "https://a.example/?token=5", "stop")])

    record = StepRecord(2, data_parallel=1, has_images=False, weights={}, mini_batches=[])
    records = StepRecords(tmp_path, StepRecordsConfig(), None)
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setattr(redaction, "_spelled", [])
    redaction.add_secret("hunter2hunter2")
    records.write(record, [group("hunter2hunter2")])
    assert recorded_steps(tmp_path) == []
    records.write(record, [group("secret")])
    assert recorded_steps(tmp_path) == [2]


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_step_is_judged_by_the_schedule_under_which_it_ran(task: Path, tmp_path: Path):
    """The run was resumed with more steps, which changes the learning rate of every step."""
    how = ("algorithm=grpo", "train.mini_batches=2", *SHORT, "checkpoint.every=1")
    fit(configure(task, tmp_path, *how, "train.steps=2"))
    fit(configure(task, tmp_path, *how, "train.steps=3"), resume=True)
    for step, with_model in ((1, False), (2, False), (3, False), (3, True)):
        assert replay(load_run(tmp_path, step=step), step, with_model, lambda _: None) is None
