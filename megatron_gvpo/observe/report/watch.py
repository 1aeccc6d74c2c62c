"""Serves the page on this machine's loopback address while the runs continue.

The page asks for the version of the data every few seconds, and reads the data again when it has changed. The
server answers only requests whose Host header names this machine, so that no website can read the runs
through a name that resolves to 127.0.0.1. Behind an ssh tunnel the header names localhost with any port.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.observe.report.page import Reporter, compressed, html

HOSTS = ("localhost", "127.0.0.1", "::1")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_FILES = ("metrics.jsonl", "config.yaml", "run.json", "rollouts")


class Watched:
    """The data of runs that may continue.

    They are collected again when the page requests them after a file has changed.
    """

    def __init__(self, directories: Sequence[Path], responses: int) -> None:
        self._directories = directories
        self._reporter = Reporter(directories, responses)
        self._lock = threading.Lock()
        self._version: str | None = None
        self._blocks: dict[str, bytes] = {}

    def version(self) -> str:
        """A text that changes when a run's records change."""
        stamps = []
        for directory in self._directories:
            for name in _FILES:
                try:
                    stat = (directory / name).stat()
                    stamps.append(f"{stat.st_mtime_ns}.{stat.st_size}")
                except OSError:  # the directory is missing or not accessible any more
                    stamps.append("")
        return "-".join(stamps)

    def block(self, name: str) -> bytes | None:
        """A block of the data; the block `index` is the newest. Raises ConfigError for damaged files."""
        with self._lock:
            if name == "index" and (version := self.version()) != self._version:
                report = self._reporter.report()
                self._blocks = {"index": compressed({**report.index, "version": version}), **report.blocks}
                self._version = version
            return self._blocks.get(name)


class WatchServer(ThreadingHTTPServer):
    """Answers with the page and its data, on 127.0.0.1. Raises OSError if the port is taken."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int) -> None:
        self.watched = watched
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        if not _is_this_machine(self.headers.get("Host", "")):
            text = "this server answers to localhost and 127.0.0.1 only"
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", text.encode())
        path = unquote(urlsplit(self.path).path)
        watched = self.server.watched
        if path == "/":
            page = html({}, connect=True).encode()
            return self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page)
        if path == "/version":
            version = json.dumps(watched.version()).encode()
            return self._answer(HTTPStatus.OK, "application/json", version)
        try:
            block = watched.block(path.removeprefix("/data/")) if path.startswith("/data/") else None
        except ConfigError as error:
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error).encode())
        if block is None:
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such block")
        return self._answer(HTTPStatus.OK, "application/octet-stream", block)

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing, because the terminal belongs to the user."""


def _is_this_machine(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in HOSTS
    except ValueError:
        return False
