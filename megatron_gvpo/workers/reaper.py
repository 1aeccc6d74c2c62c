"""Ends all processes that a worker started: `python -m megatron_gvpo.workers.reaper CHANNEL LEASH HANDLER`.

The worker is `worker.work(CHANNEL, HANDLER)`, and the reaper is its parent. Orphaned processes of its
descendants become the reaper's children, by the kernel's "child subreaper" setting, however often a function
forks and whatever session it opens. When the worker ends, or the trainer writes to the leash (a pipe) or
ends, the reaper kills them all. Then it exits with the worker's exit code.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from megatron_gvpo.core.environment import die_with_parent

# Slurm's signals and Ctrl-C reach every process of a run; only the trainer acts on them.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PATIENCE = 5.0  # seconds to kill the processes that a worker started
_PR_SET_CHILD_SUBREAPER = 36


def main() -> NoReturn:
    channel, leash = map(int, sys.argv[1:3])
    trainer, reaper = os.getppid(), os.getpid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if (worker := os.fork()) == 0:
        os.close(leash)
        os.setsid()  # a function that kills its process group does not kill the reaper
        die_with_parent(reaper)
        _be_first_to_die()
        handler = sys.argv[3]
        del sys.argv[1:]  # a user's file that reads arguments gets none
        import_module("megatron_gvpo.workers.worker").work(channel, handler)
        os._exit(0)  # without waiting for the threads of the functions
    os.close(channel)
    code = _follow(worker, leash, trainer)
    _end_children()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _be_first_to_die() -> None:
    """Make the kernel kill the worker before the trainer if memory runs out, and write no core file."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _follow(worker: int, leash: int, trainer: int) -> int:
    """Wait until the worker has ended, or end it with the trainer; returns its exit code (-n: signal n)."""
    ends = os.pidfd_open(worker)
    watched = select.poll()  # select takes only descriptors below 1,024, and the trainer may have more open
    watched.register(leash, select.POLLIN)
    watched.register(ends, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in watched.poll(1000)}
        if leash in ready or os.getppid() != trainer:
            os.kill(worker, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)  # orphans, too
            if process == worker:
                return os.waitstatus_to_exitcode(status)
            if process == 0:  # the other processes run on
                break


def _end_children() -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # no children are left
        import psutil  # imported here, because it is rarely needed

        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)


if __name__ == "__main__":
    main()
