"""Several processes on this machine: torchrun with orderly ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `python -m megatron_gvpo <arguments>` in `processes` ranks under torchrun; its exit code.

    SIGTERM goes to the ranks alone, which save and exit: torchrun would give them half a minute and
    then report a failure, so it is told to leave that signal alone.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "megatron_gvpo", *arguments]
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT",
    }
    torchrun = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,  # so that the signal can be sent to the ranks as one group
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )

    def forward(number: int, frame: FrameType | None) -> None:
        os.killpg(torchrun.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    return torchrun.wait()
