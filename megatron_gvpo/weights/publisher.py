"""Sends the policy's weights to all servers of a run, and proves that they have arrived.

`WeightSync` is on every rank. It opens the weight stream, a collective, and has rank 0's `Publisher` send it
to the servers that lack the weights, again and again until every healthy server has them. After the first
pushes it compares the servers' log-probs of a probe with the policy's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.huggingface.adapter_layers import adapted_layers, adapter_of, adapter_shapes
from megatron_gvpo.huggingface.complete_weights import needless, stored_tensors
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.servers import leader
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.servers.launch.start import report
from megatron_gvpo.servers.leader import BackgroundLoop, Command, Done, Failed, Push, Wait, lead
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.settings.servers import WeightSyncConfig
from megatron_gvpo.types import TrainBatch
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.fp8 import Fp8Layout, fp8_layout
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
    from megatron_gvpo.settings.sections import ModelConfig


RETRY_AFTER = 2.0  # seconds; by then the pool has noticed a server that died
PROBE_TOKENS = 48
# The largest mean absolute difference, in nats a token, that rounding in trainer and server explains. On a
# prompt of SmolLM2-135M, whose 30 layers make it a sensitive model, bfloat16 alone moves transformers'
# log-probs by 0.04 to 0.05 on average, and FP8 in blocks of 128 by 0.16 to 0.17; in bfloat16, SGLang was 0.06
# and vLLM 0.08 from the trainer. Weights that are wrong in one of those layers are off by 0.14 to 10, those
# of another model by more. A smaller fault shows in `mismatch/kl` at every step. "tf32" is float32 on a GPU:
# Transformer Engine's products of float32 matrices have TF32's 10 bits, 3 more than bfloat16's.
TOLERANCE = {"float32": 1e-3, "tf32": 2.5e-2, "bfloat16": 0.2, "fp8": 0.5}
# The first push of a run is probed, and the first with changed weights, because a push that does nothing
# passes the first probe.
PROOFS = 2

Stream = Iterable[tuple[str, Tensor]]
Weights = Iterator[tuple[str, Tensor]] | OwnWeights


@dataclass(frozen=True)
class ProbeOutcome:
    """The result of a probe: the server has the pushed weights, has been lost, or has other weights."""

    outcome: Literal["right", "lost", "wrong"]
    problem: str = ""  # the error, if the outcome is "wrong"


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
        self._tolerance = TOLERANCE[precision]
        self._probe = _probe(prompts)
        self._servers: ServerSession | None = None  # exists on rank 0 alone, like the publisher
        self._publisher: Publisher | None = None
        # Another rank's part in a push, and its buffers; rank 0's are the publisher's.
        self._follower: tuple[Follower, DoubleBuffer] | None = None
        self._proved = 0
        self._proved_version = -1  # the version that the last probe has proved

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last push, on rank 0; empty on other ranks."""
        return self._publisher.metrics if self._publisher is not None else {}

    def connect(self, servers: ServerSession | None) -> None:
        """Prepare the first push to `servers`, which rank 0 has."""
        self._servers = servers
        if servers is not None:
            self._publisher = self._new_publisher(servers)
        elif (follower := self._transport_class.follower(self._settings)) is not None:
            limit = self._settings.rollout.weights.bucket_bytes
            self._follower = follower, DoubleBuffer(limit, self._settings.device)

    def expected_probe(self) -> Tensor | None:
        """Log-probs that a server with the present weights gives the probe, fp32 [tokens - 1].

        None after enough pushes have been proved, or if the prompts give no probe.
        """
        if self._proved >= PROOFS or len(self._probe) < 2:
            return None
        return self._policy.score(_rows(self._probe), temperature=1.0)

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

    def prove(self, version: int, expected: Tensor) -> None:
        """Compare the servers' log-probs of the probe with the policy's. Raises RolloutError."""
        outcomes: list[ProbeOutcome] = []
        if self._servers is not None:
            handles = [handle for handle in self._servers.pool.handles if handle.has(version)]
            outcomes = self._servers.loop.run(self._compare_all(handles, version, expected))
        fields = broadcast_msgpack([astuple(outcome) for outcome in outcomes])
        outcomes = [ProbeOutcome(*each_fields) for each_fields in fields]
        for result in outcomes:
            if result.outcome == "wrong":
                raise RolloutError(result.problem)
        # Colocated servers get the same weights again before the first step: only new weights count as a
        # second push.
        if version != self._proved_version and any(result.outcome == "right" for result in outcomes):
            self._proved, self._proved_version = self._proved + 1, version

    async def _compare_all(
        self, handles: Sequence[ServerHandle], version: int, expected: Tensor
    ) -> list[ProbeOutcome]:
        return await asyncio.gather(*(self._compare(handle, version, expected) for handle in handles))

    async def _compare(self, handle: ServerHandle, version: int, expected: Tensor) -> ProbeOutcome:
        assert self._servers is not None
        where, limit = f"rollout server {handle.server.url}", self._tolerance
        try:
            logprobs = await handle.server.score(self._probe, self._settings.rollout.weights.timeout)
        except (ServerGone, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.is_request:
                return ProbeOutcome("wrong", f"{where} refuses the probe that proves a push: {error}")
            self._servers.pool.lose(handle, str(error))
            return ProbeOutcome("lost")
        gap = (torch.tensor(logprobs) - expected).abs()
        if gap.mean() <= limit:
            return ProbeOutcome("right")
        return ProbeOutcome(
            "wrong",
            f"{where} does not have the weights that were sent: after push {version} its log-probs of "
            f"{len(expected)} probe tokens differ from the trainer's by {gap.mean():.3g} on average "
            f"(allowed: {limit:g}), {gap.max():.3g} at most. Does it serve the same model, in the same "
            "dtype, at a tested version?",
        )

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
        self._unopened: list[ServerHandle] = []  # servers that have the weights and wait for `open`
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
        """Let the servers serve, all in one turn of the event loop.

        Waiting requests choose a server in the next turn. If only one server were ready then, all would
        choose that server.
        """
        for handle in targets:
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
        if self._colocated:
            self._unopened += targets
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
        """Colocated servers take the rest of their memory and serve; the trainer has released its own."""
        closed, self._unopened = self._unopened, []
        try:
            self._run(each([handle for handle in closed if handle.is_ready], self._conclude))
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


def lowest_precision(model: ModelConfig, served_in_fp8: bool, on_gpu: bool) -> str:
    """The lower of the trainer's and the servers' precision, a key of TOLERANCE."""
    if served_in_fp8 or model.fp8 is not None:
        return "fp8"
    return "tf32" if on_gpu and model.dtype == "float32" else model.dtype


def _probe(prompts: Sequence[Prompt]) -> list[int]:
    """Tokens of the first prompts, one after another."""
    tokens: list[int] = []
    for prompt in prompts:
        if len(tokens) >= PROBE_TOKENS:
            break
        tokens += prompt.token_ids
    return tokens[:PROBE_TOKENS]


def _rows(tokens: list[int]) -> TrainBatch:
    return TrainBatch(
        prompt_ids=[tokens[:1]],
        response_ids=[tokens[1:]],
        group_n=torch.zeros(1, dtype=torch.int64),
        reward_n=torch.zeros(1),
        truncated_n=torch.zeros(1, dtype=torch.bool),
    )
