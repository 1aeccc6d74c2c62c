"""A rehearsal shows each phase that ends, and ends one that does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import on_null_cuda
from helpers.paths import ROOT
from helpers.suite.real_parts import used

from megatron_gvpo.rehearsal import process, progress
from megatron_gvpo.rehearsal.rank import RankJob

PHASES = (
    "import",
    "preparation",
    "build",
    "scoring",
    "first update",
    "second update",
    "checkpoint",
    "export",
)
ENDED = re.compile(r"rank (\d+), ([a-z ]+): [\d.]+ s")


def test_each_phase_that_ends_is_a_line_and_one_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank stops for good in its first update or a little later."""
    variables = on_null_cuda.environment()
    file = on_null_cuda.write_model(tmp_path)
    jobs = [RankJob([str(file)], [], rank, 2, made=[str(tmp_path / "model")]) for rank in (0, 1)]
    lines, stopped = list[str](), list[psutil.Process]()

    def report(line: str) -> None:
        lines.append(line)
        if line.startswith("rank 1, scoring"):
            children = psutil.Process().children()
            [parent] = [child for child in children if "megatron_gvpo.rehearsal.rank" in child.cmdline()]
            stopped.extend(parent.children())
            stopped[0].suspend()
            monkeypatch.setattr(progress, "LIMIT", 3.0)

    with pytest.raises(progress.StuckRankError) as stuck:
        list(process.run_jobs(jobs, variables, tmp_path, report))
    used("null CUDA")
    ended = [match.groups() for line in lines if (match := ENDED.fullmatch(line))]
    assert len(ended) == len(lines)
    of_first, of_second = ([name for rank, name in ended if rank == number] for number in "01")
    assert tuple(of_first) == PHASES and tuple(of_second) == PHASES[1 : len(of_second) + 1]
    assert str(stuck.value).startswith(f"rank 1, {PHASES[len(of_second) + 1]}: not done after 3 s")
    [rank] = stopped
    end = time.monotonic() + 30
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the rank goes on"
        time.sleep(0.1)


def test_a_process_of_which_no_line_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LIMIT", 0.5)
    asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    try:
        with pytest.raises(progress.StuckRankError, match=r"^the start of its process: not done after"):
            progress.follow(asleep, tmp_path / "progress", print)
    finally:
        os.kill(asleep.pid, signal.SIGKILL)
        asleep.wait()


@pytest.mark.proof
def test_the_command_shows_its_progress_beside_its_result(tmp_path: Path) -> None:
    on_null_cuda.environment()
    file = on_null_cuda.write_model(tmp_path)
    command = [sys.executable, "-m", "megatron_gvpo", "rehearse", str(file), "--world", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    used("null CUDA")
    assert done.returncode == 0 and done.stdout.startswith("{\n")
    ended = [ENDED.fullmatch(line) for line in done.stderr.splitlines()]
    assert tuple(match[2] for match in ended if match) == PHASES and all(ended)
