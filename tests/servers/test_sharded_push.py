"""Sharded pushes from four trainer ranks to two real servers of two ranks each."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.inputs import moe_task
from helpers.servers.real_servers import ENGINES, running

pytestmark = pytest.mark.proof  # tests/weights/test_sharded.py has the same ranks, without engines
TWO_OF_TWO = ("rollout.servers.tp=2", "rollout.servers.count=2")


def assert_equal_from_files(directory: Path, steps: range) -> None:
    """Each server computes with the tensors that it has after it loads the export from files."""
    for server in ("0", "1"):
        checksums = [(directory / server / f"checksum-{step}").read_text() for step in steps]
        assert len(set(checksums)) == len(checksums), "each push changed the weights"
        for step, pushed in zip(steps, checksums, strict=True):
            assert pushed == (directory / server / f"checksum-{step}-from-files").read_text()


@pytest.mark.parametrize("layout", ["tp2 pp2", "ep2 tp2"])
@pytest.mark.parametrize("engine", ENGINES)
def test_servers_beside_the_trainer_are_handed_their_shards(
    engine: str, layout: str, task: Path, tmp_path: Path
):
    """The same holds through memory, where each server rank has a rank of the trainer beside it."""
    if "ep2" in layout:
        task = moe_task.make(task, tmp_path / "task")
    with running(engine, task, tmp_path, *TWO_OF_TWO) as supervisor:
        urls = ",".join(process.url for process in supervisor.processes)
        own = (engine, urls, str(task), str(tmp_path), layout, "colocated")
        launch("helpers.pushes.sharded_worker:push", [4], *own)
        assert_equal_from_files(tmp_path, range(3))


@pytest.mark.parametrize("engine", ENGINES)
def test_two_servers_of_two_ranks_get_their_shards(engine: str, task: Path, tmp_path: Path):
    """Checksums, the probe's log-probs and the bytes of every link are right, push after push."""
    with running(engine, task, tmp_path, *TWO_OF_TWO) as supervisor:
        urls = ",".join(process.url for process in supervisor.processes)
        launch("helpers.pushes.sharded_worker:push", [4], engine, urls, str(task), str(tmp_path), "tp2 pp2")
        assert_equal_from_files(tmp_path, range(3))


@pytest.mark.parametrize("layout", ["ep2 tp2", "ep2 etp2 tp2"])
@pytest.mark.parametrize("engine", ENGINES)
def test_experts_go_from_their_ranks_to_the_servers(engine: str, layout: str, task: Path, tmp_path: Path):
    """The same holds for a mixture of experts, whose experts are on different ranks, whole or in halves."""
    moe = moe_task.make(task, tmp_path / "task")
    with running(engine, moe, tmp_path, *TWO_OF_TWO) as supervisor:
        urls = ",".join(process.url for process in supervisor.processes)
        launch("helpers.pushes.sharded_worker:push", [4], engine, urls, str(moe), str(tmp_path), layout)
        assert_equal_from_files(tmp_path, range(3))


@pytest.mark.parametrize("transport", ["sharded", "colocated"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_or_the_trainer_that_is_killed_in_mid_push_is_back_in_the_next(
    engine: str, transport: str, task: Path, tmp_path: Path
):
    with running(engine, task, tmp_path, *TWO_OF_TWO) as supervisor:
        urls = ",".join(process.url for process in supervisor.processes)
        with pytest.raises(AssertionError, match=r"exit status|SIGKILL"):
            launch(
                "helpers.pushes.sharded_worker:interrupted",
                [4],
                engine,
                urls,
                str(task),
                str(tmp_path),
                "tp2 pp2",
                transport,
            )
        pid = str(supervisor.processes[0].pid)
        launch(
            "helpers.pushes.sharded_worker:killed",
            [4],
            engine,
            urls,
            str(task),
            str(tmp_path),
            "tp2 pp2",
            pid,
            transport,
            timeout=1500,  # the killed server may take rollout.servers.start_timeout to come back
        )
        assert_equal_from_files(tmp_path, range(1, 2))
