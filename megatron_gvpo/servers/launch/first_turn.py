"""Order at the start of a Slurm job whose servers share the trainer's GPUs: the trainer comes first.

The trainer builds its model and optimizer, then gives their memory away; only then do servers start. Without
this order both would take the same memory: a server refuses to start on a GPU that is not free, and a trainer
cannot build on a GPU that a server has filled. A trainer that starts its servers itself keeps it, too.

Both sides have the directory of this start's logs in MEGATRON_GVPO_LOGS. It is new at every start of a job.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

LOGS = "MEGATRON_GVPO_LOGS"
FILE = "trainer_has_given_its_memory"
POLL = 1.0  # seconds


def give_turn() -> None:
    """Tell the servers of the job that all ranks of the trainer have given their memory away."""
    if (logs := os.environ.get(LOGS)) is not None:
        Path(logs, FILE).touch()


def wait_for_turn(is_told_to_stop: threading.Event) -> bool:
    """Wait for `give_turn` in another process of the job; returns False if told to stop meanwhile.

    True at once outside a job.
    """
    if (logs := os.environ.get(LOGS)) is None:
        return True
    # NFS asks the server for a directory that is opened, and may keep the answer about a file for a minute.
    while FILE not in os.listdir(logs):
        if is_told_to_stop.wait(POLL):
            return False
    return True
