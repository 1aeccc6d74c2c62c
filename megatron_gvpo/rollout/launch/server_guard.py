"""Ends a server with the process that started it: `python -IS server_guard.py STARTER COMMAND...`.

The guard leads the server's process group. Where the process STARTER ends, however it does, the guard ends
the whole group: processes that an engine is just starting do not notice that their parents have gone.
"""

import os
import select
import signal
import subprocess
import sys

GRACE = 15.0  # seconds between asking the group to end and ending it
# They reach the whole group, or every process of a Slurm job; the guard waits for the server's end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the server would inherit
    starter_ends = os.pidfd_open(starter)
    if os.getppid() != starter:
        return 1  # it was gone, and another process has its number
    server = subprocess.Popen(command)
    server_ends = os.pidfd_open(server.pid)
    ended, _, _ = select.select([starter_ends, server_ends], [], [])
    if starter_ends in ended:
        os.killpg(0, signal.SIGTERM)
        select.select([server_ends], [], [], GRACE)
        os.killpg(0, signal.SIGKILL)  # the guard, too
    code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
