"""Order at the start of a Slurm job whose servers share the trainer's GPUs: the trainer comes first.

The trainer builds its model and optimizer, then gives their memory away; only then do servers start. Without
this order both would take the same memory: a server refuses to start on a GPU that is not free, and a trainer
cannot build on a GPU that a server has filled. A trainer that starts its servers itself keeps the same order.

Both sides have the directory of this start's logs in MEGATRON_GVPO_LOGS. The directory is new at every start
of a job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.errors import RolloutError

LOGS = "MEGATRON_GVPO_LOGS"
FILE = "trainer_has_given_its_memory"
TRAINERS_LOG = "rank_00000.log"
POLL = 1.0  # seconds
REPORT_EVERY = 60.0  # seconds


def give_turn() -> None:
    """Tell the servers of the job that all ranks of the trainer have released their GPU memory."""
    if (logs := os.environ.get(LOGS)) is not None:
        Path(logs, FILE).touch()


def wait_for_turn(is_told_to_stop: threading.Event, timeout: float, report: Callable[[str], None]) -> bool:
    """Wait for `give_turn` in another process of the job; returns False after a request to stop.

    Returns true at once outside a job. `report` is called every minute with the reason for the wait. Raises
    RolloutError if the trainer has not given its memory away after `timeout` seconds: it hangs, or it needs
    longer.
    """
    if (logs := os.environ.get(LOGS)) is None:
        return True
    trainer = f"the trainer of this job (its log: {Path(logs, TRAINERS_LOG)})"
    begun = reported = running_seconds()
    # NFS asks the server for a directory that is opened, and may keep the answer about a file for a minute.
    while FILE not in os.listdir(logs):
        if is_told_to_stop.wait(POLL):
            return False
        now = running_seconds()
        if now - begun > timeout:
            raise RolloutError(
                f"{trainer} has not built its model and given its GPUs' memory away after "
                f"parallel.timeout_seconds={timeout:g} s, and the servers start only then: see if it hangs; "
                "if it needs longer, raise parallel.timeout_seconds"
            )
        if now - reported > REPORT_EVERY:
            reported = now
            report(
                f"servers have waited for {now - begun:.0f} of {timeout:g} s until {trainer} gives its GPUs' "
                "memory away"
            )
    return True
