"""Runs a server of environments on loopback, in its own Python environment.

The worker process that runs the conversations starts the server. `workers.reaper` ends the server when that
worker process ends for any reason.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.launch import free_ports
from megatron_gvpo.workers.environment import Outage

START = 180.0  # seconds in which a server must import its packages and listen
CONNECT = 10.0  # seconds that a connection may take
MOST_BYTES = 2**24  # limit for one message or answer
_HOST = "127.0.0.1"
_AGAIN = 0.05  # seconds between two attempts to connect
_ENDING = 2.0  # seconds that a process may take to end after it has closed its connections
_SHOWN = 600  # bytes of a server's last output in the error after its end
_MOST_PRINTED = 2**20  # the most bytes of output on the disk; then they are deleted


class LocalServerFailed(Outage):
    """Raised if a server of environments did not start, has ended, or sent a wrong answer."""


class LocalServer:
    """One server process: `start` starts the process; `url` and `ensure` start it again after it has ended.

    It takes no thread of this process, so that a process which starts agent programs can fork.
    """

    def __init__(
        self, name: str, command: Callable[[int], Sequence[str]], directory: str, seconds: float = START
    ) -> None:
        """`command` gets the port. `directory` is its working directory; `name` is for errors."""
        self.name = name
        self._command, self._directory, self._seconds = command, directory, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this object
        # After the file was emptied, output begins at its start.
        fcntl.fcntl(self._printed, fcntl.F_SETFL, fcntl.fcntl(self._printed, fcntl.F_GETFL) | os.O_APPEND)
        self._port = 0
        self._starting: asyncio.Task[str] | None = None

    def start(self) -> str:
        """Start the server and wait until it listens; returns its URL.

        Raises LocalServerFailed with the reason.
        """
        [self._port] = free_ports(1, _HOST)
        command = list(self._command(self._port))
        # Another Python environment must not see the trainer's packages.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        self._printed.truncate(0)
        try:
            self._process = subprocess.Popen(
                command,
                cwd=self._directory,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise LocalServerFailed(f"{self.name} cannot be started: {error}") from None
        self._wait(self._process)
        return f"http://{_HOST}:{self._port}"

    def stop(self) -> None:
        """End the server's process, if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def ensure(self) -> str:
        """The server's URL, once it listens; starts it again if it has ended. Raises LocalServerFailed."""
        if (problem := self.problem()) is None:
            return f"http://{_HOST}:{self._port}"
        if self._process is not None:
            print(f"{problem}: starting it again", file=sys.stderr, flush=True)
        return self.start()

    async def url(self) -> str:
        """Start the server in the background if it is not running; return its address.

        Raises LocalServerFailed.
        """
        if self._starting is None or (self._starting.done() and self.problem() is not None):
            self._starting = asyncio.create_task(asyncio.to_thread(self.ensure))
        # A step that gives up waiting does not cancel the start, for which other steps may wait.
        return await asyncio.shield(self._starting)

    def problem(self) -> str | None:
        """How its process ended, with the last lines that it printed; None while it runs."""
        if self._process is None:
            return f"{self.name} was not started"
        code, size = self._process.poll(), os.fstat(self._printed.fileno()).st_size
        if code is None:
            if size > _MOST_PRINTED:
                self._printed.truncate(0)
            return None
        last = os.pread(self._printed.fileno(), _SHOWN, max(0, size - _SHOWN)).decode(errors="replace")
        lines = " / ".join(line.strip() for line in last.splitlines() if line.strip())
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{self.name} ended ({how}; it printed: {lines or 'nothing'})"

    async def ended(self) -> str | None:
        """`problem` of a process that has closed a connection, and may be about to end."""
        deadline = running_seconds() + _ENDING
        while (problem := self.problem()) is None and running_seconds() < deadline:
            await asyncio.sleep(_AGAIN)
        return problem

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = running_seconds() + self._seconds
        while running_seconds() < deadline:
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


class EnvironmentServer:
    """Where an environment is served: by a process that is started here, or at a URL."""

    def __init__(self, kind: str, local: LocalServer | None, address: str) -> None:
        """`kind` is for errors; `address` is empty until a process that is started here listens."""
        self._kind, self.local, self.address = kind, local, address

    def __str__(self) -> str:
        return self.local.name if self.local else f"{self._kind} {self.address}"

    @classmethod
    def of(
        cls,
        kind: str,
        command: Callable[[str, str, int], Sequence[str]],
        application: tuple[str, str | None],
        python: str | None,
        directory: str,
        url: str | None,
    ) -> Self:
        """The server with a user's options. `command` gets the interpreter, the application and the port.

        `application`: the option's name and its value. Raises ValueError for wrong options.
        """
        name, value = application
        if (python is None) != (value is None) or (url is None) == (value is None):
            raise ValueError(f"give python and {name}, whose server is started, or the url of one that runs")
        if url is not None:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url={url}: want http:// or https://")
            return cls(kind, None, url.rstrip("/"))
        assert python is not None
        assert value is not None
        program = interpreter(python)
        if not Path(directory).is_dir():
            raise ValueError(f"directory={directory}: there is no such directory")
        local = LocalServer(f"{kind} of {value}", lambda port: command(program, value, port), directory)
        return cls(kind, local, "")

    def ensure(self) -> None:
        """Start the server if it does not run. Raises ValueError if it cannot be started."""
        if self.local is not None:
            try:
                self.address = self.local.ensure()
            except LocalServerFailed as problem:
                raise ValueError(str(problem)) from None

    async def url(self) -> str:
        """The address of the server, which is started again if it has ended. Raises LocalServerFailed."""
        if self.local is not None:
            self.address = await self.local.url()
        return self.address


def interpreter(python: str) -> str:
    """The path of a Python interpreter, as seen from any directory. Raises ValueError if there is none."""
    path = Path(python).absolute()  # without resolving links: in a Python environment it is a link
    if not os.access(path, os.X_OK) or path.is_dir():
        raise ValueError(f"python={python}: there is no interpreter at {path}")
    return str(path)
