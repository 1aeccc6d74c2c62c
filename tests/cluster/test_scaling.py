"""benchmarks/scaling.py on one and two ranks, its comparison with a baseline, its Slurm jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.suite.real_parts import used

SCALING = ROOT / "benchmarks" / "scaling.py"
PHASES = {"rollout", "reward", "training", "optimizer", "sync", "waiting", "other"}


def scaling(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCALING, *map(str, arguments)]
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scaling") / "out.json"
    sizes = ("--modes", "strong", "--ranks", 1, 2, "--layout", "", "--prompts", 4, "--steps", 1)
    done = scaling(*sizes, "--out", out)
    assert done.returncode == 0, done.stderr[-4000:]
    used("torchrun")
    return out


@pytest.mark.proof  # test_slurm_jobs runs the benchmark on no rank
def test_points_say_where_the_time_goes_and_what_is_sent(measured: Path):
    points = json.loads(measured.read_text())["points"]
    assert [(p["ranks"], p["layout"]) for p in points] == [(1, ""), (2, "")]
    for point in points:
        assert set(point["seconds"]) >= PHASES
        assert sum(point["seconds"].values()) == pytest.approx(point["seconds_per_step"])
        rate = point["tokens_per_step"] / point["seconds_per_step"]
        assert point["tokens_per_s"] == pytest.approx(rate)
        assert point["tokens_per_s_per_rank"] == pytest.approx(rate / point["ranks"])
        assert point["efficiency"] == pytest.approx(rate / point["ranks"] / points[0]["tokens_per_s"])
        assert 0 < point["mfu_of_step"] < point["mfu_of_training"] < 1
        assert point["updates_equal_formula"] is True
    single, data = ({(m["operation"], m["group"]) for m in p["messages"]} for p in points)
    assert not single
    assert {("reduce_scatter", "dp"), ("all_gather", "dp")} <= data and not any("tp" in key for key in data)


@pytest.mark.proof  # test_slurm_jobs runs the benchmark on no rank
def test_a_slower_point_or_more_bytes_than_before_fail(measured: Path, tmp_path: Path):
    now = json.loads(measured.read_text())
    points = tmp_path / "points"
    points.mkdir()
    for number, point in enumerate(now["points"]):
        (points / f"{number}.json").write_text(json.dumps(point))
    assert scaling("--report", points, "--baseline", measured).returncode == 0

    before = json.loads(measured.read_text())
    before["points"][0]["tokens_per_s"] *= 2
    before["points"][1]["messages"][0]["bytes"] //= 4
    (tmp_path / "before.json").write_text(json.dumps(before))
    done = scaling("--report", points, "--baseline", tmp_path / "before.json", "--plot", tmp_path / "x.png")
    assert done.returncode == 1 and (tmp_path / "x.png").stat().st_size > 10_000
    assert "strong-1: 0.50 of the baseline's tokens/s" in done.stderr
    assert "strong-2: " in done.stderr and "bytes a token" in done.stderr
    assert "| strong-2 |" in done.stdout


def test_slurm_jobs(task: Path, tmp_path: Path):
    """The job is that of `megatron-gvpo slurm`, with the benchmark in place of the trainer."""
    config = tmp_path / "run.yaml"
    config.write_text((task / "run.yaml").read_text())
    arguments = (
        "--nodes",
        1,
        2,
        "--ranks-per-node",
        2,
        "--no-gpus",
        "--layout",
        "parallel.tp=2",
        "--dry-run",
    )
    done = scaling(config, *arguments, "--modes", "weak", "--prompts", 4, "--points", tmp_path / "points")
    assert done.returncode == 0, done.stderr
    scripts = [Path(line) for line in done.stdout.splitlines() if line.endswith("job.sbatch")]
    assert len(scripts) == 2
    for nodes, script in zip((1, 2), scripts, strict=True):
        text = script.read_text()
        subprocess.run(["bash", "-n", script], check=True)
        assert f"#SBATCH --nodes={nodes}\n" in text and f"--nnodes={nodes} --nproc-per-node=2" in text
        assert f"{ROOT}/benchmarks/lib/scaling/worker.py" in text
        assert f"train.prompts_per_step={4 * nodes} " in text and "parallel.tp=2" in text
