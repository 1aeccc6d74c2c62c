"""`doctor --cluster` on four gloo ranks, one of which differs on purpose, and under a real torchrun."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.suite.real_parts import used

from megatron_gvpo.cli import main
from megatron_gvpo.cluster.checkup import _rounds
from megatron_gvpo.servers.launch.supervise import is_healthy

FAULTS = {
    "none": [],
    "slow": [r"rank 2 on \S+: \S+ GB/s with other ranks; the median rank reaches \S+"],
    "version": [r"rank 2 on \S+ has torch 0.0, most have \d", "has megatron-core None, most have"],
    "clock": [r"rank 2 on \S+: its clock is \+3600.\d s from the others'"],
    "files": [r"rank 2 on \S+ does not see in .* what rank 0", r"rank 0 on \S+ does not see .* what rank 2"],
    "engine": [r"rank 2 on \S+ gets no healthy answer from http://127.0.0.1:9"],
    "expected": [
        r"pairs of ranks reach \S+ GB/s, less than the 35 expected of b200",
        "an all-reduce reaches",
    ],
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("checked")
    launch("helpers.workers.checkup_worker:run", [4], str(out), ",".join(FAULTS))
    return out


@pytest.mark.parametrize("fault", FAULTS)
def test_the_odd_one_out_is_named(checked: Path, fault: str):
    reports = [json.loads(file.read_text()) for file in checked.glob(f"{fault}-*.json")]
    assert len(reports) == 4 and all(one == reports[0] for one in reports), "every rank must say the same"
    measured, problems = reports[0]
    assert re.match(r"between pairs of ranks: \d+\.\d+ GB/s", measured[0])
    assert re.match(r"all-reduce over 4 ranks: \d+\.\d+ GB/s", measured[1])
    for words in FAULTS[fault]:
        assert any(re.search(words, problem) for problem in problems), problems
    if fault in ("none", "slow", "clock", "engine"):
        assert len(problems) == len(FAULTS[fault]), problems
    assert not list((checked / "shared").iterdir()), "it cleans up"


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on two ranks under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=300, env=environment)
    used("torchrun")
    return done


def test_under_torchrun(tmp_path: Path):
    done = torchrun("-m", "megatron_gvpo", "doctor", "--cluster", "--directory", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks. Ready: no rank differs from the others." in done.stdout


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_every_rank_meets_every_other_one_once(world: int):
    rounds = _rounds(world)
    for partners in rounds:
        assert all(partners[partners[rank]] == rank != partners[rank] for rank in partners)
    for rank in range(world):
        assert sorted(p[rank] for p in rounds if rank in p) == [r for r in range(world) if r != rank]


RANKS = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--cluster"], {}, "torchrun ... -m megatron_gvpo doctor --cluster"),
        (["--cluster"], {"WORLD_SIZE": "2"}, "(not set here: RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)"),
        (
            ["--cluster", "--gpu", "h900"],
            RANKS,
            "--gpu h900: unknown; planner/gpus.json describes h800, h100",
        ),
        (["--cluster", "--url", "node1:30000"], RANKS, "--url node1:30000: expected http://HOST:PORT"),
        (["--cluster", "--json"], RANKS, "--json: `doctor --cluster` has its lines only"),
        (["--gpu", "h800", "--url", "http://a:1"], {}, "--url, --gpu: for doctor --cluster only"),
    ],
)
def test_wrong_input_is_one_line(options, environment, words, monkeypatch, capsys):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", *options]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_directory_that_is_nowhere_is_said_once(tmp_path: Path):
    done = torchrun("-m", "megatron_gvpo", "doctor", "--cluster", "--directory", str(tmp_path / "nowhere"))
    (problem,) = re.findall("^problem: .*", done.stdout, re.MULTILINE)
    assert re.match("problem: every rank cannot write to .*nowhere: .*No such file", problem)
    assert done.returncode == 1 and "Not ready" in done.stdout


@pytest.mark.parametrize(
    ("answer", "urls"),
    [
        (b"", ["http://a b:1", "http://127.0.0.1:port"]),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ["http://127.0.0.1:{port}"]),
    ],
)
def test_what_is_no_server_is_not_healthy(answer: bytes, urls: list[str]):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def greet() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(answer)

        threading.Thread(target=greet, daemon=True).start()
        for url in urls:
            assert not is_healthy(url.format(port=port), 5.0)


def test_ranks_that_do_not_meet_say_so_in_a_line():
    """Nothing listens at the port where the second rank looks for the first."""
    program = "from megatron_gvpo.cluster import checkup; checkup.PATIENCE = 2.0; checkup.main('.', [], None)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **RANKS, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"error: rank 1 on \S+ cannot meet the 2 ranks at 127.0.0.1:9: ", done.stderr)


def test_a_rank_that_fails_ends_the_check_of_all(tmp_path: Path):
    program = tmp_path / "checks.py"
    program.write_text(
        "import os, sys\n"
        "from megatron_gvpo.cluster import checkup\n"
        "def fails(*_): raise RuntimeError('CUDA error: device not ready')\n"
        "if os.environ['RANK'] == '1': checkup._versions = fails\n"
        "sys.exit(checkup.main('.', [], None))\n"
    )
    done = torchrun(str(program))
    assert done.returncode == 1 and "RuntimeError" not in done.stderr, "a line, no traceback"
    assert re.search(
        r"^error: rank 1 on \S+: CUDA error: device not ready \(a rank", done.stderr, re.MULTILINE
    )
