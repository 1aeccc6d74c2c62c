"""Metric files across interruptions, progress in a real pseudo-terminal, reports."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from rich.console import Console

from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.observe import (
    MetricLogger,
    PhaseTimer,
    Progress,
    plot_curve,
    read_metrics,
    time_report,
)
from megatron_gvpo.observe.live import CELLS, draw, sparkline
from megatron_gvpo.observe.loggers.backend import Sample
from megatron_gvpo.observe.rollouts.table import Responses
from megatron_gvpo.observe.samples import few_samples, one_line, worth_showing
from megatron_gvpo.observe.status import Status, clock
from megatron_gvpo.observe.summary import smooth
from megatron_gvpo.settings.sections import LoggingConfig

QUIET = LoggingConfig(tensorboard=False)


def metrics_of(step):
    return {"reward/mean": math.sin(step) / 3, "train/loss": math.nan if step == 2 else 1e-7 * step}


def log_steps(logger, first, last):
    for step in range(first, last + 1):
        logger.log(step, metrics_of(step))


# --- timer ---------------------------------------------------------------------------------------


def test_timer_splits_time_by_phase_and_starts_over_after_take():
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timer.phase("training"):
        raise KeyError
    first = timer.take()
    assert first["rollout"] >= 0.02 and set(first) == {"rollout", "training"}
    assert timer.take() == {}
    with timer.phase("rollout"):
        pass
    assert timer.totals["rollout"] == first["rollout"] + timer.take()["rollout"]


# --- metrics.jsonl, TensorBoard, Weights & Biases --------------------------------------------------


@pytest.mark.parametrize("torn", ["", '{"step": 7, "rew', '{"step": 7}'])
def test_resumed_file_equals_an_uninterrupted_one(tmp_path, torn):
    uninterrupted = MetricLogger(QUIET, tmp_path / "whole", resume_step=None)
    log_steps(uninterrupted, 0, 9)
    uninterrupted.close()

    killed = MetricLogger(QUIET, tmp_path / "resumed", resume_step=None)  # never closed
    log_steps(killed, 0, 6)
    file = tmp_path / "resumed" / "metrics.jsonl"
    with file.open("a") as handle:
        handle.write(torn)
    resumed = MetricLogger(QUIET, tmp_path / "resumed", resume_step=4)
    log_steps(resumed, 5, 9)
    resumed.close()
    assert file.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_metrics_that_were_removed_meanwhile_are_not_written_to_nowhere(tmp_path):
    logger = MetricLogger(QUIET, tmp_path / "run", resume_step=None)
    logger.log(0, {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        logger.log(1, {})
    logger.close()


def test_lines_are_on_disk_at_once_and_hold_no_nan(tmp_path, monkeypatch):
    """A node that loses its power keeps the checkpoint of a step, so it must keep the step's line, too."""
    fsync, on_disk = os.fsync, []

    def noted(descriptor):
        fsync(descriptor)
        on_disk.append((tmp_path / "metrics.jsonl").read_text())

    logger = MetricLogger(QUIET, tmp_path, resume_step=None)
    monkeypatch.setattr(os, "fsync", noted)
    logger.log(3, {"train/loss": math.inf, "reward/mean": np.float32(0.5)})
    assert on_disk == ['{"step": 3, "train/loss": null, "reward/mean": 0.5}\n']


def test_fresh_run_starts_a_fresh_file(tmp_path):
    for _ in range(2):
        logger = MetricLogger(QUIET, tmp_path, resume_step=None)
        log_steps(logger, 0, 3)
        logger.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


def test_read_metrics_names_the_bad_line_but_forgives_a_torn_end(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"ste')
    assert read_metrics(file) == [{"step": 1}]
    file.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not valid JSON"):
        read_metrics(file)
    file.write_text('{"stp": 1}\n')
    with pytest.raises(ValueError, match=r'line 1: expected \{"step"'):
        read_metrics(file)


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggingConfig(tensorboard=True)
    interrupted = MetricLogger(config, tmp_path, resume_step=None)
    for step in range(6):
        interrupted.log(step, {"reward/mean": step})
    interrupted.close()
    time.sleep(1.1)  # event files are ordered by the second of their birth
    resumed = MetricLogger(config, tmp_path, resume_step=2, run_config={"train": {"steps": 5}})
    for step in range(3, 5):
        resumed.log(step, {"reward/mean": -step})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, -3),
        (4, -4),
    ]
    assert "steps: 5" in str(events.Tensors("config/text_summary")[0].tensor_proto.string_val[0])


def test_a_full_disk_under_tensorboard_is_raised_and_not_printed(tmp_path):
    """TensorBoard's writer thread would otherwise die with a traceback."""
    program = """
import resource, sys
from pathlib import Path
from megatron_gvpo.observe.loggers.writers import TensorBoardWriter
writer = TensorBoardWriter(Path(sys.argv[1]), -1, None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
try:
    while True:
        writer.log(1, {"reward/mean": 0.5})
except OSError as error:
    print(error.strerror)
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (died.stdout, died.stderr) == ("File too large\n", "")


def test_missing_wandb_names_key_and_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"logging\.wandb_project='p' needs .*pip install wandb"):
        MetricLogger(LoggingConfig(wandb_project="p"), tmp_path, resume_step=None)


def test_wandb_offline_continues_its_run(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    config, ids = LoggingConfig(tensorboard=False, wandb_project="p"), []
    for resume_step in (None, 2):
        logger = MetricLogger(config, tmp_path, resume_step=resume_step)
        log_steps(logger, 0 if resume_step is None else 3, 4)
        logger.close()
        ids.append((tmp_path / "wandb_run_id").read_text())
    wandb.teardown()  # else its service process stays beside the tests that come after
    assert ids[0] == ids[1]


# --- progress --------------------------------------------------------------------------------------

STEP = {"reward/mean": 0.5, "train/kl": 0.01, "time/step": 2.0, "time/rollout": 1.0, "time/training": 0.5}


def test_lines_for_first_last_and_evaluated_steps_only():
    stream = io.StringIO()
    with Progress("auto", 20, stream) as progress:
        progress.update(0, {"eval/pass@1": 0.25})
        for step in range(1, 21):
            progress.update(step, STEP | ({"eval/pass@1": 0.5, "eval/maj@4": 0.75} if step == 7 else {}))
        progress.note("checkpoint [20] saved")
    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines[:3]] == ["step  0", "step  7", "step 20"]
    assert "pass@1 25.0%" in lines[0]
    assert "pass@1 50.0%  maj@4 75.0%" in lines[1] and "left" in lines[1]
    assert "rollout 50%, training 25%, other 25%" in lines[2] and "left" not in lines[2]
    assert lines[3:] == ["checkpoint [20] saved"]
    assert stream.getvalue().isascii()


def test_all_has_every_metric_of_every_step():
    stream = io.StringIO()
    with Progress("all", 2, stream) as progress:
        progress.update(1, STEP)
        progress.update(2, STEP)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if line.startswith("step")][1].startswith("step 2/2")
    assert lines.count("  train/kl 0.01") == 2


def test_a_long_step_says_what_it_does(monkeypatch):
    monkeypatch.setattr("megatron_gvpo.observe.progress.LONGEST_SILENCE", 0.05)
    stream, spoken = io.StringIO(), threading.Event()

    def phase():
        return ("rollout", 75.0) if not spoken.is_set() else None

    with Progress("lines", 20, stream, phase=phase) as progress:
        time.sleep(0.2)
        assert stream.getvalue() == "", "nothing to say before the first step has a number"
        progress.update(3, STEP)
        while "so far" not in stream.getvalue():
            time.sleep(0.01)
        spoken.set()
    assert stream.getvalue().splitlines()[1] == "step 4/20: rollout for 1:15 so far"


HOSTILE = Sample("train", "What is\n1+1?", "\x1b[2J\x07" + "so " * 90 + "\\boxed{2}\u202e", 1.0)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_sample_is_one_line_that_ends_with_its_answer(width):
    line = one_line(HOSTILE, width)
    assert len(line) <= width and line.isprintable() and "boxed{2}" in line
    assert line.startswith("train, reward 1: What is")


def test_few_samples_are_spread_from_the_best_to_the_worst():
    rewards = (3.0, math.nan, 1.0, 5.0, 2.0)
    rollouts = [Rollout([1], [-0.5], str(reward), "stop", reward=reward) for reward in rewards]
    groups = [Group(Prompt("p", (1,), "q"), rollouts)]
    shown = few_samples(Responses("eval", 7, groups))
    assert [sample.response for sample in shown] == ["5.0", "3.0", "1.0", "nan"]
    assert worth_showing(7, shown) and not worth_showing(8, [])


def test_a_solution_of_the_data_has_no_reward():
    solution = Rollout([1], [0.0], "2", "stop", reward=1.0, source="demonstration")
    [shown] = few_samples(Responses("train", 7, [Group(Prompt("p", (1,), "1+1="), [solution])]))
    assert one_line(shown, 80) == "demonstration: 1+1= -> 2"


def test_the_live_display_fits_80_columns():
    status = Status(1000)
    status.update(999, dict.fromkeys([name for name, _ in CELLS], 123456.789) | STEP)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(draw(status, "runs/a/rather/long/name/of/a/directory", 80, HOSTILE))
    lines = console.file.getvalue().splitlines()
    assert {len(line) for line in lines} == {80}, "nothing wraps"


def test_off_is_silent(capfd):
    with Progress("off", 2) as progress:
        progress.update(1, STEP)
        progress.note("nothing")
    assert capfd.readouterr() == ("", "")


def test_status_keeps_the_latest_value_and_estimates_the_rest(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = Status(10)
    assert status.remaining is None and status.phase_shares == {}
    now[0] = 130.0  # a slow start does not count
    status.update(4, STEP | {"eval/pass@1": 0.25})
    now[0] = 136.0
    status.update(6, {"reward/mean": math.nan})
    assert status.latest["eval/pass@1"] == 0.25 and status.reward_history == [0.5]
    assert status.remaining == 12.0
    now[0] = 137.0
    assert status.remaining == 11.0 and status.elapsed == 37.0


def test_live_display_survives_prints_logs_and_death():
    """In a real pseudo-terminal every foreign line stands alone and whole, and the cursor comes back."""
    program = """
import logging, sys
logging.basicConfig(level=logging.INFO)          # holds the terminal before the display begins
from megatron_gvpo.observe import Progress
progress = Progress("auto", 10, title="GVPO")
for step in range(3):
    progress.update(step, {"reward/mean": 0.5, "eval/pass@1": 0.25, "time/step": 1.0, "time/rollout": 0.4})
    print(f"printed {step}")
    logging.getLogger("x").info("logged")
progress.note("noted [bold]")
raise RuntimeError("died")
"""
    screen = run_in_terminal(program)
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")  # cursor shown after it was hidden
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).splitlines()]
    for text in ("printed 0", "printed 2", "INFO:x:logged", "noted [bold]", "RuntimeError: died"):
        assert text in lines, text
    final = "\n".join(lines[-10:])
    assert "step  2/10" in final and "25.0%" in final and "rollout 40%" in final


def run_in_terminal(program):
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "40"}
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(main, 65536):
            output += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    child.wait()
    os.close(main)
    return output.decode()


def test_sparkline_spans_low_to_high_and_averages_what_does_not_fit():
    assert sparkline([], 10) == ""
    assert sparkline([0.3], 10) == "▁"
    assert sparkline([0, 1, 0.5], 10) == "▁█▅"
    assert sparkline([0, 0, 1, 1, 0, 1], 3) == "▁█▅"
    assert len(sparkline(range(1000), 40)) == 40


def test_clock():
    assert [clock(s) for s in (0, 59.6, 75, 3675)] == ["0:00", "1:00", "1:15", "1:01:15"]


# --- reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("reward/mean", "eval/pass@1"), ("train/loss",), ("eval/pass@1",)])
def test_curve_draws_what_the_file_has(tmp_path, names):
    from matplotlib import image

    file = tmp_path / "metrics.jsonl"
    records = [{"step": step} | {name: step / 30 for name in names} for step in range(20)]
    records[3][names[0]] = None
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    plot_curve(file, tmp_path / "curve.png", title="a run")
    height, width, _ = image.imread(tmp_path / "curve.png").shape
    assert width / height == pytest.approx(len(names) * 3.7 / 2.7, rel=0.01)


def test_curve_of_nothing_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="no reward/mean, train/loss or eval/pass@1"):
        plot_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")


@pytest.mark.parametrize("count", [1, 2, 5, 200])
def test_smooth_is_the_gaussian_average(count):
    values = np.random.default_rng(0).normal(size=count)
    at = np.arange(count)
    weights = np.exp(-0.5 * ((at[:, None] - at) / 3.0) ** 2) * (abs(at[:, None] - at) <= 9)
    np.testing.assert_allclose(smooth(list(values), 3.0), weights @ values / weights.sum(1), rtol=1e-12)


def test_time_report_accounts_for_all_of_the_time():
    lines = time_report({"training": 30.0, "rollout": 50.0}, 100.0).splitlines()
    assert [line.split() for line in lines] == [
        ["rollout", "50.0", "s", "50.0%"],
        ["training", "30.0", "s", "30.0%"],
        ["other", "20.0", "s", "20.0%"],
        ["total", "100.0", "s", "100.0%"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_observing_imports_nothing_heavy():
    program = "import sys, megatron_gvpo.observe; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert not {"torch", "matplotlib", "rich", "pynvml", "numpy"} & set(loaded)
