"""Requests to the servers of one model: spread over them, and repeated while a server fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import aiohttp

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.runs.record import fingerprint
from megatron_gvpo.servers.http import Http, ServerGone, ServerRefused
from megatron_gvpo.servers.model_servers import ServerAddresses
from megatron_gvpo.settings.reward_servers import RewardServers

PAUSE = 1.0  # seconds before a request is repeated
AVOIDED = 10.0  # seconds for which other servers are preferred to one that failed


class Verdict(NamedTuple):
    """The score of a response by one component; None without one, for the reason in `explanation`."""

    score: float | None
    explanation: str = ""  # the judge's explanation, or the reason why there is no score


class Misfit(RuntimeError):  # noqa: N818
    """Raised for a server, a model or a response with which the run cannot continue; the message names it."""


class Unanswered(Exception):  # noqa: N818 - an outage, which callers expect
    """No server has answered a request."""


class Refused(Unanswered):
    """A server has refused a request, and every other server would refuse it, too."""


class ModelServer:
    """One server and its requests in flight."""

    def __init__(self, http: Http, parallel: int) -> None:
        self.http = http
        self.slots = asyncio.Semaphore(parallel)
        self.busy = 0  # requests in flight, and those that wait for a slot
        self.failed_at = float("-inf")
        self.suspect = True  # the server has not proven that it serves the right model


class Servers:
    """The servers of one model.

    `check(http)` is called before the first request to a server, and before the next one after a failure. Its
    errors, except ServerGone and ServerRefused, reach the caller of `ask`.
    """

    def __init__(
        self,
        addresses: ServerAddresses,
        settings: RewardServers,
        session: aiohttp.ClientSession,
        check: Callable[[Http], Awaitable[None]],
    ) -> None:
        https = [Http(session, url, addresses.api_key, addresses.listens.get(url)) for url in addresses.urls]
        self._servers = [ModelServer(http, settings.parallel) for http in https]
        self._addresses, self._settings, self._check = addresses, settings, check
        self.requests = self.failures = 0

    @property
    def timeout(self) -> float:
        """Seconds that one request may take."""
        return self._settings.request_timeout

    async def check_all(self) -> None:
        """Wait until every server is up, and check it. Raises Unanswered, and the errors of `check`."""
        checks = (self._repeat(self._check_one, [server]) for server in self._servers)
        await asyncio.gather(*checks)
        self.failures = 0  # failed requests to servers that were still starting

    async def ask[T](self, call: Callable[[Http], Awaitable[T]]) -> T:
        """The answer to `call(http)`, of the least busy server.

        The request is repeated for `start_timeout` seconds while servers do not answer or have errors of
        their own. Raises Unanswered after that, and Refused at once for a request that a server refuses.
        """

        async def checked(server: ModelServer) -> T:
            if server.suspect:
                await self._check_one(server)
            self.requests += 1
            return await call(server.http)

        return await self._repeat(checked, self._servers)

    async def _check_one(self, server: ModelServer) -> None:
        await self._check(server.http)
        server.suspect = False

    async def _repeat[T](
        self, call: Callable[[ModelServer], Awaitable[T]], servers: Sequence[ModelServer]
    ) -> T:
        """Call the least busy of these servers, until one answers."""
        since: float | None = None
        limit, key = self._settings.start_timeout, f"{self._addresses.section}.start_timeout"
        while True:
            server = _least_busy(servers)
            server.busy += 1
            try:
                async with server.slots:
                    return await call(server)
            except ServerRefused as error:
                if error.is_request:
                    raise Refused(str(error)) from None
                problem = str(error)
            except ServerGone as error:
                problem = str(error)
            finally:
                server.busy -= 1
            server.failed_at, server.suspect = running_seconds(), True
            since = server.failed_at if since is None else since
            self.failures += 1
            supervisor, urls = self._addresses.supervisor, [s.http.url for s in servers]
            if supervisor is not None and (reason := supervisor.none_left(urls)) is not None:
                raise Unanswered(reason)
            if running_seconds() - since > limit:
                raise Unanswered(f"{problem}, for {key}={limit:g} s")
            await asyncio.sleep(PAUSE)


def _least_busy(servers: Sequence[ModelServer]) -> ModelServer:
    now = running_seconds()
    return min(servers, key=lambda s: (now - s.failed_at < AVOIDED, s.busy))


# Refuses a server of another model than the configuration names, where its files show it.


async def check_model(http: Http, engine: str, path: str, key: str, timeout: float) -> None:
    """Compare the weights in the directory that a server names with those in `path`. Raises Misfit.

    `key`: the configuration's, of `path`. A directory that this machine cannot read is not compared.
    """
    served = await _directory(http, engine, timeout)
    if served is not None and not await asyncio.to_thread(_has_weights_of, served, path):
        raise Misfit(
            f"{key}={path}: {http.url} serves {served}, which has other weights: start it with the model in "
            f"{key}, or name its directory there"
        )


async def _directory(http: Http, engine: str, timeout: float) -> str | None:
    """The directory of the server's model; None if the server does not report it."""
    try:
        answer = await http.get("/v1/models" if engine == "vllm" else "/model_info", timeout=timeout)
        return str(answer["data"][0]["root"] if engine == "vllm" else answer["model_path"])
    except (LookupError, TypeError):
        return None
    except ServerRefused as error:
        if not error.is_request:
            raise
        return None


@cache
def _has_weights_of(served: str, path: str) -> bool:
    """True if the weights are the same, and also if they cannot be compared."""
    if not (Path(served) / "config.json").is_file() or os.path.realpath(served) == os.path.realpath(path):
        return True
    remote, local = (fingerprint(Path(directory), ("*.safetensors",)) for directory in (served, path))
    return remote == local
