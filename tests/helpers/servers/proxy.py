"""A small HTTP proxy in front of a rollout server, with modes in which it disturbs the connection."""

from __future__ import annotations

import asyncio
from typing import Literal

import aiohttp
from aiohttp import web

from megatron_gvpo.servers.leader import BackgroundLoop

Mode = Literal["forward", "error", "refuse", "slow", "cut"]
DELAY = 1.5  # seconds that a slow proxy waits before it forwards


class Proxy:
    """Forwards everything to `upstream`, in one of several modes.

    "forward"; "error": it answers with status 500; "refuse": it closes the port; "slow": it waits DELAY
    seconds first; "cut": it closes the connection in the middle of the answer.
    """

    def __init__(self, upstream: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._upstream, self._port = upstream, port
        self._loop = BackgroundLoop("proxy")
        self._mode: Mode = "forward"
        self._loop.run(self._start())

    def set(self, mode: Mode) -> None:
        if "refuse" in (mode, self._mode) and mode != self._mode:
            self._loop.run(self._site.stop() if mode == "refuse" else self._listen())
        self._mode = mode

    def close(self) -> None:
        self._loop.run(self._stop())
        self._loop.close()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await self._listen()

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await self._site.start()

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self._mode == "error":
            return web.json_response({"error": {"message": "the proxy says no"}}, status=500)
        if self._mode == "slow":
            await asyncio.sleep(DELAY)
        async with self._session.request(
            request.method,
            f"{self._upstream}{request.rel_url}",
            data=await request.read(),
            headers={"Content-Type": request.headers.get("Content-Type", "application/json")},
            timeout=aiohttp.ClientTimeout(total=600),
        ) as answer:
            body = await answer.read()
            if self._mode == "cut":
                return await _half(request, body)
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)


async def _half(request: web.Request, body: bytes) -> web.StreamResponse:
    """Begin an answer, and close the connection before its end."""
    response = web.StreamResponse(headers={"Content-Length": str(len(body) + 1)})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.abort()
    return response
