"""Installs or unpacks Debian packages that tests of real parts need and this machine lacks."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SECONDS = 600.0


def install(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install `packages` unless all `programs` are there.

    One process at a time does so, because apt-get does not wait for another one.

    Raises AssertionError, with the reason, where they cannot be installed: a real part that silently did not
    run is a defect.
    """
    with open("/tmp/megatron_gvpo-tests-apt.lock", "w") as lock:  # shared by all test runs on this machine
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [program for program in programs if shutil.which(program) is None]
        if not missing:
            return
        assert os.geteuid() == 0 and shutil.which("apt-get"), (
            f"{' and '.join(missing)} missing, and only root with apt-get could install {' '.join(packages)}"
        )
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "-q", *arguments],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
            assert done.returncode == 0, f"apt-get {' '.join(arguments)}: {done.stderr[-4000:]}"


def unpack(packages: Sequence[str], directory: Path) -> None:
    """Download packages and unpack them in `directory`, without installing them or starting services.

    Raises AssertionError, with the reason, if that fails.
    """
    assert shutil.which("apt-get") and shutil.which("dpkg-deb"), f"no apt-get to download {packages}"
    (downloads := directory / "downloads").mkdir(parents=True)
    lists = Path("/var/lib/apt/lists")
    fresh = lists.is_dir() and any(lists.glob("*_Packages*"))
    for arguments in ([] if fresh else [["update"]], [["download", *packages]]):
        for each in arguments:
            done = subprocess.run(
                ["apt-get", "-q", *each], cwd=downloads, capture_output=True, text=True, timeout=SECONDS
            )
            assert done.returncode == 0, f"apt-get {' '.join(each)}: {done.stderr[-4000:]}"
    for file in downloads.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(file), str(directory)], check=True, timeout=SECONDS)
