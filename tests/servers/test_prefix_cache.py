"""A server that keeps its prefix cache is asked again: it would mix weights of two versions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.sglang import SGLang
from megatron_gvpo.servers.vllm import VLLM


class Holding:
    """Answers as a server does that holds parts of its cache for so many requests to drop it."""

    url = "http://127.0.0.1:1"

    def __init__(self, refusals: float, **answer: Any) -> None:
        self.refusals, self.answer, self.calls = refusals, answer, 0

    async def post(self, path: str, *_: Any, **__: Any) -> Any:
        assert path == "/reset_prefix_cache"
        self.calls += 1
        return self.answer or {"success": self.calls > self.refusals}


def test_it_is_asked_until_the_cache_is_dropped() -> None:
    http = Holding(2)
    asyncio.run(VLLM(http).flush_cache(10.0))  # type: ignore[arg-type]
    assert http.calls == 3


def test_a_cache_that_stays_is_an_error() -> None:
    with pytest.raises(ServerRefused, match=r"the cache of older weights was not dropped within 0\.2 s"):
        asyncio.run(VLLM(Holding(float("inf"))).flush_cache(0.2))  # type: ignore[arg-type]


def test_an_answer_that_does_not_say_is_an_error() -> None:
    with pytest.raises(ServerRefused, match="reset_prefix_cache: its answer lacks fields"):
        asyncio.run(VLLM(Holding(0, status="ok")).flush_cache(0.2))  # type: ignore[arg-type]


class Busy:
    """Answers as SGLang does while a health check's request is in its scheduler, for so many calls."""

    url = "http://127.0.0.1:1"

    def __init__(self, refusals: float, status: int = 400) -> None:
        self.refusals, self.status, self.calls = refusals, status, 0

    async def post(self, path: str, *_: Any, **__: Any) -> Any:
        assert path == "/flush_cache"
        self.calls += 1
        if self.calls <= self.refusals:
            raise ServerRefused("Flush cache failed.", self.status)
        return "Cache flushed."


def test_sglang_is_asked_until_no_request_is_left() -> None:
    http = Busy(2)
    asyncio.run(SGLang(http).flush_cache(10.0))  # type: ignore[arg-type]
    assert http.calls == 3
    with pytest.raises(ServerRefused, match=r"flush_cache: the cache of older weights was not dropped"):
        asyncio.run(SGLang(Busy(float("inf"))).flush_cache(0.2))  # type: ignore[arg-type]


def test_another_refusal_of_sglang_is_an_error_at_once() -> None:
    http = Busy(float("inf"), status=401)
    with pytest.raises(ServerRefused, match="Flush cache failed"):
        asyncio.run(SGLang(http).flush_cache(10.0))  # type: ignore[arg-type]
    assert http.calls == 1
