"""The pool of a run's servers: it balances requests over them, and survives the loss of any of them.

A server is ready (healthy, with the current weights: its state is `Serving`), pending (healthy, without
them), receiving them, or lost (megatron_gvpo.servers.handle). Only a ready server gets requests. A server
that comes back after a failure is pending until the trainer has pushed the weights to it, even if it never
restarted: no response is sampled from weights that the trainer does not know.

Everything here runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Rollout, Routing
from megatron_gvpo.huggingface.end_tokens import StopStrings
from megatron_gvpo.servers.answers import Expected, Routers, SampleFailure, routing_of, trusted
from megatron_gvpo.servers.handle import (
    ALL_PARTS,
    Asleep,
    Loaded,
    Lost,
    Pending,
    Receiving,
    ServerHandle,
    Serving,
    State,
)
from megatron_gvpo.servers.http import ServerGone, ServerRefused, spare_connections
from megatron_gvpo.servers.launch.supervise import Supervisor
from megatron_gvpo.servers.request import Request, derived_seed, images_of
from megatron_gvpo.servers.request_images import ImageSender, RequestImage
from megatron_gvpo.servers.server import Completion, MemoryPart, Server
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig
from megatron_gvpo.supports import Support

CONTROL = 30.0  # seconds for a control request, such as to abort
POLL = 1.0  # seconds between two checks of a server's health
ATTEMPTS = 5  # a request that fails on this many servers counts as faulty itself


@dataclass
class PendingRequest:
    """A request, and the server that has its prompt in its cache."""

    request: Request
    preferred: ServerHandle | None = None
    images: tuple[RequestImage, ...] = ()


@dataclass
class _ResponseSoFar:
    """A response whose parts may come from several servers and weight versions."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: Support = field(default_factory=lambda: Support(b"", b""))
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # as in Rollout
    seconds: float = 0.0  # time of all requests, also of those that failed

    def add(self, answer: Completion, version: int) -> None:
        """Add the tokens of an answer, which the weights of `version` sampled."""
        if not answer.token_ids:
            return
        continues = bool(self.spans) and self.spans[-1][0] == version
        first = self.spans.pop()[1] if continues else len(self.token_ids)
        self.token_ids += answer.token_ids
        self.logprobs += answer.logprobs
        self.support = self.support.then(answer.support or Support.whole_vocabulary(len(answer.token_ids)))
        self.spans.append((version, first, len(self.token_ids)))

    def rollout(self, reason: str, server: str, has_support: bool) -> Rollout:
        """The complete response; `server`: the URL of the one that sampled its end."""
        oldest = min(version for version, _, _ in self.spans)
        rollout = Rollout(self.token_ids, self.logprobs, "", reason, oldest, spans=self.spans)
        rollout.seconds, rollout.server = self.seconds, server
        rollout.support = self.support if has_support else None
        return rollout


class ServerPool:
    """Balances requests over servers by outstanding tokens; survives the loss of any of them."""

    def __init__(
        self,
        servers: Sequence[Server],
        settings: ServersConfig,
        end_token_ids: Sequence[int],
        report: Callable[[str], None],
        supervisor: Supervisor | None = None,
        routers: Routers | None = None,
        images: ImageSender | None = None,
        vocabulary: float = math.inf,
        stop_strings: StopStrings | None = None,
    ) -> None:
        """`vocabulary`: the number of tokens that the model knows; `stop_strings` reads its responses."""
        self.handles = [ServerHandle(server) for server in servers]
        self._settings, self._end_token_ids, self._report = settings, tuple(end_token_ids), report
        self._supervisor, self._routers, self._images = supervisor, routers, images
        self._vocabulary, self._stop_strings = vocabulary, stop_strings
        self.prefix_cache = PrefixCache()
        self._is_asleep, self._awake_since = False, 0.0  # asleep while a colocated trainer has the memory
        self._changed = asyncio.Event()  # set when a server's state changes
        self._connections = asyncio.Semaphore(spare_connections())  # limits open requests
        self._monitors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until all servers are healthy. Raises RolloutError after `start_timeout`."""
        self._monitors = [asyncio.create_task(self._watch(handle)) for handle in self.handles]
        deadline = running_seconds() + self._settings.start_timeout
        while lost := [h for h in self.handles if h.is_lost]:
            if self._supervisor is not None and self._supervisor.failed:
                raise RolloutError(self._supervisor.failed)
            if running_seconds() > deadline:
                raise RolloutError(
                    f"{len(lost)} of {len(self.handles)} rollout servers were not healthy after "
                    f"rollout.servers.start_timeout={self._settings.start_timeout:g} s: "
                    f"{self._describe(lost)}"
                )
            await self._state_change(POLL)

    async def stop(self) -> None:
        for monitor in self._monitors:
            monitor.cancel()
        await asyncio.gather(*self._monitors, return_exceptions=True)

    @property
    def wants_weights(self) -> bool:
        """True if a healthy server waits for the current weights."""
        return any(isinstance(h.state, Pending) for h in self.handles)

    async def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Rollout]]:
        """`n` rollouts for each request, in request order, all complete.

        All samples of a request go to one server, where they share the cached prompt. Those of a lost server
        start again on another. It waits while no server is ready. Raises RolloutError when a server refuses a
        request, or a request has failed on too many servers.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    [group.create_task(self.respond(pending, i, sampling)) for i in range(pending.request.n)]
                    for pending in map(PendingRequest, requests)
                ]
        except* RolloutError as errors:
            raise errors.exceptions[0] from None
        return [[task.result() for task in row] for row in tasks]

    async def take_out(self, version: int, *, abort: bool) -> list[ServerHandle]:
        """Take the healthy servers that lack the weights of `version` out of service, and return them.

        The servers taken out get no requests until `admit`. With `abort` their responses stop, to continue
        elsewhere or later; otherwise they finish first. Servers that have the version go on serving.
        """
        targets = [h for h in self.handles if not h.is_lost and not h.has(version)]
        for handle in targets:
            self._move(handle, Pending())
        async with asyncio.TaskGroup() as group:
            for handle in targets:
                group.create_task(self._drain(handle, abort))
        targets = [h for h in targets if not h.is_lost]
        for handle in targets:
            self._move(handle, Receiving())
        return targets

    def push_ended(self, handles: Sequence[ServerHandle]) -> None:
        """Note the end of a push to these servers. Those without all of the weights wait for another one."""
        for handle in handles:
            if isinstance(handle.state, Receiving):
                self._move(handle, Pending())

    async def sleep(self) -> None:
        """All healthy servers give their memory to a colocated trainer, and lose their weights."""
        self._is_asleep = True
        await self._hold()
        await self.offload()
        await self._hold()  # ends servers that did not give their memory away

    async def offload(self) -> None:
        """As `sleep`, but servers that are starting go on: only a push needs the memory."""
        async with asyncio.TaskGroup() as group:
            for handle in self.handles:
                if not handle.is_lost:
                    group.create_task(self._offload(handle))

    async def _hold(self) -> None:
        """End the processes of lost servers, and start none until `wake`."""
        if self._supervisor is not None:
            lost = [h.server.url for h in self.handles if h.is_lost]
            await asyncio.to_thread(self._supervisor.hold, lost)

    async def _offload(self, handle: ServerHandle) -> None:
        self._move(handle, Pending())
        await self._drain(handle, abort=True)
        server = handle.server
        # A failed push has already given the server a part of its memory back.
        if handle.asleep is not None and handle.asleep.parts != ALL_PARTS:
            self.replace(handle, "it has a part of its memory, which it cannot give again")
            return
        try:
            if handle.asleep is None:
                await server.pause(CONTROL)
                version = await server.weight_version(CONTROL)
                await server.offload_memory(CONTROL)
                handle.asleep = Asleep(ALL_PARTS, version)
        except (ServerGone, ServerRefused) as error:
            self.replace(handle, str(error))

    def wake(self) -> None:
        """Let servers that ended in the meantime start: the trainer has released its memory."""
        self._is_asleep, self._awake_since = False, running_seconds()
        if self._supervisor is not None:
            self._supervisor.go_on()

    async def onload(self, handle: ServerHandle, part: MemoryPart) -> None:
        """The server takes `part` of its memory back from the trainer. Raises ServerGone, ServerRefused."""
        asleep, server = handle.asleep, handle.server
        slept_at = asleep.version if asleep is not None and asleep.parts == ALL_PARTS else None
        if slept_at is not None and await server.weight_version(CONTROL) != slept_at:
            handle.asleep = None  # the server has restarted, with memory of its own
        if handle.asleep is not None and part in handle.asleep.parts:
            parts = tuple(p for p in handle.asleep.parts if p != part)
            handle.asleep = replace(handle.asleep, parts=parts) if parts else None
            await server.onload_memory(part, CONTROL)

    async def _drain(self, handle: ServerHandle, abort: bool) -> None:
        while handle.calls and not handle.is_lost:
            if abort:  # repeated, because a request on its way may reach the server after the first abort
                try:
                    await handle.server.abort(CONTROL)
                except (ServerGone, ServerRefused) as error:
                    self.lose(handle, str(error))
            if handle.calls:
                await asyncio.wait(handle.calls, timeout=0.2 if abort else POLL)

    def lose(self, handle: ServerHandle, why: str) -> None:
        """Count a server as lost: its requests go elsewhere, and it gets no more until it has new weights."""
        if not handle.is_lost:
            self._report(f"rollout server {handle.server.url} is lost: {why}")
        self._move(handle, Lost(why))

    def admit(self, handle: ServerHandle, version: int) -> None:
        """Let a server serve: it has all weights of `version`. No effect if it was lost in the meantime."""
        if isinstance(handle.state, Receiving):
            self._move(handle, Serving(version))

    def note_loaded(self, handle: ServerHandle, version: int) -> None:
        """As `admit`, for a server that is still paused: it serves after `open`."""
        if isinstance(handle.state, Receiving):
            self._move(handle, Loaded(version))

    def open(self) -> None:
        """Let the loaded servers serve: they have resumed."""
        for handle in self.handles:
            if isinstance(handle.state, Loaded):
                self._move(handle, Serving(handle.state.version))

    def _move(self, handle: ServerHandle, state: State) -> None:
        handle.to(state)
        self._changed.set()

    def replace(self, handle: ServerHandle, why: str) -> None:
        """Count a server that answers but cannot be used as lost, and restart it if this run started it."""
        self.lose(handle, why)
        if self._supervisor is not None:
            self._supervisor.restart(handle.server.url)

    def hopeless(self) -> str | None:
        """The reason why no server can serve again; None while one may."""
        limit = self._settings.start_timeout
        now, since = running_seconds(), self._awake_since  # no lost server starts while the others sleep
        gone = [h for h in self.handles if h.is_lost and now - max(h.since, since) > limit]
        if self._supervisor is not None and (problem := self._supervisor.none_left()):
            return problem
        if len(gone) == len(self.handles) and not self._is_asleep:
            return (
                f"all {len(gone)} rollout servers have been lost for more than "
                f"rollout.servers.start_timeout={limit:g} s: {self._describe(gone)}"
            )
        return None

    async def respond(self, pending: PendingRequest, index: int, sampling: SamplingConfig) -> Rollout:
        """Sample one response, from several servers and weight versions if necessary."""
        # Fetch images first: weights may change meanwhile.
        pending.images = await images_of(pending.request, self._images)
        response, failures = _ResponseSoFar(), list[str]()
        while len(failures) < ATTEMPTS:
            async with self._connections:
                handle = await self._choose(pending)
                begin, version = running_seconds(), handle.version
                answer = await self._ask(handle, pending, index, response.token_ids, sampling)
            response.seconds += running_seconds() - begin
            if isinstance(answer, SampleFailure):
                failures.append(answer.why)
                self.lose(handle, answer.why)
                continue
            self.prefix_cache.count(len(pending.request.prompt_ids) + len(response.token_ids), answer.cached)
            last = self._up_to_stop_string(response.token_ids, answer, sampling)
            response.add(last, version)
            if (reason := self._end(response.token_ids, last, pending.request, sampling)) is not None:
                rollout = response.rollout(reason, handle.server.url, sampling.wants_support)
                if sampling.wants_routing and answer.finish_reason != "abort":
                    rollout.routing = self._routing(handle, pending.request, rollout, last)
                return rollout
        raise RolloutError(
            f"a prompt of {len(pending.request.prompt_ids)} tokens was lost with {ATTEMPTS} servers in turn; "
            f"at last: {failures[-1]}"
        )

    def _end(
        self, token_ids: Sequence[int], last: Completion, request: Request, sampling: SamplingConfig
    ) -> str | None:
        """Why a response ends with its last answer, "stop" or "length"; None if it goes on."""
        if last.finish_reason == "stop":
            return "stop"
        if token_ids and token_ids[-1] in sampling.stops(self._end_token_ids):
            return "stop"
        is_full = len(token_ids) >= request.longest(sampling)
        return "length" if is_full or last.finish_reason == "length" else None

    def _up_to_stop_string(
        self, prefix: Sequence[int], answer: Completion, sampling: SamplingConfig
    ) -> Completion:
        """The part of an answer after `prefix` up to the end of a stop string, which may begin in the prefix.

        If the server ended an answer at a stop string that the answer lacks, the answer counts as aborted.
        """
        if not sampling.stop:
            return answer
        assert self._stop_strings is not None, "this pool was made without stop strings"
        end = self._stop_strings.end([*prefix, *answer.token_ids], sampling.stop)
        if end is not None:
            return answer.first(end - len(prefix))
        return answer if answer.stop_string is None else replace(answer, finish_reason="abort")

    def _routing(self, handle: ServerHandle, request: Request, rollout: Rollout, last: Completion) -> Routing:
        """The experts of a whole response, from its last answer. Raises RolloutError.

        Where several weight versions sampled it, the last one has recomputed all tokens before its own.
        """
        tokens = len(request.prompt_ids) + len(rollout.token_ids)
        try:
            return routing_of(self._routers, last.experts, tokens)
        except ValueError as error:
            raise RolloutError(f"rollout server {handle.server.url} answered with {error}") from None

    async def _ask(
        self,
        handle: ServerHandle,
        pending: PendingRequest,
        index: int,
        prefix: Sequence[int],
        sampling: SamplingConfig,
    ) -> Completion | SampleFailure:
        """Sample tokens that continue the response's `prefix`. Raises RolloutError for a refused request."""
        request, images = pending.request, pending.images
        room, stops = request.longest(sampling) - len(prefix), sampling.stops(self._end_token_ids)
        call = asyncio.create_task(
            handle.server.sample(
                [*request.prompt_ids, *prefix],
                room,
                derived_seed(request.seed, index, len(prefix)),
                sampling,
                stops,
                self._settings.request_timeout,
                images,
            )
        )
        version = handle.version
        handle.outstanding += room
        handle.calls.add(call)
        try:
            await asyncio.wait([call])
            sample = call.result()
        except ServerRefused as error:
            if error.is_request:
                raise RolloutError(f"a rollout request was refused: {error}") from None
            return SampleFailure(str(error))
        except ServerGone as error:
            return SampleFailure(str(error))
        except asyncio.CancelledError:
            if call.cancelled():  # the server was lost, and may have come back
                return SampleFailure(handle.state.why if isinstance(handle.state, Lost) else "it was lost")
            call.cancel()  # the caller no longer wants this response
            raise
        finally:
            handle.outstanding -= room
            handle.calls.discard(call)
        expected = self._expected(version, room, sampling, images)
        return trusted(handle.server.url, sample, expected, is_serving=handle.has(version))

    def _expected(
        self, version: int, room: int, sampling: SamplingConfig, images: Sequence[RequestImage]
    ) -> Expected:
        """The properties that the answer to a request for at most `room` tokens must have."""
        return Expected(
            version,
            max_tokens=room,
            stops=sampling.stops(self._end_token_ids),
            stop_strings=sampling.stop,
            vocabulary=self._vocabulary,
            placeholder=images[0].placeholder if images else None,
            supports=sampling.wants_support,
        )

    async def _choose(self, pending: PendingRequest) -> ServerHandle:
        """A serving server; the same one for all samples of a request, while it serves."""
        while True:
            ready = [h for h in self.handles if h.is_ready]
            if ready:
                if pending.preferred not in ready:
                    pending.preferred = min(ready, key=lambda h: h.outstanding)
                return pending.preferred
            if problem := self.hopeless():
                raise RolloutError(problem)
            await self._state_change(POLL)

    async def _watch(self, handle: ServerHandle) -> None:
        """Check a server's health for ever; a lost one that answers again becomes pending."""
        last_seen = running_seconds()
        limit = self._settings.health_timeout
        while True:
            try:
                if handle.asleep is not None:
                    # A health check would wait, or need the memory that the server lacks. Its model process
                    # answers this request, and SGLang's /health then knows that it lives, as `serve` asks.
                    await handle.server.info(limit)
                else:
                    await handle.server.check_health(limit)
            except (ServerGone, ServerRefused) as error:
                silent = running_seconds() - last_seen
                stopped = isinstance(error, ServerGone) and error.refused
                if stopped:
                    handle.asleep = None  # the server's next process has all of its memory
                if handle.is_lost or stopped or (silent > limit and not isinstance(handle.state, Receiving)):
                    self.lose(handle, str(error))
            else:
                last_seen = running_seconds()
                if handle.is_lost:
                    self._report(f"rollout server {handle.server.url} is healthy")
                    self._move(handle, Pending())
            await asyncio.sleep(POLL)

    async def _state_change(self, timeout: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    @staticmethod
    def _describe(handles: Sequence[ServerHandle]) -> str:
        return "; ".join(f"{h.server.url} ({h.state.why})" for h in handles if isinstance(h.state, Lost))


# The share of prompt tokens that the servers found in their prefix caches.

METRIC = "server/prefix_cache_hits"


class PrefixCache:
    """Counts the prompt tokens of the requests that servers have answered, and those that were cached."""

    def __init__(self) -> None:
        self._counts = self._taken = (0, 0)  # (prompt tokens, cached prompt tokens)

    def count(self, prompt: int, cached: int | None) -> None:
        """Count a request. `cached` is None where the server does not report it; then nothing is counted."""
        if cached is not None:
            tokens, hits = self._counts
            self._counts = tokens + prompt, hits + cached

    def take(self) -> dict[str, float]:
        """The share of cached prompt tokens since the last call, as a metric; empty without any request.

        Another thread may count at the same time.
        """
        tokens, hits = now = self._counts
        (before, hits_before), self._taken = self._taken, now
        return {METRIC: (hits - hits_before) / (tokens - before)} if tokens > before else {}
