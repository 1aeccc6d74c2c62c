"""A clock for chaos runs that can be made to jump: libfaketime (Debian's package) moves the calendar's time.

The monotonic clock does not jump, as when an administrator or NTP sets a machine's clock.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
SLEEPS = Path(__file__).with_suffix(".c")


class Clock:
    """The clock of processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._file, self._library = folder / "clock", folder / "clock.so"
        self.set(0.0)

    def environment(self) -> dict[str, str]:
        """Environment variables of the processes. Raises FileNotFoundError without libfaketime."""
        if not FAKETIME.exists():
            raise FileNotFoundError(f"{FAKETIME} is missing: apt-get install libfaketime")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(self._library), str(SLEEPS)], check=True)
        return {
            "LD_PRELOAD": f"{self._library} {FAKETIME}",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds until the processes see a jump
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead: float) -> None:
        """Set this clock `ahead` seconds ahead of the machine's."""
        self._ahead = ahead
        aside = self._file.with_suffix(".new")
        aside.write_text(f"{ahead:+.0f}\n")
        aside.replace(self._file)

    def jump(self, seconds: float) -> None:
        self.set(self._ahead + seconds)
