"""A run that a callback or `train.max_hours` ends: a checkpoint, an export, and it can go on."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace

from helpers.tiny_run import GVPO, SHORT, configure, fit, records

from megatron_gvpo.runs.existing_run import newest_step
from megatron_gvpo.training import trainer as trainer_module
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer


class EnoughAfter(Callback):
    """Ends the run at a step, as early stopping does; notes the events."""

    def __init__(self, step: int) -> None:
        self.step, self.events = step, list[str]()

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        self.events.append(f"step {step}")
        if step == self.step and trainer.is_main:
            trainer.stop("the reward has not risen")

    def on_end(self, trainer: Trainer) -> None:
        self.events.append("end")


def test_a_callback_ends_a_run_which_goes_on_as_if_it_had_not(task: Path, tmp_path: Path, caplog):
    settings = (*GVPO, *(word for word in SHORT if not word.startswith("checkpoint")))
    uninterrupted = configure(task, tmp_path / "whole", *settings)
    fit(uninterrupted)
    out = tmp_path / "run"
    config, stop = configure(task, out, *settings), EnoughAfter(2)
    fit(config, [stop])
    assert stop.events == ["step 0", "step 1", "step 2", "end"]
    assert newest_step(out) == 2 and (out / "hf" / "model.safetensors").is_file()
    assert re.search(r"stopped after step 2 of 4: the reward has not risen; --resume goes on", caplog.text)
    fit(config, resume=True)
    assert records(out) == records(Path(uninterrupted.output_dir))
    file = "hf/model.safetensors"
    assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_run_ends_when_its_hours_are_over(task: Path, tmp_path: Path, caplog):
    out = tmp_path / "run"
    fit(configure(task, out, *GVPO, *SHORT, "train.max_hours=1e-9"))
    assert newest_step(out) == 1
    assert "stopped after step 1 of 4: train.max_hours=1e-09 have passed" in caplog.text


def test_loading_counts_among_the_hours(task: Path, tmp_path: Path, caplog, monkeypatch):
    """A clock that goes forward by an hour each time: one for loading, one for the first step."""
    hours = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * next(hours), perf_counter=time.perf_counter)
    monkeypatch.setattr(trainer_module, "time", clock)
    fit(configure(task, tmp_path, *GVPO, *SHORT, "train.max_hours=1.5"))
    assert "stopped after step 1 of 4: train.max_hours=1.5 have passed" in caplog.text
