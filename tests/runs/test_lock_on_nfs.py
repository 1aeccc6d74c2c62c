"""The lock on an output directory that two machines have mounted from an NFS server.

This machine's kernel may lack NFS, so a second one runs as a process: User-Mode Linux, from Debian. Server
and clients are that kernel's own. It has the machine's files, read-only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.machine.debian import unpack
from helpers.paths import HELPERS, ROOT

PACKAGES = (
    *("user-mode-linux", "kmod", "libkmod2", "nfs-common", "nfs-kernel-server", "libnfsidmap1", "libtirpc3"),
    *("libkeyutils1", "libevent-core-2.1-7", "libdevmapper1.02.1", "libwrap0"),
)
REFUSED = r"a run on {} \(process \d+, since .*\) is writing there: .*; if that machine is gone, remove"


def run_guest(packages: Path) -> list[str]:
    """The lines that the guest prints, without its kernel's."""
    variables = {
        "PACKAGES": packages,
        "PYTHON": sys.executable,
        "PYTHONPATH": ROOT,
        "PYTHONDONTWRITEBYTECODE": 1,
        "PROGRAM": HELPERS / "machine" / "nfs_locks.py",
        "init": HELPERS / "machine" / "nfs_guest.sh",
    }
    kernel = [packages / "usr/bin/linux.uml", "mem=512M", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"]
    consoles = ["con=null", "con0=fd:0,fd:1"]
    source, narrow = HELPERS / "machine" / "narrow_registers.c", packages / "narrow_registers.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", source, "-o", narrow], check=True)
    done = subprocess.run(
        [*map(str, kernel), *consoles, *(f"{name}={value}" for name, value in variables.items())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env=os.environ | {"LD_PRELOAD": str(narrow)},
    )
    return done.stdout.splitlines()


@pytest.mark.proof
def test_one_machine_at_a_time_and_a_failed_one_releases_it(tmp_path: Path) -> None:
    unpack(PACKAGES, tmp_path)
    lines = run_guest(tmp_path)
    output = "\n".join(lines)
    assert output.count(" nfs4 ") == 2 and "vers=4.2" in output and "ended with 0" in output, output
    reports = [line.split(" ", 2) for line in lines if line.startswith(("here ", "there "))]
    answers = [(node, answer) for node, _, answer in reports]
    one, other = (re.compile(REFUSED.format(f"node-{name}")) for name in ("here", "there"))
    assert answers[0] == ("here", "held"), output
    assert answers[1][0] == "there" and one.search(answers[1][1]), output
    assert answers[2] == ("there", "held"), "the holder was killed"
    assert answers[3][0] == "here" and other.search(answers[3][1]), output
    assert answers[-1] == ("here", "held"), "the server waits 15 s for a machine that failed"
