"""A stand-in for the Hugging Face hub on loopback, as far as reading data sets goes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40
Files = Mapping[str, bytes]


@contextmanager
def hub_of(data_sets: Mapping[str, Files]) -> Iterator[tuple[str, list[str]]]:
    """(URL, the paths of files that were read) of a hub that has these data sets."""
    read: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name, files = self._named(urlsplit(self.path).path.removeprefix("/api/datasets/"))
            paths = request.get("paths", []) if name else []
            self._json([_entry(path, files[path]) for path in paths if path in files])

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/api/datasets/"):
                name, files = self._named(path.removeprefix("/api/datasets/"))
                rest = path.removeprefix(f"/api/datasets/{name}")
                if not name:
                    self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                elif rest.startswith("/tree/"):
                    self._json(_children(files, rest.removeprefix("/tree/").partition("/")[2]))
                else:
                    siblings = [{"rfilename": path} for path in files]
                    known = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
                    self._json({**known, "gated": False, "disabled": False, "downloads": 0, "likes": 0})
                return
            name, files = self._named(path.removeprefix("/datasets/"))
            inside = path.removeprefix(f"/datasets/{name}/resolve/").partition("/")[2]
            if inside not in files:
                self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            data = files[inside]
            if self.command == "GET":
                read.append(f"{name}/{inside}")
            code, begin = 200, 0
            if wanted := self.headers.get("Range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                code, begin, end = 206, int(first), int(last or len(data) - 1) + 1
                data = data[begin:end]
            self.send_response(code)
            self.send_header("ETag", f'"{hashlib.sha256(files[inside]).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if code == 206:
                total = len(files[inside])
                self.send_header("Content-Range", f"bytes {begin}-{begin + len(data) - 1}/{total}")
            self._end(data)

        def _named(self, path: str) -> tuple[str, Files]:
            name = next((name for name in data_sets if f"{path}/".startswith(f"{name}/")), "")
            return name, data_sets.get(name, {})

        def _json(self, values: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self._end(json.dumps(values).encode())

        def _end(self, data: bytes) -> None:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", read
        server.shutdown()


def _children(files: Files, folder: str) -> list[dict[str, Any]]:
    """The files and folders right inside a folder; the top one is ""."""
    begin, children = f"{folder}/" if folder else "", dict[str, dict[str, Any]]()
    for path, data in files.items():
        if path.startswith(begin):
            name, inside, _ = path.removeprefix(begin).partition("/")
            child = f"{begin}{name}"
            directory = {"type": "directory", "path": child, "size": 0, "oid": "0" * 40}
            children[child] = directory if inside else _entry(path, data)
    return list(children.values())


def _entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
