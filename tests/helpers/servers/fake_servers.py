"""Stands-in for rollout servers, and servers that are ready without a push, for tests."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_gvpo.servers.handle import Pending, Receiving
from megatron_gvpo.servers.pool import ServerPool

URL = "http://127.0.0.1:1"


def itself[S](server: S) -> S:
    """The receiver of a stand-in, which is server and receiver in one."""
    return server


def admit_at_once(pool: ServerPool, version: int) -> None:
    """Admit the pool's only server, whatever its state, without a request to it."""
    [handle] = pool.handles
    handle.to(Pending())
    handle.to(Receiving())
    pool.admit(handle, version)


def answer_of(kind: str, ids: list[int], logprobs: list[float], reason: Any) -> dict[str, Any]:
    """A response as the engine `kind` gives it."""
    if kind == "vllm":
        logs = {"token_logprobs": logprobs}
        return {"choices": [{"token_ids": ids, "logprobs": logs, "finish_reason": reason}]}
    entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)]
    meta = {"output_token_logprobs": entries, "finish_reason": {"type": reason}, "weight_version": None}
    return {"output_ids": ids, "meta_info": meta}


class Connection:
    """Stands for the HTTP connection: `answer(body)` is the server's answer to each request."""

    url = URL

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer, self.bodies = answer, list[dict[str, Any]]()

    async def post(self, path: str, body: Any = None, **_: Any) -> Any:
        if path not in ("/generate", "/v1/completions"):
            return {}
        self.bodies.append(body)
        await asyncio.sleep(0)
        return copy.deepcopy(self.answer(body))


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """The URL of a socket that sends `answer` to every client and hangs up; None: it accepts no client."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0 if answer is None else 16)

        def serve() -> None:
            try:
                while True:
                    client, _ = server.accept()
                    with client:
                        client.recv(65536)
                        client.sendall(answer)
            except OSError:  # the socket is closed
                pass

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
