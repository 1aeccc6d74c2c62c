"""Ends a weight push whose trainer has died, in front of either engine's HTTP server.

A trainer pauses a server, sends it weights and resumes it. A trainer that is killed in between would leave
the server paused until the next trainer comes. Every request of a trainer has a header with the seconds of
silence after which the trainer counts as dead. When that time has passed during a push, then

- a server that has loaded nothing is resumed, with the weights that it had, and further parts of that push
  are refused: a trainer that was only stopped has to begin again;
- a server that has begun to load stays paused, and answers requests to generate with an error that says so,
  until a trainer has pushed all weights and resumed it.

Requests to generate that come during a push wait here, so that they can be answered. A trainer's are refused:
none samples during its own push, and after another's they would wait for the push that it has yet to begin.
In vLLM this is a middleware (`--middleware megatron_gvpo_watch.Watch`), and SGLang gets it as one of its
plugins. A server with several HTTP processes, each of which sees only a part of the requests, is refused: in
vLLM here, and SGLang's by megatron_gvpo.sampling.server_checks.

SGLang's /health asks for a token, which a paused server does not generate, and counts any other answer of its
schedulers in its place. So during a push the watch asks them a question that they answer while they are
paused. Without it the next trainer would wait for a healthy server, and the server for the next trainer.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from typing import Any

HEADER = b"x-megatron-gvpo-trainer"  # seconds; megatron_gvpo.servers.http sends it
RESUME_OF = {"/pause": "/resume", "/pause_generation": "/continue_generation"}
# After these requests a server no longer has the weights from before the push. SGLang may unpack its weights
# when an update begins.
LOADS = {
    "/update_weights",
    "/sleep",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/release_memory_occupation",
}
# An engine keeps requests to other paths waiting itself, as long as it is paused.
GENERATES = {
    "/generate",
    "/inference/v1/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
}
POLL = 0.2  # seconds between two looks at the time
HALF_LOADED = (
    "the trainer that was pushing weights to this server has not been heard of for {silent:.0f} s, and the "
    "weights are half loaded or released: the server generates again after the next whole push"
)
SEVERAL = (
    "this server has {count} HTTP processes, each of which sees only a part of a weight push: start it with "
    "--api-server-count 1"
)
TOO_EARLY = 425  # the status for a trainer that samples before it pushes; megatron_gvpo.servers.http reads it
EARLY = (
    "a weight push to this server has not ended, perhaps of a trainer that died: push all weights to this "
    "server before you sample"
)
LATE = (
    "this server takes no part of a weight push that did not pause it, or whose trainer was silent for so "
    "long that the server was resumed: begin the push again"
)


class WatchedPush:
    """One push, from the request that pauses the server to the one that resumes it."""

    def __init__(self, pause: dict[str, Any], limit: float) -> None:
        self.pause, self.limit = pause, limit
        self.heard = time.monotonic()
        self.loads = False

    @property
    def is_sglangs(self) -> bool:
        """True if the server is SGLang's, by the request that paused it."""
        return bool(self.pause["path"] == "/pause_generation")

    @property
    def silent(self) -> float:
        """Seconds since the trainer's last request."""
        return time.monotonic() - self.heard

    @property
    def given_up(self) -> bool:
        return self.silent > self.limit


class Watch:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._push: WatchedPush | None = None
        self._watching: asyncio.Task[None] | None = None
        self._turns = asyncio.Lock()  # held while the engine is paused or resumed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, limit = scope["path"], limit_of(scope)
        if limit is not None and (count := http_processes(scope)) > 1:
            await _answer(send, 409, SEVERAL.format(count=count))
            return
        if self._push is not None and limit is not None:
            self._push.heard, self._push.limit = time.monotonic(), limit
        if path in GENERATES and limit is not None and self._push is not None:
            await _answer(send, TOO_EARLY, EARLY)
        elif path in GENERATES and (refusal := await self._wait_for_weights()):
            await _answer(send, 503, refusal)
        elif path in LOADS and limit is not None and self._push is None:
            await _answer(send, 409, LATE)
        elif path in RESUME_OF and limit is not None:
            await self._pause(dict(scope), limit, receive, send)
        elif path in RESUME_OF.values():
            if await self._forward(scope, receive, send):
                self._push = None
        elif path == "/health" and self._push is not None and self._push.is_sglangs:
            # Its own answer begins first, because it counts only what the schedulers answer from then on.
            await asyncio.gather(self._app(scope, receive, send), self._ask(dict(scope), "/server_info"))
        else:
            if path in LOADS and self._push is not None:
                self._push.loads = True
            await self._app(scope, receive, send)

    async def _wait_for_weights(self) -> str | None:
        """Wait until no push is under way; returns a refusal if one left the weights half loaded."""
        while (push := self._push) is not None:
            if push.given_up and push.loads:
                return HALF_LOADED.format(silent=push.silent)
            await asyncio.sleep(POLL)
        return None

    async def _pause(self, scope: dict[str, Any], limit: float, receive: Any, send: Any) -> None:
        before = self._push
        if before is None:
            self._push = WatchedPush(dict(scope), limit)
            self._watching = asyncio.create_task(self._watch(self._push))
        async with self._turns:
            if not await self._forward(scope, receive, send):
                self._push = before

    async def _watch(self, push: WatchedPush) -> None:
        """Resume the server if the push's trainer falls silent before anything is loaded."""
        while self._push is push and not push.given_up:
            await asyncio.sleep(POLL)
        if self._push is not push:
            return
        if push.loads:
            _say(HALF_LOADED.format(silent=push.silent))
            return
        _say(f"the trainer of a weight push has been silent for {push.silent:.0f} s: serving as before it")
        self._push = None  # set before the engine resumes, so that it loads nothing from now on
        async with self._turns:
            if self._push is None and not await self._resume(push):
                _say("the server cannot be resumed; it stays paused until the next push")

    async def _resume(self, push: WatchedPush) -> bool:
        """Send the engine the request that the trainer did not."""
        return await self._ask(push.pause, RESUME_OF[push.pause["path"]])

    async def _ask(self, other: dict[str, Any], path: str) -> bool:
        """Send the engine a request with the headers and the method of another; True if it succeeds."""
        headers = [(name, value) for name, value in other["headers"] if name != b"content-length"]
        scope = other | {
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> Any:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None: ...

        return await self._forward(scope, receive, send)

    async def _forward(self, scope: Any, receive: Any, send: Any) -> bool:
        """Pass the request on; True if it succeeds."""
        statuses: list[int] = []

        async def seen(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        await self._app(scope, receive, seen)
        return bool(statuses) and statuses[0] < 300


def limit_of(scope: Any) -> float | None:
    """The seconds of silence after which a request's trainer counts as dead; None for others' requests."""
    for name, value in scope["headers"]:
        if name.lower() == HEADER:
            try:
                return float(value)
            except ValueError:
                return None
    return None


def http_processes(scope: Any) -> int:
    """The HTTP processes of a vLLM server; 1 for SGLang's, whose only one has this middleware."""
    arguments = getattr(getattr(scope.get("app"), "state", None), "args", None)
    return getattr(arguments, "api_server_count", None) or 1


def hook_sglang() -> None:
    """Put the middleware before SGLang's application, in the process that has it (a general plugin)."""
    if multiprocessing.parent_process() is not None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.http_server.launch_server", add_watch, HookType.BEFORE)


def add_watch(*arguments: Any, **named: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(Watch)  # SGLang adds the middleware for its key later, and so that one runs first


async def _answer(send: Any, status: int, words: str) -> None:
    body = json.dumps({"error": {"message": words}}).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _say(words: str) -> None:
    print(f"megatron_gvpo: {words}", file=sys.stderr, flush=True)
