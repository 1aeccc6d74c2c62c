"""Starts the run's own server processes, watches and restarts them, and ends their process groups."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.environment import MEGATRONS
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.web import NoRedirect
from megatron_gvpo.servers.launch import server_guard
from megatron_gvpo.servers.launch.addresses import listens_alone, stranger
from megatron_gvpo.servers.server import Launch
from megatron_gvpo.settings.servers import EngineServers

POLL = 1.0  # seconds between looks at a process
GRACE = 15.0  # seconds between asking a server to end and ending it
FORGIVEN = 3600.0  # seconds of healthy answers after which a server's restarts no longer count
CHUNK = 2**20  # bytes of a log that are searched for the key at once
LOG_LINES = 20  # lines of a server's log to show when it fails
LOG_BYTES = 2**16  # bytes at the end of the log that are searched for them


class ServerProcess:
    """One server, as a process group. Only this user can read its log and use its sockets."""

    def __init__(self, launch: Launch, url: str, log: Path) -> None:
        self.url, self.log = url, log
        self._launch = launch
        self._secret: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begins = 0  # bytes of earlier processes' logs in the file
        self._listens = False

    def start(self) -> None:
        """Start the command. Raises OSError if it does not exist."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = _servers_part(os.environ) | self._launch.environment
        command = [sys.executable, "-IS", server_guard.__file__, str(os.getpid()), *self._launch.command]
        if self._launch.secret:
            self._secret = _private_file(self._launch.secret, self.log.parent)
            command.append(str(self._secret))
        with self.log.open("ab") as log:
            os.fchmod(log.fileno(), 0o600)
            self._log_begins, self._listens = log.tell(), False
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a new process group, so that one signal ends all of it
                umask=0o077,  # protects the sockets in /tmp that pass orders to its processes
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def exit_status(self) -> int | None:
        """The exit status of the process; None while it runs."""
        return self._process.poll() if self._process else None

    def listens(self) -> bool:
        """True while this process, and no other, listens at the server's address.

        Only such a process gets the key.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return False
        if not self._listens and listens_alone(process.pid, *self._address()):
            # True until the process ends, because no other process can listen on its port.
            self._listens = True
            self._forget_key()
        return self._listens

    @property
    def is_part(self) -> bool:
        """True if it is one machine's part of a server over several."""
        return server_guard.PART in self._launch.environment

    def is_healthy(self, timeout: float) -> bool:
        """True if this process answers that it is healthy within `timeout` seconds."""
        return self.listens() and is_healthy(self.url, timeout)

    def stranger(self) -> str | None:
        """The other process that listens at the server's address, if there is one."""
        return stranger(*self._address(), leader=self.pid)

    def stop(self, grace: float = GRACE) -> None:
        """Send SIGTERM to the process group; after `grace` seconds, SIGKILL."""
        self._forget_key()
        if self._process is None:
            return
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            deadline = running_seconds() + patience
            while _group_lives(self._process) and running_seconds() < deadline:
                time.sleep(0.05)
        self._process = None

    def _address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def _forget_key(self) -> None:
        """Remove the key's file, which the server has read, and the key in the log: SGLang prints the key."""
        if self._secret is not None:
            # The log is missing or its file system is lost, so other users cannot read it.
            with contextlib.suppress(OSError):
                self._secret.unlink()
            self._secret = None
        key = self._launch.key.encode()
        if not key:
            return
        with contextlib.suppress(OSError), self.log.open("r+b") as log:
            begin = self._log_begins
            while part := os.pread(log.fileno(), CHUNK + len(key) - 1, begin):  # a part may end within a key
                for match in re.finditer(re.escape(key), part):
                    os.pwrite(log.fileno(), b"*" * len(key), begin + match.start())
                begin += CHUNK

    def tail(self) -> str:
        """The last LOG_LINES lines of the log."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            return "\n".join(f"    {hide(line)[:300]}" for line in lines)
        return ""


class RanksProcess(ServerProcess):
    """Ranks of a server whose HTTP interface, and health check, is on another machine."""

    def is_healthy(self, timeout: float) -> bool:
        return self._process is not None and self._process.poll() is None

    def stranger(self) -> str | None:
        return None


@dataclass
class _Watched:
    """A process with the supervisor's record of it. All times are those of running_seconds()."""

    process: ServerProcess
    # The time since which the server is silent, and the setting that limits its silence; None before the next
    # look.
    silence: tuple[float, str] | None = None
    last_answer: float | None = None  # the time of the last healthy answer
    restarts: int = 0
    last_restart: float = 0.0
    must_restart: bool = False  # true if the server must restart even if it answers
    given_up: str | None = None  # the reason for giving the server up


class Supervisor:
    """Keeps server processes running until it is closed; watches them from its own thread.

    A process is started again if it ends, if it does not answer /health within `start_timeout` seconds of its
    start, or if it later is silent for `hang_timeout` seconds. The supervisor gives a server up after
    `restarts` restarts, or after one restart if it ends without ever answering: `failed` is the reason of the
    first such server. Restarts are forgotten when it still answers `FORGIVEN` seconds after the last. `key`
    is the configuration's, of `settings`; `kind` names the servers.
    """

    def __init__(
        self,
        processes: Sequence[ServerProcess],
        settings: EngineServers,
        report: Callable[[str], None],
        key: str = "rollout.servers",
        kind: str = "rollout server",
    ) -> None:
        self.processes = list(processes)
        self.failed: str | None = None
        self._settings, self._report, self._key, self._kind = settings, report, key, kind
        self._watched = {process.url: _Watched(process) for process in processes}
        self._is_on_hold, self._starting = False, threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch_all, name="server supervisor", daemon=True)

    def start(self) -> None:
        for process in self.processes:
            process.start()
            self._report(f"starting {self._kind} {process.url} (pid {process.pid}, log {process.log})")
        self._thread.start()

    def none_left(self, urls: Sequence[str] | None = None) -> str | None:
        """The reason why no server of `urls` (default: all) can serve again; None if one may."""
        reasons = [self._watched[url].given_up for url in (self._watched if urls is None else urls)]
        return reasons[0] if all(reasons) else None

    def restart(self, url: str) -> None:
        """Restart the server soon."""
        self._watched[url].must_restart = True

    def hold(self, unhealthy: Sequence[str]) -> None:
        """Start and check no server until `go_on`, because the trainer has their memory.

        The processes of the `unhealthy` servers, which may still be starting, are ended until then.
        """
        with self._starting:
            self._is_on_hold = True
            for url in unhealthy:
                self._watched[url].process.stop(grace=1.0)
                self._watched[url].must_restart = True

    def go_on(self) -> None:
        self._is_on_hold = False

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)
        threads = [threading.Thread(target=process.stop) for process in self.processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _watch_all(self) -> None:
        while not self._closing.wait(POLL):
            for server in self._watched.values():
                if self._is_on_hold:
                    server.silence = None  # a server that sleeps need not answer
                elif server.given_up is None:
                    trouble = self._trouble(server)
                    if trouble is not None and not self._closing.is_set():
                        self._end_trouble(server, trouble)

    def _trouble(self, server: _Watched) -> str | None:
        """The reason to start the server again, if there is one."""
        process = server.process
        status = process.exit_status()
        if status is not None:
            other = process.stranger()
            return f"ended with status {status}" + (f", and {other} has its port" if other else "")
        if server.must_restart:
            server.must_restart = False
            return "cannot be used"
        now = running_seconds()
        if server.silence is None:
            server.silence = (now, "start_timeout")
        since, setting = server.silence
        limit = getattr(self._settings, setting)
        if process.is_healthy(min(5.0, limit)):
            server.last_answer, server.silence = now, (now, "hang_timeout")
        elif now - since > limit:
            return f"has not answered for {self._key}.{setting}={limit:g} s"
        return None

    def _end_trouble(self, server: _Watched, trouble: str) -> None:
        """Start the server again, or give it up."""
        process = server.process
        if server.last_answer is not None and server.last_answer - server.last_restart > FORGIVEN:
            server.restarts = 0
        if server.restarts >= self._most_restarts(server):
            server.given_up = (
                f"{self._kind} {process.url} {trouble}, after {server.restarts} restarts "
                f"({self._key}.restarts); its log {process.log} ends with\n{process.tail()}"
            )
            self.failed = self.failed or server.given_up
            self._report(server.given_up)
            return
        server.restarts += 1
        server.last_restart = running_seconds()
        self._report(f"{self._kind} {process.url} {trouble}; starting it again")
        with self._starting:
            process.stop(grace=1.0)
            server.silence = None
            if self._is_on_hold:
                server.must_restart = True
                return
            try:
                process.start()
            except OSError as error:  # such as a lack of memory, or a lost file system
                self._report(f"{self._kind} {process.url} cannot be started: {error}")
                server.must_restart = True

    def _most_restarts(self, server: _Watched) -> int:
        """Return one restart for a server that ended before it ever answered: it would end in the same way.

        A part of a server over several machines also ends because another part did.
        """
        has_ended = server.process.exit_status() is not None
        is_stillborn = has_ended and server.last_answer is None and not server.process.is_part
        return min(1, self._settings.restarts) if is_stillborn else self._settings.restarts


def _private_file(content: str, directory: Path) -> Path:
    """Write a new YAML file in `directory` that only this user can read."""
    descriptor, name = tempfile.mkstemp(suffix=".yaml", dir=directory)
    with open(descriptor, "w") as file:
        file.write(content)
    return Path(name)


def is_healthy(url: str, timeout: float) -> bool:
    """True if the server's /health answers 200 within `timeout` seconds.

    No HTTP proxy is used, no redirect followed, and no key sent.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())
    try:
        with direct.open(f"{url}/health", timeout=timeout) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException, ValueError):  # no answer, not an HTTP answer, not an address
        return False


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reap the leader, because a zombie counts as alive
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _servers_part(environment: os._Environ[str]) -> dict[str, str]:
    """The environment without variables of Megatron and torchrun, which make a process act as a rank."""
    rank_variables = (
        MEGATRONS,
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONPATH",
    )
    return {
        name: value
        for name, value in environment.items()
        if name not in rank_variables and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }
