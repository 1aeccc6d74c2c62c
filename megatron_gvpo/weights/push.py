"""Pushes the policy's weights to all servers, with retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.servers import WeightSyncConfig
from megatron_gvpo.rollout import leader
from megatron_gvpo.rollout.background_loop import BackgroundLoop
from megatron_gvpo.rollout.http import ServerGone, ServerRefused
from megatron_gvpo.rollout.leader import Command, Done, Failed, Push, Wait, lead
from megatron_gvpo.rollout.pool import Member, ServerPool
from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.fp8 import Fp8Layout
from megatron_gvpo.weights.transport import PushFailed, Transport, each

RETRY_AFTER = 2.0  # seconds: a server that died is seen as such by then

Stream = Iterable[tuple[str, Tensor]]


class Publisher:
    """Rank 0's side of a push. The other ranks take part in the weight stream's collectives alone.

    While a push runs nothing is in flight on the servers that it goes to. A server whose push fails stays
    paused and without requests until one has succeeded; the others serve all the same.
    """

    def __init__(
        self,
        fleet: ServerPool,
        loop: BackgroundLoop,
        transport: Transport,
        settings: WeightSyncConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        expected: Mapping[str, tuple[int, ...]],
        optional: frozenset[str],
        fp8: Fp8Layout | None,
        colocated: bool,
        report: Callable[[str], None],
    ) -> None:
        self._fleet, self._loop, self._transport, self._settings = fleet, loop, transport, settings
        self._dtype, self._halves = dtype, DoubleBuffer(settings.bucket_mb * 2**20, device)
        self._expected, self._optional, self._fp8, self._report = expected, optional, fp8, report
        self._colocated = colocated
        self._closed: list[Member] = []  # they have the weights and wait for `open`
        self._targets: Future[list[Member]] | None = None  # of the next attempt, once nothing is in flight
        self._failures: dict[str, int] = {}  # in a row, by url
        self._problem, self._in_a_row = "", 0
        self.metrics: dict[str, float] = {}

    def next_command(self, version: int) -> Command:
        """Push; Done; Wait, after a heartbeat, for a server or its responses; or Failed."""
        deadline = time.monotonic() + leader.HEARTBEAT
        # Every server is replaced once in the meantime; what then still fails is not a server's fault.
        if self._in_a_row >= self._settings.attempts * (len(self._fleet.members) + 1):
            said = f"{self._in_a_row} weight pushes in a row failed, at last: {self._problem}"
            return Failed(RolloutError(said))
        while True:
            healthy = [m for m in self._fleet.members if m.state != "lost"]
            if self._targets is None and any(not m.has(version) for m in healthy):
                carry = self._settings.in_flight == "carry"
                self._targets = self._loop.submit(self._fleet.take_out(version, abort=carry))
            if self._targets is not None:  # responses may take longer than the others wait for a collective
                wait([self._targets], timeout=max(0.0, deadline - time.monotonic()))
                return Push() if self._targets.done() else Wait()
            if healthy:
                return Done()
            if problem := self._fleet.hopeless():
                return Failed(RolloutError(problem))
            if time.monotonic() > deadline:
                return Wait()
            time.sleep(0.1)

    def attempt(self, stream: Stream, version: int) -> None:
        """After the command Push: push once to the healthy servers that lack the version.

        Nothing is in flight there any more. Raises ValueError for a wrong stream.
        """
        assert self._targets is not None, "not commanded"
        begin = time.perf_counter()
        targets: list[Member] = []
        try:
            targets, self._targets = self._targets.result(), None
            sent = self._send(stream, targets, version) if targets else 0
            for member in targets:
                self._failures.pop(member.server.url, None)
                self._in_loop(self._fleet.admit, member, version)
            self._in_a_row = 0
            seconds = time.perf_counter() - begin
            self.metrics = {"sync/bytes": float(sent), "sync/gb_per_s": sent / seconds / 1e9}
            self.metrics |= self._transport.metrics
        except PushFailed as failure:
            self._problem, self._in_a_row = str(failure), self._in_a_row + 1
            self._report(f"weight push {version} failed: {failure}")
            self._run(self._judge(failure.members))
            time.sleep(RETRY_AFTER)
        finally:
            self._transport.over()
            for member in targets:
                member.in_push = False

    def close(self) -> None:
        self._run(self._transport.close())

    def _send(self, stream: Stream, targets: Sequence[Member], version: int) -> int:
        """Bytes sent, to each of them."""
        self._run(each(targets, self._prepare))
        self._run(self._transport.begin(targets, version))
        if self._fp8 is not None:
            stream = self._fp8.quantised(stream)
        sent = self._send_buckets(self._checked(stream, version))
        self._run(self._transport.end())
        if self._colocated:
            self._closed += targets
        else:
            self._run(each(targets, self._conclude))
        return sent

    def _send_buckets(self, stream: Stream) -> int:
        """Bytes sent. A bucket is on its way while the next one is gathered and filled."""
        sent = 0
        sending: Future[int] | None = None
        try:
            for bucket in buckets(stream, self._halves, self._dtype):
                sent += sending.result() if sending is not None else 0
                sending = self._loop.submit(self._transport.send(bucket))
            return sent + (sending.result() if sending is not None else 0)
        finally:
            if sending is not None:
                sending.cancel()  # without effect on what has ended
            self._halves.rest()

    def _checked(self, stream: Stream, version: int) -> Iterator[tuple[str, Tensor]]:
        """The stream; its names and shapes are those of the model that the servers have loaded."""
        left = dict(self._expected)
        for name, tensor in stream:
            shape = left.pop(name, None)
            if shape is None and name not in self._optional:
                known = "came twice" if name in self._expected else "is not in the servers' model"
                raise ValueError(f"weight push {version}: {name} {known}")
            if shape is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"weight push {version}: {name} has shape {tuple(tensor.shape)}, "
                    f"the servers' model has {shape}"
                )
            yield name, tensor
        if missing := sorted(left.keys() - self._optional):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(f"weight push {version}: {len(missing)} tensor(s) did not come: {shown}")

    async def _judge(self, failed: Sequence[Member]) -> None:
        """Who does not answer is lost at once: a retry goes without it. Who refuses too often, too.

        A server that was lost has all its attempts again.
        """
        for member in failed:
            url = member.server.url
            count = self._failures.pop(url, 0) + 1
            try:
                await member.server.weight_version(5.0)
            except (ServerGone, ServerRefused) as error:
                self._fleet.lose(member, str(error))
            else:
                if count >= self._settings.attempts:
                    self._fleet.replace(member, f"{count} weight pushes in a row failed there")
                else:
                    self._failures[url] = count

    def open(self) -> None:
        """Colocated servers take the rest of their memory, now that the trainer has given its own."""
        closed, self._closed = self._closed, []
        try:
            self._run(each([m for m in closed if m.state == "ready"], self._conclude))
        except PushFailed as failure:
            self._report(f"rollout servers did not wake: {failure}")
            for member in failure.members:
                self._in_loop(self._fleet.replace, member, "it did not wake")

    async def _prepare(self, member: Member) -> None:
        """Nothing runs on it, and nothing that others may send it begins."""
        await member.server.pause(self._settings.timeout)
        await self._fleet.reclaim(member, "weights")

    async def _conclude(self, member: Member) -> None:
        await self._fleet.reclaim(member, "cache")
        await member.server.flush_cache(self._settings.timeout)
        await member.server.resume(self._settings.timeout)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """The fleet is the loop's: nothing else may change it."""

        async def there() -> None:
            call(*arguments)

        self._run(there())

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)


def push(
    publisher: Publisher | None,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    version: int,
    follow: Callable[[Iterator[tuple[str, Tensor]]], None] | None = None,
) -> None:
    """Push until every healthy server has the weights, and at least one is. A collective.

    `publisher` is rank 0's, None elsewhere; `follow` is a relay's part in a push. Every rank iterates every
    stream to its end, whatever happens to the servers. Raises RolloutError on every rank when no server can
    be had, or for a stream that does not fit the servers' model.
    """
    failed: list[Failed] = []  # rank 0's

    def next_command(publisher: Publisher) -> Command:
        return failed[0] if failed else publisher.next_command(version)

    leading = None if publisher is None else partial(next_command, publisher)
    while True:
        match lead(leading):
            case Done():
                return
            case Failed(error):
                raise error
            case Push():
                stream = weights()
                if publisher is not None:
                    try:
                        publisher.attempt(stream, version)
                    except (ValueError, RolloutError) as error:
                        failed.append(Failed(RolloutError(str(error))))
                elif follow is not None:
                    follow(stream)
                for _ in stream:  # gathering it is a collective: every rank takes part to its end
                    pass
