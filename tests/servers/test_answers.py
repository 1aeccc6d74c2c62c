"""An answer of another form than its engine's costs a server, never the run's process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import aiohttp
import pytest
from helpers.servers.fake_servers import admit_at_once, listening

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.servers.http import OPENING, Http, open_session
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.servers.leader import BackgroundLoop
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig

SGLANG = {
    "output_ids": [1],
    "meta_info": {
        "output_token_logprobs": [[-0.5, 1, None]],
        "finish_reason": {"type": "stop"},
        "weight_version": "0",
    },
}
VLLM = {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}]}
GOOD = {"sglang": SGLANG, "vllm": VLLM}


def answering(answer: Any) -> AbstractContextManager[str]:
    """The URL of a server that gives everybody this answer in JSON."""
    return listening(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(answer).encode())


def mutations(value: Any) -> Iterator[Any]:
    """The value with one of its parts missing, or of another kind."""
    yield from (None, "word", 7, [], {}, -1, float("nan"), 10**400)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {name: member for name, member in value.items() if name != key}
            yield from ({**value, key: changed} for changed in mutations(inner))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in mutations(inner))


@pytest.mark.parametrize("engine", DIALECTS)
def test_every_mutation_of_an_answer_is_a_response_or_costs_the_server(
    engine: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatron_gvpo.servers.pool.POLL", 0.01)  # it waits so long for a lost server
    loop = BackgroundLoop("test client")
    session = loop.run(open_session())
    outcomes = {"response": 0, "lost": 0}
    for answer in (GOOD[engine], *mutations(GOOD[engine])):
        with answering(answer) as url:
            settings = ServersConfig(start_timeout=0.01)
            pool = ServerPool([DIALECTS[engine](Http(session, url))], settings, [1], lambda _: None)
            admit_at_once(pool, 0)
            request = Request([3, 4], 1, 0)
            try:
                [[rollout]] = loop.run(pool.generate([request], SamplingConfig(max_tokens=4)))
                assert all(type(token) is int and token >= 0 for token in rollout.token_ids)
                outcomes["response"] += 1
            except RolloutError:
                outcomes["lost"] += 1
    loop.run(session.close())
    loop.close()
    assert outcomes["response"] >= 1 and outcomes["lost"] >= 20


@pytest.mark.parametrize("engine", DIALECTS)
def test_a_request_stops_at_the_tokens_of_its_own_sampling(engine: str, monkeypatch: pytest.MonkeyPatch):
    """For example, at those of `eval.sampling`, which may be others than those of `rollout`."""
    sent: list[dict[str, Any]] = []

    async def post(self: Http, path: str, body: dict[str, Any], **_: Any) -> Any:
        sent.append(body)
        return GOOD[engine]

    monkeypatch.setattr(Http, "post", post)
    loop = BackgroundLoop("test client")
    session = loop.run(open_session())
    pool = ServerPool([DIALECTS[engine](Http(session, "http://none"))], ServersConfig(), [1], lambda _: None)
    admit_at_once(pool, 0)
    sampling = SamplingConfig(max_tokens=4, stop_token_ids=(7, 8))
    loop.run(pool.generate([Request([3, 4], 1, 0)], sampling))
    [body] = sent
    assert body.get("sampling_params", body)["stop_token_ids"] == [1, 7, 8]
    loop.run(session.close())
    loop.close()


def test_a_thousand_requests_at_once_open_few_connections_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """A server's queue of new connections is short: here it has 16 places."""
    opening, most = 0, 0
    connect = aiohttp.TCPConnector.connect

    async def counted(self: Any, *arguments: Any) -> Any:
        nonlocal opening, most
        opening += 1
        most = max(most, opening)
        try:
            return await connect(self, *arguments)
        finally:
            opening -= 1

    async def ask(url: str) -> list[Any]:
        async with await open_session() as session:
            http = Http(session, url)
            return await asyncio.gather(*(http.get("/", timeout=60.0) for _ in range(1000)))

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", counted)
    with answering({"a": 1}) as url:
        answers = asyncio.run(ask(url))
    assert answers == [{"a": 1}] * 1000
    assert 1 < most <= OPENING
