"""A reward worker: `python -m megatron_gvpo.rewards.worker FD`, started by `pool.RewardPool`.

Over the connection with file descriptor FD it receives the trainer's module path and the components, and
answers None, or the (index, problem) of a component that cannot be loaded. Then it receives lists of
jobs and answers every job, in order, with its value or its error. It must not import torch, so that it
starts fast and stays small.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from megatron_gvpo.rewards.registry import Job, load_reward
from megatron_gvpo.runtime.user_functions import described


def main() -> None:
    _outlive_signals_but_not_the_parent()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        path, components = connection.recv()
        sys.path += [entry for entry in path if entry not in sys.path]
        functions = []
        for index, component in enumerate(components):
            try:
                functions.append(load_reward(component))
            except ValueError as error:
                return connection.send((index, str(error)))
        connection.send(None)
        while True:
            for job in connection.recv():
                connection.send(_evaluate(functions[job.component], job))
    except (EOFError, OSError):
        pass  # the pool is gone


def _evaluate(function: Callable[..., Any], job: Job) -> float | str:
    """The reward, or its error."""
    try:
        value = function(job.prompt, job.rollout)
    except (Exception, SystemExit) as error:
        return described(error)
    if not isinstance(value, Real):
        return f"it returned {type(value).__name__} instead of a number"
    return float(value) if math.isfinite(value) else f"it returned {value}"


def _outlive_signals_but_not_the_parent() -> None:
    """Ctrl-C and Slurm's signals reach every process; only the trainer decides what they mean."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # A handler rather than SIG_IGN, because processes that a reward starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
