"""`doctor --cluster` on four gloo ranks, one of which differs on purpose, and under a real torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import launch
from real_parts import used

from megatron_gvpo.cluster.checkup import _rounds

FAULTS = {
    "none": [],
    "slow": [r"rank 2 on \S+: \S+ GB/s with other ranks, and \S+ is usual here"],
    "version": [r"rank 2 on \S+ has torch 0.0, most have \d", "has megatron-core None, most have"],
    "clock": [r"rank 2 on \S+: its clock is \+3600.\d s from the others'"],
    "files": [r"rank 2 on \S+ does not see in .* what rank 0", r"rank 0 on \S+ does not see .* what rank 2"],
    "engine": [r"rank 2 on \S+ gets no healthy answer from http://127.0.0.1:9"],
    "expected": [r"pairs of ranks reach \S+ GB/s, and 35 are expected of b200", "an all-reduce reaches"],
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("checked")
    launch("checkup_worker:run", [4], str(out), ",".join(FAULTS))
    return out


@pytest.mark.parametrize("fault", FAULTS)
def test_the_odd_one_out_is_named(checked: Path, fault: str):
    said = [json.loads(file.read_text()) for file in checked.glob(f"{fault}-*.json")]
    assert len(said) == 4 and all(one == said[0] for one in said), "every rank must say the same"
    measured, problems = said[0]
    assert re.match(r"between pairs of ranks: \d+\.\d+ GB/s", measured[0])
    assert re.match(r"all-reduce over 4 ranks: \d+\.\d+ GB/s", measured[1])
    for words in FAULTS[fault]:
        assert any(re.search(words, problem) for problem in problems), problems
    if fault in ("none", "slow", "clock", "engine"):
        assert len(problems) == len(FAULTS[fault]), problems
    assert not list((checked / "shared").iterdir()), "it cleans up"


def test_under_torchrun(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_gvpo", "doctor", "--cluster", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks. Ready: no rank differs from the others." in done.stdout
    used("torchrun")


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_every_rank_meets_every_other_one_once(world: int):
    rounds = _rounds(world)
    for partners in rounds:
        assert all(partners[partners[rank]] == rank != partners[rank] for rank in partners)
    for rank in range(world):
        assert sorted(p[rank] for p in rounds if rank in p) == [r for r in range(world) if r != rank]


def test_without_ranks_it_says_how_to_start_it():
    command = [sys.executable, "-m", "megatron_gvpo", "doctor", "--cluster"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "torchrun ... -m megatron_gvpo doctor --cluster" in done.stderr
