"""Separate Python environments for packages that conflict with this project's, built once and cached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from helpers.paths import HELPERS


def environment_of(pins: str) -> Path:
    """The Python of an environment with the packages in helpers/programs/`pins`, a pip requirements file."""
    file = HELPERS / "programs" / pins
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_gvpo"
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / f"{file.stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / ".complete").exists():
            uv = [sys.executable, "-m", "uv"]
            subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, home], check=True)
            install = ["pip", "install", "--quiet", "--python", home / "bin" / "python", "-r", file]
            subprocess.run([*uv, *install], check=True, timeout=600)
            (home / ".complete").touch()
    return home / "bin" / "python"
