"""Runs on two clients of an NFS server (nfs_guest.sh) that want the lock of one output directory.

The program prints a line for each attempt: the client, the seconds since the start, and `held` or the error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

HOLD = """
import sys, time
from megatron_gvpo.runs.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(1000)
"""
LONGEST = 120.0


def start(node: str) -> tuple[subprocess.Popen[str], str]:
    """Ask for the lock from a node; returns the process, and its answer."""
    prefix = ["nsenter", "--target", os.environ["THERE"], "--net", "--uts"] if node == "there" else []
    command = [*prefix, sys.executable, "-c", HOLD, f"/mnt/{node}/run"]
    pipe, begin = subprocess.PIPE, time.monotonic()
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert process.stdout is not None and process.stderr is not None
    answer = process.stdout.readline().strip() or process.stderr.read().strip().splitlines()[-1]
    print(f"{node} {time.monotonic() - begin:.1f} {answer}", flush=True)
    return process, answer


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


first, _ = start("here")
start("there")
kill(first)
start("there")
start("here")
print("node-there fails", flush=True)
subprocess.run(["ip", "link", "set", "veth0", "down"], check=True)
begin, answer = time.monotonic(), ""
while answer != "held" and time.monotonic() - begin < LONGEST:
    last, answer = start("here")
kill(last)
