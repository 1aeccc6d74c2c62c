"""The servers that a run samples from: who may take requests, who gets which, what happens when one is lost.

A server is `ready` (healthy, with the current weights), `pending` (healthy, without them) or `lost`. Only a
ready one gets requests. Whatever comes back after a failure is pending until the trainer has pushed the
weights to it, even if it never restarted: nothing is ever sampled from weights that the trainer does not
know.

Everything here runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_gvpo.config.schema import SamplingConfig
from megatron_gvpo.config.servers import ServersConfig
from megatron_gvpo.groups import Rollout, Routing
from megatron_gvpo.rollout.http import ServerGone, ServerRefused, spare_connections
from megatron_gvpo.rollout.request import Request, RolloutError, derived_seed
from megatron_gvpo.rollout.routed_experts import Routers
from megatron_gvpo.rollout.server import MemoryPart, Sample, Server
from megatron_gvpo.rollout.supervise import Supervisor

CONTROL = 30.0  # seconds for a control request, such as aborting
POLL = 1.0  # seconds between looks at a server's health
ATTEMPTS = 5  # servers that one request may cost, before it is taken for the cause


@dataclass
class Member:
    """One server and what the fleet knows of it."""

    server: Server
    state: Literal["ready", "pending", "lost"] = "lost"
    why: str = "not seen yet"
    since: float = field(default_factory=time.monotonic)  # of the state
    version: int = -1  # of the weights it was last given
    outstanding: int = 0  # tokens that it was asked for and has not given
    calls: set[asyncio.Task[Sample]] = field(default_factory=set)
    in_push: bool = False  # weights are under way to it: it may be slow to answer
    regroup: bool = True  # it is in no process group of ours, such as after a restart
    lent: tuple[MemoryPart, ...] = ()  # what a colocated trainer has of its memory
    lent_at: str = ""  # the version of its weights then: after a restart it is another

    def has(self, version: int) -> bool:
        """Whether it serves the weights of this version."""
        return self.state == "ready" and self.version == version

    def become(self, state: Literal["ready", "pending", "lost"], why: str = "") -> None:
        if state != self.state:
            self.state, self.since = state, time.monotonic()
        self.why = why


@dataclass
class _Asked:
    """A request, and the server that holds its prompt in its cache."""

    request: Request
    home: Member | None = None


class ServerPool:
    """Balances requests over servers by outstanding tokens; survives the loss of any of them."""

    def __init__(
        self,
        servers: Sequence[Server],
        settings: ServersConfig,
        stop_ids: Sequence[int],
        report: Callable[[str], None],
        supervisor: Supervisor | None = None,
        routers: Routers | None = None,
    ) -> None:
        self.members = [Member(server) for server in servers]
        self._settings, self._stop_ids, self._report = settings, tuple(stop_ids), report
        self._supervisor, self._routers = supervisor, routers
        self._changed = asyncio.Event()  # some member's state did
        self._connections = asyncio.Semaphore(spare_connections())  # of requests
        self._monitors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until all servers are healthy. Raises RolloutError after `start_timeout`."""
        self._monitors = [asyncio.create_task(self._watch(member)) for member in self.members]
        deadline = time.monotonic() + self._settings.start_timeout
        while lost := [m for m in self.members if m.state == "lost"]:
            if self._supervisor is not None and self._supervisor.failed:
                raise RolloutError(self._supervisor.failed)
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"{len(lost)} of {len(self.members)} rollout servers were not healthy after "
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
        """Whether a healthy server waits for the current weights."""
        return any(m.state == "pending" for m in self.members)

    async def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Rollout]]:
        """`n` rollouts for each request, in request order, all complete.

        The samples of a request go to one server, so that they share the prompt's cache; a lost server's
        go elsewhere from their beginning. Waits while no server is ready. Raises RolloutError when a
        request is refused or has cost too many servers.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    [group.create_task(self._respond(asked, i, sampling)) for i in range(asked.request.n)]
                    for asked in map(_Asked, requests)
                ]
        except* RolloutError as errors:
            raise errors.exceptions[0] from None
        return [[task.result() for task in row] for row in tasks]

    async def take_out(self, version: int, *, abort: bool) -> list[Member]:
        """The healthy members that lack the weights of `version`, with nothing in flight: to be given them.

        They get no requests until they are admitted. `abort` stops what is under way there, to be continued
        elsewhere or later; otherwise it is finished first. Members that have the version go on serving.
        """
        targets = [m for m in self.members if m.state != "lost" and not m.has(version)]
        for member in targets:
            self.retire(member, f"waits for weights {version}")
        async with asyncio.TaskGroup() as group:
            for member in targets:
                group.create_task(self._drain(member, abort))
        targets = [m for m in targets if m.state != "lost"]
        for member in targets:
            member.in_push = True
        return targets

    async def rest(self) -> None:
        """All healthy members give their memory to a colocated trainer; they want the weights again then."""
        await self._hold()
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                if member.state != "lost":
                    group.create_task(self._lend(member))
        await self._hold()  # who would not give it keeps it no longer than its process

    async def _hold(self) -> None:
        """Nothing starts from now on, and the lost ones' processes end."""
        if self._supervisor is not None:
            lost = [m.server.url for m in self.members if m.state == "lost"]
            await asyncio.to_thread(self._supervisor.hold, lost)

    async def _lend(self, member: Member) -> None:
        self.retire(member, "rests while the trainer trains")
        await self._drain(member, abort=True)
        server = member.server
        if len(member.lent) == 1:  # a push did not come to its end
            self.replace(member, "it has a part of its memory, which it cannot give again")
            return
        try:
            if not member.lent:
                await server.pause(CONTROL)
                member.lent_at = await server.weight_version(CONTROL)
                await server.release_memory(CONTROL)
                member.lent = ("weights", "cache")
        except (ServerGone, ServerRefused) as error:
            self.replace(member, str(error))

    def wake(self) -> None:
        """The trainer has made room: servers that ended in the meantime may start."""
        if self._supervisor is not None:
            self._supervisor.go_on()

    async def reclaim(self, member: Member, part: MemoryPart) -> None:
        """The member takes `part` of its memory back, if it gave it. Raises ServerGone, ServerRefused."""
        if len(member.lent) == 2 and await member.server.weight_version(CONTROL) != member.lent_at:
            member.lent = ()  # it has restarted, with memory of its own
        if part in member.lent:
            member.lent = tuple(p for p in member.lent if p != part)
            await member.server.reclaim_memory(part, CONTROL)

    async def _drain(self, member: Member, abort: bool) -> None:
        while member.calls and member.state != "lost":
            if abort:  # again and again: a request may still be on its way to the server
                try:
                    await member.server.abort(CONTROL)
                except (ServerGone, ServerRefused) as error:
                    self.lose(member, str(error))
            if member.calls:
                await asyncio.wait(member.calls, timeout=0.2 if abort else POLL)

    def lose(self, member: Member, why: str) -> None:
        """Count a server as lost: its requests go elsewhere, and it gets no more until it has new weights."""
        if member.state != "lost":
            self._report(f"rollout server {member.server.url} is lost: {why}")
        member.become("lost", why)
        member.regroup, member.version, member.in_push = True, -1, False
        for call in member.calls:
            call.cancel()
        self._changed.set()

    def admit(self, member: Member, version: int) -> None:
        """The server has the weights of `version`, whole and alone; unless it was lost in the meantime."""
        if member.state == "lost":
            return
        member.version, member.in_push = version, False
        member.become("ready")
        self._changed.set()

    def retire(self, member: Member, why: str) -> None:
        """The server's weights are not current, or not whole: it gets no more requests."""
        member.become("pending", why)
        self._changed.set()

    def replace(self, member: Member, why: str) -> None:
        """Lose a server that answers but cannot be used; one of our own is started anew."""
        self.lose(member, why)
        if self._supervisor is not None:
            self._supervisor.restart(member.server.url)

    def hopeless(self) -> str | None:
        """Why no server will come back, once that is so."""
        limit = self._settings.start_timeout
        gone = [m for m in self.members if m.state == "lost" and time.monotonic() - m.since > limit]
        if self._supervisor is not None and self._supervisor.failed:
            return self._supervisor.failed
        if len(gone) == len(self.members):
            return (
                f"all {len(gone)} rollout servers have been lost for more than "
                f"rollout.servers.start_timeout={limit:g} s: {self._describe(gone)}"
            )
        return None

    async def _respond(self, asked: _Asked, index: int, sampling: SamplingConfig) -> Rollout:
        """One response, from as many servers and weight versions as it takes."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[int, int, int]] = []
        failures: list[str] = []
        while len(failures) < ATTEMPTS:
            async with self._connections:
                member = await self._choose(asked)
                version = member.version
                answer = await self._ask(member, asked.request, index, token_ids, sampling)
            if isinstance(answer, str):
                failures.append(answer)
                self.lose(member, answer)
                continue
            if answer.token_ids:
                start = spans.pop()[1] if spans and spans[-1][0] == version else len(token_ids)
                token_ids += answer.token_ids
                logprobs += answer.logprobs
                spans.append((version, start, len(token_ids)))
            aborted = answer.finish_reason == "abort"
            if not aborted or len(token_ids) >= sampling.max_tokens:
                rollout = _rollout(token_ids, logprobs, "length" if aborted else answer.finish_reason, spans)
                if sampling.wants_routing and not aborted:
                    rollout.routing = self._routing(member, asked.request, rollout, answer)
                return rollout
        raise RolloutError(
            f"a prompt of {len(asked.request.prompt_ids)} tokens was lost with {ATTEMPTS} servers in turn; "
            f"at last: {failures[-1]}"
        )

    def _routing(self, member: Member, request: Request, rollout: Rollout, last: Sample) -> Routing:
        """The experts of a whole response, as its last answer has them. Raises RolloutError.

        Where several weights sampled it, each began by computing all that was there: the last speaks for all.
        """
        tokens = len(request.prompt_ids) + len(rollout.token_ids)
        try:
            if self._routers is None or last.experts is None:
                raise ValueError(
                    "no experts: for rollout.router_replay servers are started with "
                    "--enable-return-routed-experts"
                )
            return self._routers.pack(last.experts, tokens)
        except ValueError as error:
            raise RolloutError(f"rollout server {member.server.url} answered with {error}") from None

    async def _ask(
        self, member: Member, request: Request, index: int, given: list[int], sampling: SamplingConfig
    ) -> Sample | str:
        """What comes after the tokens `given`, or why nothing came. Raises RolloutError for a refusal."""
        room = sampling.max_tokens - len(given)
        call = asyncio.create_task(
            member.server.sample(
                [*request.prompt_ids, *given],
                room,
                derived_seed(request.seed, index, len(given)),
                sampling,
                self._stop_ids,
                self._settings.request_timeout,
            )
        )
        version = member.version
        member.outstanding += room
        member.calls.add(call)
        try:
            await asyncio.wait([call])
            sample = call.result()
        except ServerRefused as error:
            if error.is_request:
                raise RolloutError(f"a rollout request was refused: {error}") from None
            return str(error)
        except ServerGone as error:
            return str(error)
        except asyncio.CancelledError:
            if call.cancelled():  # because the server was lost
                return member.why
            call.cancel()  # because nobody wants this response any more
            raise
        finally:
            member.outstanding -= room
            member.calls.discard(call)
        if sample.version not in (None, str(version)):  # such as after a restart between two looks
            return f"{member.server.url} sampled from weights {sample.version}, not {version}"
        return sample

    async def _choose(self, asked: _Asked) -> Member:
        """A ready server: for the samples of one request the same one while it stays ready."""
        while True:
            ready = [m for m in self.members if m.state == "ready"]
            if ready:
                if asked.home not in ready:
                    asked.home = min(ready, key=lambda m: m.outstanding)
                return asked.home
            if problem := self.hopeless():
                raise RolloutError(problem)
            await self._state_change(POLL)

    async def _watch(self, member: Member) -> None:
        """Look at a server's health for ever; lost ones that answer again wait for weights."""
        last_seen = time.monotonic()
        limit = self._settings.health_timeout
        while True:
            try:
                if member.lent:
                    # What is asked of it to be healthy would wait, or need the memory. This its model process
                    # answers, by which SGLang's /health, too, knows it to live, for whoever supervises it.
                    await member.server.facts(limit)
                else:
                    await member.server.healthy(limit)
            except (ServerGone, ServerRefused) as error:
                silent = time.monotonic() - last_seen
                stopped = isinstance(error, ServerGone) and error.refused
                if stopped:
                    member.lent = ()  # the next process there has all of its memory
                if member.state == "lost":
                    member.why = str(error)
                elif stopped or (silent > limit and not member.in_push):
                    self.lose(member, str(error))
            else:
                last_seen = time.monotonic()
                if member.state == "lost":
                    self._report(f"rollout server {member.server.url} is healthy")
                    self.retire(member, "back, without the current weights")
            await asyncio.sleep(POLL)

    async def _state_change(self, timeout: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    @staticmethod
    def _describe(members: Sequence[Member]) -> str:
        return "; ".join(f"{m.server.url} ({m.why})" for m in members)


def _rollout(
    token_ids: list[int], logprobs: list[float], finish_reason: str, spans: list[tuple[int, int, int]]
) -> Rollout:
    if len(logprobs) != len(token_ids):
        raise RolloutError(f"a server gave {len(token_ids)} tokens with {len(logprobs)} log-probs")
    oldest = min(version for version, _, _ in spans)
    return Rollout(token_ids, logprobs, "", finish_reason, oldest, spans=spans)
