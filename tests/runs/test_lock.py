"""The lock on an output directory: one run at a time, released by death, and seen by a second run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.lock import FILE, RunLock, check_unlocked

HOLD = """
import os, subprocess, sys, time
from megatron_gvpo.runs.lock import RunLock
with RunLock(sys.argv[1]):
    if sys.argv[2] == "children":
        subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL)
        if os.fork() == 0:
            os.close(1)
            time.sleep(30)
            os._exit(0)
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(directory: Path, how: str = "alone") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(directory), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_second_run_is_told_who_writes_and_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_gvpo.runs.lock.PATIENCE", 100.0)  # with a process that is ending
    with holder(tmp_path) as other:
        for take in (RunLock(str(tmp_path)).__enter__, lambda: check_unlocked(str(tmp_path))):
            begin = time.monotonic()
            with pytest.raises(
                ConfigError, match=rf"a run on \S+ \(process {other.pid}, since 20\d\d-.*\) is"
            ):
                take()
            assert time.monotonic() - begin < 40.0, "nobody waits long for a process that lives"
        assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_killed_run_leaves_no_lock_even_where_its_children_live_on(tmp_path: Path):
    with holder(tmp_path, "children") as other:
        other.kill()
        with RunLock(str(tmp_path)):  # at once, while the process may still be ending
            pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_gvpo.runs.lock.PATIENCE_WITH_LIVING", 0.0)


@pytest.mark.usefixtures("impatient")
def test_two_runs_of_one_process_take_turns(tmp_path: Path):
    with RunLock(str(tmp_path)):
        with pytest.raises(ConfigError, match=rf"process {os.getpid()}, since"), RunLock(str(tmp_path)):
            pass
        with pytest.raises(ConfigError):
            check_unlocked(str(tmp_path))
    with RunLock(str(tmp_path)):
        pass


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path):
    check_unlocked(str(tmp_path / "a" / "b"))
    with RunLock(str(tmp_path / "a" / "b")):
        assert (tmp_path / "a" / "b" / FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with RunLock(str(tmp_path / "a" / "b")):
        (tmp_path / "a" / "b" / "metrics.jsonl").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "metrics.jsonl"]


@pytest.mark.usefixtures("impatient")
def test_only_one_of_many_at_once_gets_it(tmp_path: Path):
    """The holder removes the file, so others may have opened a file that no longer has its name."""
    inside, most = 0, 0

    def use() -> None:
        nonlocal inside, most
        for _ in range(50):
            try:
                with RunLock(str(tmp_path)):
                    inside += 1
                    most = max(most, inside)
                    time.sleep(0.0005)
                    inside -= 1
            except ConfigError:
                time.sleep(0.0005)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@pytest.mark.parametrize(
    ("first_start", "second_start"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_RESTART_COUNT": "1"}),
        ({"MEGATRON_GVPO_LOGS": "/logs/7.0"}, {"MEGATRON_GVPO_LOGS": "/logs/7.1"}),
    ],
)
def test_an_earlier_start_of_the_same_job_is_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first_start: dict[str, str],
    second_start: dict[str, str],
):
    """The file system of a requeued job may release the lock of a failed node late."""
    monkeypatch.setattr("platform.node", lambda: "the-node-that-failed")
    for name, value in first_start.items():
        monkeypatch.setenv(name, value)
    first = RunLock(str(tmp_path))
    first.__enter__()
    monkeypatch.setattr("platform.node", lambda: "another-node")
    for name, value in second_start.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megatron_gvpo.runs.lock.PATIENCE", 0.0)
    threading.Timer(0.5, first.release).start()
    with RunLock(str(tmp_path)):
        pass


@pytest.mark.parametrize("process", ["7f1c0b4e-5d6a-4c1f-9c0d-1a2b3c4d5e6f 812", None])
def test_a_pod_with_the_name_and_process_number_of_a_lost_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str | None
):
    """Pods of a JobSet keep their host name, and rank 0 of a container often has its own number again."""
    for name in ("PATIENCE", "PATIENCE_WITH_LIVING"):
        monkeypatch.setattr(f"megatron_gvpo.runs.lock.{name}", 0.0)
    monkeypatch.setenv("MEGATRON_GVPO_LOGS", "/logs/uid.0")
    first = RunLock(str(tmp_path))
    first.__enter__()
    written = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(written | {"process": process}))
    monkeypatch.setenv("MEGATRON_GVPO_LOGS", "/logs/uid.1")
    threading.Timer(0.5, first.release).start()
    with RunLock(str(tmp_path)):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"output_dir={tmp_path}/file/run: the lock run\.lock cannot be"):
        RunLock(str(tmp_path / "file" / "run")).__enter__()


NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
int fcntl64(int descriptor, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (command == F_OFD_SETLK || command == F_OFD_GETLK) return errno = ENOLCK, -1;
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64"))(descriptor, command, argument);
}
"""


def test_a_file_system_without_locks_is_said_and_a_run_of_this_machine_still_found(tmp_path: Path):
    (tmp_path / "none.c").write_text(NO_LOCKS)
    library = str(tmp_path / "none.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "none.c")], check=True)
    run = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run), "alone"]
    pipe, environment = subprocess.PIPE, {**os.environ, "LD_PRELOAD": library}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    first = start()
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        second = start()
        printed, error = second.communicate(timeout=60)
        assert printed == "" and f"(process {first.pid}, since 20" in error.splitlines()[-1]
    finally:
        first.kill()
    _, error = first.communicate(timeout=60)
    assert "its file system has no locks (No locks available): nothing keeps a run on another" in error
    third = start()
    try:
        assert third.stdout is not None and third.stdout.readline() == "held\n", "the first was killed"
    finally:
        third.kill()
        third.communicate()


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).symlink_to("../precious")
    with pytest.raises(ConfigError, match=r"the lock run\.lock cannot be written: it is a symbolic link"):
        RunLock(str(tmp_path / "run")).__enter__()
    assert (tmp_path / "precious").read_text() == "years of work"
