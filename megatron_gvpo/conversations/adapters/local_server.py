"""A server of environments in a Python environment of its own, on loopback.

The worker process that has the conversations starts it. `workers.reaper` ends it with that process, however
that ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_gvpo.core.launch import free_ports

START = 180.0  # seconds that a server has to import its packages and to listen
_HOST = "127.0.0.1"
_AGAIN = 0.05  # seconds between two attempts to connect
_ENDING = 2.0  # seconds that a process may take to end after it has closed its connections
_LAST_LINES = 5  # of what a server printed, in the error of one that has ended


class LocalServerFailed(RuntimeError):  # noqa: N818
    """A server of environments did not start, has ended, or answered what it should not."""


class LocalServer:
    """One server process. It is started by `start`, and again by `url` after it has ended."""

    def __init__(
        self, name: str, command: Callable[[int], Sequence[str]], directory: str, seconds: float = START
    ) -> None:
        """`command` gets the port. `directory` is its working directory; `name` is for errors."""
        self.name = name
        self._command, self._directory, self._seconds = command, directory, seconds
        self._process: subprocess.Popen[str] | None = None
        self._printed: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader: threading.Thread | None = None
        self._port = 0
        self._starting: asyncio.Task[str] | None = None

    def start(self) -> str:
        """Start it and wait until it listens; returns its URL. Raises LocalServerFailed with the reason."""
        [self._port] = free_ports(1, _HOST)
        command = list(self._command(self._port))
        # Another Python environment must not see the trainer's packages.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            self._process = subprocess.Popen(
                command,
                cwd=self._directory,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise LocalServerFailed(f"{self.name} cannot be started: {error}") from None
        self._printed.clear()
        self._reader = threading.Thread(target=self._read, args=[self._process], daemon=True)
        self._reader.start()
        self._wait(self._process)
        return f"http://{_HOST}:{self._port}"

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def url(self) -> str:
        """Its URL, once it listens; one that has ended is started again. Raises LocalServerFailed."""
        if self._starting is None or (self._starting.done() and self.problem() is not None):
            self._starting = asyncio.create_task(self._restarted())
        return await asyncio.shield(self._starting)  # it goes on starting for others if a step is late

    async def _restarted(self) -> str:
        if (problem := self.problem()) is None:
            return f"http://{_HOST}:{self._port}"
        print(f"{problem}: starting it again", file=sys.stderr, flush=True)
        return await asyncio.to_thread(self.start)

    def problem(self) -> str | None:
        """How its process ended, with the last lines that it printed; None while it runs."""
        if self._process is None:
            return f"{self.name} was not started"
        if (code := self._process.poll()) is None:
            return None
        assert self._reader is not None
        self._reader.join(1.0)
        lines = " / ".join(line for line in self._printed if line)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{self.name} ended ({how}; it printed: {lines[-600:] or 'nothing'})"

    async def ended(self) -> str | None:
        """`problem` of a process that has closed a connection, and may be about to end."""
        deadline = time.monotonic() + _ENDING
        while (problem := self.problem()) is None and time.monotonic() < deadline:
            await asyncio.sleep(_AGAIN)
        return problem

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._printed.append(line.strip()[:300])

    def _wait(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            if (problem := self.problem()) is not None:
                raise LocalServerFailed(f"{problem} before it listened on {_HOST}:{self._port}")
            try:
                socket.create_connection((_HOST, self._port), 1.0).close()
                return
            except OSError:
                time.sleep(_AGAIN)
        process.kill()
        process.wait()
        raise LocalServerFailed(
            f"{self.name} did not listen on {_HOST}:{self._port} within {self._seconds:g} seconds"
        )


def interpreter(python: str) -> str:
    """The path of a Python interpreter, as seen from any directory. Raises ValueError if there is none."""
    path = Path(python).absolute()  # without resolving links: in a Python environment it is a link
    if not os.access(path, os.X_OK) or path.is_dir():
        raise ValueError(f"python={python}: there is no interpreter at {path}")
    return str(path)
