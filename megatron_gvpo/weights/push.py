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
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.rollout import leader
from megatron_gvpo.rollout.background_loop import BackgroundLoop
from megatron_gvpo.rollout.http import ServerGone, ServerRefused
from megatron_gvpo.rollout.leader import Command, Done, Failed, Push, Wait, lead
from megatron_gvpo.rollout.pool import ServerHandle, ServerPool
from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.fp8 import Fp8Layout
from megatron_gvpo.weights.transport import PushFailed, Transport, each

RETRY_AFTER = 2.0  # seconds; by then the pool has noticed a server that died

Stream = Iterable[tuple[str, Tensor]]
Weights = Iterator[tuple[str, Tensor]] | OwnWeights


class Publisher:
    """Rank 0's side of a push. The other ranks only take part in the weight stream's collectives.

    While a push runs, its servers have no requests in flight. A server whose push fails stays paused and
    without requests until a push succeeds; the others go on serving.
    """

    def __init__(
        self,
        pool: ServerPool,
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
        self._pool, self._loop, self._transport, self._settings = pool, loop, transport, settings
        self._dtype, self._halves = dtype, DoubleBuffer(settings.bucket_bytes, device)
        self._expected, self._optional, self._fp8, self._report = expected, optional, fp8, report
        self._colocated = colocated
        self._closed: list[ServerHandle] = []  # they have the weights and wait for `open`
        # The servers of the next attempt, once they have no requests in flight.
        self._targets: Future[list[ServerHandle]] | None = None
        self._failures: dict[str, int] = {}  # in a row, by url
        self._problem, self._in_a_row = "", 0
        self.metrics: dict[str, float] = {}

    def next_command(self, version: int) -> Command:
        """Push; Done; Wait, after a heartbeat, for a server or its responses; or Failed."""
        deadline = time.monotonic() + leader.HEARTBEAT
        # By now every server has been replaced once: the failure is no server's fault.
        if self._in_a_row >= self._settings.attempts * (len(self._pool.handles) + 1):
            said = f"{self._in_a_row} weight pushes in a row failed, at last: {self._problem}"
            return Failed(said)
        while True:
            healthy = [h for h in self._pool.handles if h.state != "lost"]
            if self._targets is None and any(not h.has(version) for h in healthy):
                carry = self._settings.in_flight == "carry"
                self._targets = self._loop.submit(self._pool.take_out(version, abort=carry))
            if self._targets is not None:  # responses may take longer than the others wait for a collective
                wait([self._targets], timeout=max(0.0, deadline - time.monotonic()))
                return Push() if self._targets.done() else Wait()
            if healthy:
                return Done()
            if problem := self._pool.hopeless():
                return Failed(problem)
            if time.monotonic() > deadline:
                return Wait()
            time.sleep(0.1)

    def attempt(self, stream: Stream, version: int) -> None:
        """After the command Push: push once to the healthy servers that lack the version.

        They have no requests in flight. Raises ValueError for a stream that does not fit the model.
        """
        assert self._targets is not None, "not commanded"
        begin = time.perf_counter()
        targets: list[ServerHandle] = []
        try:
            targets, self._targets = self._targets.result(), None
            sent = self._send(stream, targets, version) if targets else 0
            for handle in targets:
                self._failures.pop(handle.server.url, None)
                self._in_loop(self._pool.admit, handle, version)
            self._in_a_row = 0
            seconds = time.perf_counter() - begin
            self.metrics = {"sync/bytes": float(sent), "sync/gb_per_s": sent / seconds / 1e9}
            self.metrics |= self._transport.metrics
        except PushFailed as failure:
            self._problem, self._in_a_row = str(failure), self._in_a_row + 1
            self._report(f"weight push {version} failed: {failure}")
            self._run(self._judge(failure.handles))
            time.sleep(RETRY_AFTER)
        finally:
            self._transport.over()
            self._in_loop(self._pool.push_ended, targets)

    def close(self) -> None:
        self._run(self._transport.close())

    def _send(self, stream: Stream, targets: Sequence[ServerHandle], version: int) -> int:
        """Prepare, send to and conclude with the targets; returns the bytes sent to each."""
        self._run(each(targets, self._prepare))
        self._run(self._transport.begin(targets, version))
        if isinstance(stream, OwnWeights):
            sent = self._run(self._transport.send_own(stream, self._expected, self._optional))
        else:
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
        """Send the stream; returns its bytes. While a bucket is sent, the next one is gathered and filled."""
        sent = 0
        sending: Future[int] | None = None
        try:
            for bucket in buckets(stream, self._halves, self._dtype):
                sent += sending.result() if sending is not None else 0
                sending = self._loop.submit(self._transport.send(bucket))
            return sent + (sending.result() if sending is not None else 0)
        finally:
            if sending is not None:
                sending.cancel()  # without effect if it has ended
            self._halves.rest()

    def _checked(self, stream: Stream, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream. Raises ValueError for names or shapes that differ from the servers' model."""
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

    async def _judge(self, failed: Sequence[ServerHandle]) -> None:
        """Lose the servers that do not answer, and replace those that failed too often.

        A server that was lost has all its attempts again.
        """
        for handle in failed:
            url = handle.server.url
            count = self._failures.pop(url, 0) + 1
            try:
                await handle.server.weight_version(5.0)
            except (ServerGone, ServerRefused) as error:
                self._pool.lose(handle, str(error))
            else:
                if count >= self._settings.attempts:
                    self._pool.replace(handle, f"{count} weight pushes in a row failed there")
                else:
                    self._failures[url] = count

    def open(self) -> None:
        """Colocated servers take the rest of their memory and serve; the trainer has released its own."""
        closed, self._closed = self._closed, []
        try:
            self._run(each([h for h in closed if h.state == "ready"], self._conclude))
        except PushFailed as failure:
            self._report(f"rollout servers did not wake: {failure}")
            for handle in failure.handles:
                self._in_loop(self._pool.replace, handle, "it did not wake")

    async def _prepare(self, handle: ServerHandle) -> None:
        """Pause the server, also for requests of other clients, and give it memory for the weights."""
        await handle.server.pause(self._settings.timeout)
        await self._pool.onload(handle, "weights")

    async def _conclude(self, handle: ServerHandle) -> None:
        await self._pool.onload(handle, "cache")
        await handle.server.flush_cache(self._settings.timeout)
        await handle.server.resume(self._settings.timeout)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call it in the pool's loop, which alone may change the pool."""

        async def there() -> None:
            call(*arguments)

        self._run(there())

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)


def push(
    publisher: Publisher | None,
    weights: Callable[[], Weights],
    version: int,
    follow: Callable[[Weights], None] | None = None,
) -> None:
    """Push until every healthy server has the weights, and at least one server is healthy. A collective.

    `publisher` is rank 0's, None elsewhere; `follow` is another rank's part in a push, if it has one. Every
    rank iterates every stream to its end, whatever happens to the servers. Raises RolloutError on every rank
    when no server is available, or for a stream that does not fit the servers' model.
    """
    failed: list[Failed] = []  # rank 0's

    def next_command(publisher: Publisher) -> Command:
        return failed[0] if failed else publisher.next_command(version)

    leading = None if publisher is None else partial(next_command, publisher)
    while True:
        match lead(leading):
            case Done():
                return
            case Failed() as refused:
                raise refused.error
            case Push():
                stream = weights()
                if publisher is not None:
                    try:
                        publisher.attempt(stream, version)
                    except (ValueError, RolloutError) as error:
                        failed.append(Failed(str(error)))
                elif follow is not None:
                    follow(stream)
                for _ in stream:  # gathering it is a collective: every rank takes part to its end
                    pass
