"""Sends the policy's weights to all servers of a run.

`WeightSync` is on every rank. It opens the weight stream, a collective, and has rank 0's `Publisher` send it
to the servers that lack the weights, again and again until every healthy server has them. `probe.py` proves
that they have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.huggingface.adapter_layers import adapted_layers, adapter_of, adapter_shapes
from megatron_gvpo.huggingface.complete_weights import needless, stored_tensors
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.servers import leader
from megatron_gvpo.servers.handle import Loaded, ServerHandle
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.servers.launch.start import report
from megatron_gvpo.servers.leader import BackgroundLoop, Command, Done, Failed, Push, Wait, lead
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.settings.servers import WeightSyncConfig
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.fp8 import Fp8Layout, fp8_layout
from megatron_gvpo.weights.probe import TOLERANCE, Probe, lowest_precision
from megatron_gvpo.weights.receivers import receiver_class
from megatron_gvpo.weights.transport import (
    Follower,
    PushFailed,
    PushSettings,
    Transport,
    each,
    transport_class,
)

if TYPE_CHECKING:
    from megatron_gvpo.groups import Prompt
    from megatron_gvpo.megatron.scorer import ScoredModel
    from megatron_gvpo.servers.session import ServerSession


RETRY_AFTER = 2.0  # seconds; by then the pool has noticed a server that died
Stream = Iterable[tuple[str, Tensor]]
Weights = Iterator[tuple[str, Tensor]] | OwnWeights


class WeightSync:
    """Pushes the policy's weights to all servers. Every rank calls every method: they are collectives.

    Raises ConfigError for servers that cannot take the weights of this run.
    """

    def __init__(self, settings: PushSettings, policy: ScoredModel, prompts: Sequence[Prompt]) -> None:
        self._settings, self._policy = settings, policy
        model, served = settings.model, f"{settings.cards.served_key}={settings.cards.served_path}"
        self._stored = stored_tensors(Path(settings.cards.served_path), settings.cards.served_key)
        self._fp8 = fp8_layout(settings.cards.served_path, settings.cards.served, self._stored)
        if self._fp8 is not None and model.dtype != "bfloat16":
            raise ConfigError(
                f"model.dtype={model.dtype}: {served} is in FP8, which the engines compute with in bfloat16: "
                "set model.dtype=bfloat16"
            )
        name, self._traits = settings.rollout.weights.transport, settings.rollout.weights.traits
        self._transport_class = transport_class(name)
        self._receiver = receiver_class(settings.rollout.engine, name)
        self._transport_class.check(settings)
        if self._fp8 is not None and not self._traits.fp8_ok:
            raise ConfigError(
                f"rollout.weights.transport={name} cannot change a model in FP8 ({served}): engines keep it "
                "in another arrangement than they load; use "
                f"{'shared' if settings.rollout.servers.colocated else 'broadcast'}"
            )
        precision = lowest_precision(model, self._fp8 is not None, torch.cuda.is_available())
        self.probe = Probe(policy, prompts, TOLERANCE[precision], settings.rollout.weights.timeout)
        self._publisher: Publisher | None = None  # exists on rank 0 alone
        # Another rank's part in a push, and its buffers; rank 0's are the publisher's.
        self._follower: tuple[Follower, DoubleBuffer] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last push, on rank 0; empty on other ranks."""
        return self._publisher.metrics if self._publisher is not None else {}

    def connect(self, servers: ServerSession | None) -> None:
        """Prepare the first push to `servers`, which rank 0 has."""
        self.probe.servers = servers
        if servers is not None:
            self._publisher = self._new_publisher(servers)
        elif (follower := self._transport_class.follower(self._settings)) is not None:
            limit = self._settings.rollout.weights.bucket_bytes
            self._follower = follower, DoubleBuffer(limit, self._settings.device)

    def push(self, version: int) -> None:
        """Give all healthy servers the present weights. Raises RolloutError."""

        def weights() -> Weights:
            policy, traits = self._policy, self._traits
            if traits.sends_adapter:
                return policy.adapter_weights(on_host=False)
            return policy.own_weights() if traits.sends_own else policy.weights(on_host=False)

        push_until_done(self._publisher, weights, version, None if self._follower is None else self._follow)

    def open_servers(self) -> None:
        """Colocated servers that got the weights take the rest of their memory, and serve."""
        if self._publisher is not None:
            self._publisher.open()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._follower is not None:
            self._follower[0].close()

    def _follow(self, stream: Weights) -> None:
        """Take a follower's part in a push: send own weights, or read the stream in rank 0's buckets."""
        assert self._follower is not None
        follower, halves = self._follower
        if isinstance(stream, OwnWeights):
            follower.follow_own(stream)
            return
        if self._fp8 is not None:
            stream = self._fp8.quantised(stream)
        try:
            follower.follow(buckets(stream, halves, getattr(torch, self._settings.model.dtype)))
        finally:
            halves.rest()
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()

    def _new_publisher(self, servers: ServerSession) -> Publisher:
        settings, model = self._settings, self._settings.model
        transport = self._transport_class.create(settings, self._receiver)
        expected: dict[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self._stored.items()}
        optional = not_pushed(settings.cards.served, expected)
        if self._traits.sends_adapter:
            layers = adapted_layers(model, settings.cards.policy)
            expected, optional = adapter_shapes(expected, layers, adapter_of(model).rank)
        return Publisher(
            servers.pool,
            servers.loop,
            transport,
            settings.rollout.weights,
            dtype=getattr(torch, model.dtype),
            device=torch.device("cpu") if transport.host_buckets else settings.device,
            expected=expected,
            optional=optional,
            fp8=self._fp8,
            colocated=settings.rollout.servers.colocated,
            report=report,
        )


def push_until_done(
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
    failures: list[Failed] = []  # filled on rank 0

    def next_command(publisher: Publisher) -> Command:
        return failures[0] if failures else publisher.next_command(version)

    leading = None if publisher is None else partial(next_command, publisher)
    while True:
        match lead(leading):
            case Done():
                return
            case Failed() as failed:
                raise failed.error
            case Push():
                stream = weights()
                if publisher is not None:
                    try:
                        publisher.attempt(stream, version)
                    except (ValueError, RolloutError) as error:
                        failures.append(Failed(str(error)))
                elif follow is not None:
                    follow(stream)
                for _ in stream:  # every rank iterates to the end, because each item is a collective
                    pass


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
        self._pool = pool
        self._loop = loop
        self._transport = transport
        self._settings = settings
        self._dtype, self._halves = dtype, DoubleBuffer(settings.bucket_bytes, device)
        self._expected = expected
        self._optional = optional
        self._fp8 = fp8
        self._report = report
        self._colocated = colocated
        # The servers of the next attempt, once they have no requests in flight.
        self._targets: Future[list[ServerHandle]] | None = None
        self._failures: dict[str, int] = {}  # consecutive failures, by url
        self._last_problem, self._failures_in_a_row = "", 0
        self.metrics: dict[str, float] = {}

    def next_command(self, version: int) -> Command:
        """Return Push, Done, Wait (after a heartbeat, for a server or its responses) or Failed."""
        deadline = time.monotonic() + leader.HEARTBEAT
        count = self._failures_in_a_row
        if count >= self._settings.attempts * (len(self._pool.handles) + 1):
            # Every server has been replaced once by now, so no server is the cause of the failure.
            return Failed(f"{count} weight pushes in a row failed, at last: {self._last_problem}")
        while True:
            healthy = [handle for handle in self._pool.handles if not handle.is_lost]
            if self._targets is None and not all(handle.has(version) for handle in healthy):
                carry = self._settings.in_flight == "carry"
                self._targets = self._loop.submit(self._pool.take_out(version, abort=carry))
            if self._targets is not None:  # responses may take longer than other ranks wait in a collective
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

        These servers have no requests in flight. Raises ValueError for a stream that does not fit the model.
        """
        assert self._targets is not None, "attempt() must follow the command Push"
        begin = time.perf_counter()
        targets: list[ServerHandle] = []
        try:
            targets, self._targets = self._targets.result(), None
            sent = self._send(stream, targets, version) if targets else 0
            for handle in targets:
                self._failures.pop(handle.server.url, None)
            self._in_loop(self._admit, targets, version)
            self._failures_in_a_row = 0
            seconds = time.perf_counter() - begin
            self.metrics = {"sync/bytes": float(sent), "sync/gb_per_s": sent / seconds / 1e9}
            self.metrics |= self._transport.metrics
        except PushFailed as failure:
            self._last_problem = str(failure)
            self._failures_in_a_row += 1
            self._report(f"weight push {version} failed: {failure}")
            self._run(self._lose_or_replace(failure.handles))
            time.sleep(RETRY_AFTER)
        finally:
            self._transport.over()
            self._in_loop(self._pool.push_ended, targets)

    def close(self) -> None:
        self._run(self._transport.close())

    def _admit(self, targets: Sequence[ServerHandle], version: int) -> None:
        """Let the servers serve, all in one turn of the event loop; colocated ones wait for `open`.

        Waiting requests choose a server in the next turn. If only one server were ready then, all would
        choose that server.
        """
        for handle in targets:
            if self._colocated:
                self._pool.note_loaded(handle, version)
            else:
                self._pool.admit(handle, version)

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
        if not self._colocated:
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
                sending.cancel()  # this has no effect on a task that has ended
            self._halves.rest()

    def _checked(self, stream: Stream, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream. Raises ValueError for names or shapes that differ from the servers' model."""
        remaining = dict(self._expected)
        for name, tensor in stream:
            shape = remaining.pop(name, None)
            if shape is None and name not in self._optional:
                known = "came twice" if name in self._expected else "is not in the servers' model"
                raise ValueError(f"weight push {version}: {name} {known}")
            if shape is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"weight push {version}: {name} has shape {tuple(tensor.shape)}, "
                    f"the servers' model has {shape}"
                )
            yield name, tensor
        if missing := sorted(remaining.keys() - self._optional):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(f"weight push {version}: {len(missing)} tensor(s) did not come: {shown}")

    async def _lose_or_replace(self, failed: Sequence[ServerHandle]) -> None:
        """Lose the servers that do not answer, and replace those that failed too often.

        The failures of a server that was lost no longer count.
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
        """Colocated servers take the rest of their memory and serve; the trainer has released its own.

        They get requests only now: a server that is still paused refuses its trainer's.
        """
        loaded = [handle for handle in self._pool.handles if isinstance(handle.state, Loaded)]
        try:
            self._run(each(loaded, self._conclude))
        except PushFailed as failure:
            self._report(f"rollout servers did not wake: {failure}")
            for handle in failure.handles:
                self._in_loop(self._pool.replace, handle, "it did not wake")
        self._in_loop(self._pool.open)

    async def _prepare(self, handle: ServerHandle) -> None:
        """Pause the server, also for requests of other clients, and give it memory for the weights."""
        await handle.server.pause(self._settings.timeout)
        await self._pool.onload(handle, "weights")

    async def _conclude(self, handle: ServerHandle) -> None:
        await self._pool.onload(handle, "cache")
        await handle.server.flush_cache(self._settings.timeout)
        await handle.server.resume(self._settings.timeout)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call` on the pool's event loop, the only thread that may change the pool."""

        async def calling() -> None:
            call(*arguments)

        self._run(calling())

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine)


def not_pushed(served: Mapping[str, Any], stored: Iterable[str]) -> frozenset[str]:
    """The tensors of the servers' checkpoint that a push may omit; `served`: its config.json.

    These are an output layer beside tied embeddings, heads for further tokens, which never change, and
    rotary frequencies, which old checkpoints have in their files.
    """
    tied = ["lm_head.weight"] if served.get("tie_word_embeddings") else []
    return frozenset(tied) | frozenset(filter(needless(served), stored))
