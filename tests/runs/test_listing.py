"""`megatron-gvpo runs`: the table of the runs below a directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_gvpo.cli import main
from megatron_gvpo.runs.listing import find_runs
from megatron_gvpo.runs.lock import RunLock


def make_run(directory: Path, records: list[dict], checkpoints: tuple[int, ...] = (), **summary: int) -> None:
    directory.mkdir(parents=True)
    (directory / "run.json").write_text('{"files": {}, "starts": []}')
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in checkpoints:
        (directory / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        (directory / "checkpoints" / f"step_{step:08d}" / "state.json").write_text("{}")
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    graded = [{"step": s, "reward/mean": s / 10, "eval/pass@1": p} for s, p in ((0, 0.1), (2, 0.7), (4, 0.5))]
    make_run(tmp_path / "a", graded, (2, 4), steps=4)
    make_run(tmp_path / "sweep" / "b", [*graded, {"step": 5, "reward/mean": 0.25}], (4,), steps=4)
    make_run(tmp_path / "sweep" / "c", [])
    with (tmp_path / "sweep" / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "eval/pass@1": 0.9')  # being written
    return tmp_path


def test_the_table(runs: Path, capsys: pytest.CaptureFixture[str]):
    with RunLock(str(runs / "sweep" / "c")):
        assert main(["runs", str(runs)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run      state     step  checkpoint  reward  best eval/pass@1",
        "a        finished  4     4           0.400   0.7 at step 2",
        "sweep/b  stopped   5     4           0.250   0.7 at step 2",
        "sweep/c  running   -     -           -       -",
    ]


def test_damaged_metrics_are_named(runs: Path, capsys: pytest.CaptureFixture[str]):
    """Such a run looked like one that had not begun."""
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": NaN}\n')
    assert main(["runs", str(runs)]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line == "damaged metrics.jsonl: a; report RUN names the line"
    assert [run.is_damaged for run in find_runs(runs, "eval/pass@1")] == [True, False, False]


def test_a_run_inside_another_run_s_directory_is_listed(tmp_path: Path):
    """Fails on the old code, which looked no further than the run in `.`, say."""
    make_run(here := tmp_path / "here", [], (2,))
    make_run(here / "sweep" / "b", [])
    make_run(here / "rollouts" / "c", [])  # what a run writes to is not searched
    assert [run.directory for run in find_runs(tmp_path, "reward/mean")] == [here, here / "sweep" / "b"]


def test_a_run_that_was_stopped_before_its_first_record_is_not_finished(tmp_path: Path):
    make_run(tmp_path / "a", [])
    make_run(tmp_path / "b", [])
    (tmp_path / "b" / "metrics.jsonl").unlink()
    assert [run.state for run in find_runs(tmp_path, "reward/mean")] == ["stopped", "stopped"]


def test_another_metric_and_json(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", str(runs), "--best", "eval/pas@1"]) == 2
    assert "--best eval/pas@1: no run there has this metric" in capsys.readouterr().err
    assert main(["runs", str(runs), "--best", "reward/mean", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(run["best"], run["best_step"]) for run in entries] == [(0.4, 4), (0.4, 4), (None, None)]


def test_keys_that_differ_are_columns(runs: Path, capsys: pytest.CaptureFixture[str]):
    for name, lr in (("a", "1.0e-05"), ("sweep/b", "0.001")):
        text = f"output_dir: {name}\noptimizer: {{lr: {lr}, betas: [0.9, 0.95]}}\ntrain: {{steps: 4}}\n"
        (runs / name / "config.yaml").write_text(text)
    assert main(["runs", str(runs / "sweep"), "--json"]) == 0
    assert [run["settings"]["optimizer.lr"] for run in json.loads(capsys.readouterr().out)] == [0.001, None]
    shutil.rmtree(runs / "sweep" / "c")
    assert main(["runs", str(runs)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.endswith("best eval/pass@1  optimizer.lr")
    assert first.endswith(" 1e-05") and second.endswith(" 0.001")
    for name in ("a", "sweep/b"):
        file = runs / name / "config.yaml"
        file.write_text(file.read_text() + f"model: {{path: {name}, a: {name}1, b: {name}2, c: {name}3}}\n")
    assert main(["runs", str(runs)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 more keys differ: model.c; report RUN RUN")


def test_a_directory_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no runs there\n"
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err


def test_a_real_run(finished: Path):
    [run] = find_runs(finished, "eval/pass@1")
    assert (run.state, run.step, run.checkpoint) == ("finished", 4, 4) and run.best is not None


def test_twenty_long_runs_are_listed_at_once(runs: Path):
    """Lines with the metric alone are parsed. Measured in processor time, against parsing all lines."""
    record = {f"metric/{i}": i / 7 for i in range(60)}
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        for step in range(2000):
            graded = {"eval/pass@1": 0.5} if step % 20 == 0 else {}
            file.write(json.dumps({"step": step} | record | graded) + "\n")
    for i in range(20):
        shutil.copytree(runs / "a", runs / f"long_{i}")
    begin = time.thread_time()
    assert len(find_runs(runs, "eval/pass@1")) == 23
    listed = time.thread_time()
    for line in (runs / "a" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    parsing = 21 * (time.thread_time() - listed)
    assert listed - begin < 0.5 * parsing, "measured: a sixth of it"


def test_nothing_heavy_is_imported(runs: Path):
    program = (
        "import sys; from megatron_gvpo.cli import main; main(sys.argv[1:])\n"
        "print([n for n in ('torch', 'pydantic', 'pyarrow', 'yaml', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "runs", str(runs)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
