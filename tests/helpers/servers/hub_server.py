"""A stand-in for the Hugging Face hub on loopback, as far as an upload of a folder goes (without Xet).

It keeps repositories in memory, checks the token and the hashes of large files, and can refuse commits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_tests"


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.refuse_commits = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/preupload/main"):
            modes = {True: "lfs", False: "regular"}
            files = [
                {
                    "path": f["path"],
                    "uploadMode": modes[f["path"].endswith("safetensors")],
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            actions = [
                o | {"actions": {"upload": {"href": f"{self.server.url}/put/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": actions})
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        else:
            self._answer(404, {"error": f"the stand-in does not know {path}"})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.server.objects[oid] = data
        self._answer(200, {})

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        known = name in self.server.repositories
        self.server.repositories.setdefault(name, {"visibility": request.get("visibility"), "files": {}})
        self._answer(409 if known else 200, {"url": f"{self.server.url}/{name}", "name": name})

    def _commit(self, name: str, body: bytes) -> None:
        if self.server.refuse_commits:
            self._answer(403, {"error": "This token may not write"})
            return
        files = self.server.repositories[name]["files"]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.commits.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        url = f"{self.server.url}/{name}/commit/{'0' * 40}"
        self._answer(200, {"commitUrl": url, "commitOid": "0" * 40, "pullRequestUrl": None})

    def _answer(self, code: int, values: dict[str, Any]) -> None:
        data = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join(10)
        hub.server_close()
