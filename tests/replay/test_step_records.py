"""Which steps of a run are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gvpo.core import redaction
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe.step_records import StepRecord, StepRecords, recorded_steps
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
