"""The policy's weights to the servers of a run: what is sent, how, and the proof that it arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.config.schema import Config, ConfigError, read_model_config
from megatron_gvpo.rollout.http import ServerGone, ServerRefused
from megatron_gvpo.rollout.pool import Member, RolloutError, ServerPool
from megatron_gvpo.runtime.collectives import broadcast_msgpack
from megatron_gvpo.sampling.served import ServedRollouts, report
from megatron_gvpo.types import Prompt, TrainBatch
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.fp8 import fp8_layout
from megatron_gvpo.weights.push import Publisher, push
from megatron_gvpo.weights.receivers import receiver_class
from megatron_gvpo.weights.stored_tensors import stored_tensors
from megatron_gvpo.weights.transport import Follower
from megatron_gvpo.weights.transports import transport_class

PROBE_TOKENS = 48
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.2}  # mean absolute difference, nats a token
RIGHT, LOST = "right", "lost"  # of a server that is asked to prove a push
# The first push of a run, and the first with changed weights: a push that does nothing passes the first.
PROOFS = 2

Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class ServedWeights:
    """Pushes to all servers, and proves the first pushes by a probe's log-probs. Collective throughout."""

    def __init__(
        self,
        config: Config,
        rollouts: ServedRollouts,
        weights: Weights,
        score: Callable[[TrainBatch], Tensor],
        prompts: Sequence[Prompt],
    ) -> None:
        self._config, self._rollouts, self._weights, self._score = config, rollouts, weights, score
        key = "rollout.servers.model_path" if config.rollout.servers.model_path else "model.path"
        self._served = read_model_config(config.served_path, key)
        self._stored = stored_tensors(Path(config.served_path))
        self._fp8 = fp8_layout(config.served_path, self._served, self._stored)
        if self._fp8 is not None and config.model.dtype != "bfloat16":
            raise ConfigError(
                f"model.dtype={config.model.dtype}: {key}={config.served_path} is in FP8, which the engines "
                "compute with in bfloat16: set model.dtype=bfloat16"
            )
        name = config.rollout.weights.transport
        self._kind = transport_class(name)
        self._receiver = receiver_class(config.rollout.engine, name)
        self._kind.check(config)
        if self._fp8 is not None and not self._kind.fp8_ok:
            raise ConfigError(
                f"rollout.weights.transport={name} cannot change a model in FP8 "
                f"({key}={config.served_path}): engines keep it in another arrangement than they load; use "
                "broadcast"
            )
        self._probe = _probe(prompts)
        self._publisher: Publisher | None = None
        self._follower: Follower | None = None  # of another rank than 0
        self._halves = DoubleBuffer(config.rollout.weights.bucket_mb * 2**20, _device())
        self._proved = 0
        self._version = -1

    @property
    def version(self) -> int:
        """Of the weights that the servers have; -1 where they have none, as after a rest."""
        return -1 if self._rollouts.resting else self._version

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last push; empty but on rank 0."""
        return self._publisher.metrics if self._publisher is not None else {}

    def push(self, version: int) -> None:
        """Give all healthy servers the present weights. Raises RolloutError."""
        if self._version < 0 and dist.get_rank() == 0:
            self._publisher = self._publish()
        elif self._version < 0:
            self._follower = self._kind.follower(self._config, _device())
        proves = self._proved < PROOFS and len(self._probe) > 1
        own = self._score(_rows(self._probe)) if proves else None
        self._rollouts.push = lambda: self._push(version)
        self._push(version)
        self._version = version
        if own is not None:
            self._prove(own)

    def _push(self, version: int) -> None:
        """Push, with the trainer's memory where colocated servers need it before and after."""
        memory, follow = self._rollouts.memory, self._follow if self._follower is not None else None
        if memory is None:
            push(self._publisher, self._weights, version, follow)
            return
        self._rollouts.resting = False
        try:
            memory.release("training")
            memory.restore("weights")
            if self._rollouts.fleet is not None:
                self._rollouts.fleet.wake()
            push(self._publisher, self._weights, version, follow)
            memory.release("weights")
            broadcast_msgpack(None)  # all ranks have
            if self._publisher is not None:
                self._publisher.open()
        except BaseException:
            self._rollouts.rest()
            raise

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._follower is not None:
            self._follower.close()

    def _follow(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """The follower's part in a push: the stream in the same buckets as rank 0's."""
        assert self._follower is not None
        if self._fp8 is not None:
            stream = self._fp8.quantised(stream)
        try:
            self._follower.follow(buckets(stream, self._halves, getattr(torch, self._config.model.dtype)))
        finally:
            self._halves.rest()
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()

    def _prove(self, own: Tensor) -> None:
        """Compare the servers' log-probs of a fixed text with the policy's `own`, fp32 [tokens - 1]."""
        fleet, loop = self._rollouts.fleet, self._rollouts.loop
        verdicts: list[str] = []
        if fleet is not None and loop is not None:
            members = [m for m in fleet.members if m.has(self._version)]
            verdicts = [loop.run(self._verdict(fleet, member, own)) for member in members]
        verdicts = broadcast_msgpack(verdicts)
        for verdict in verdicts:
            if verdict not in (RIGHT, LOST):
                raise RolloutError(verdict)
        self._proved += RIGHT in verdicts

    async def _verdict(self, fleet: ServerPool, member: Member, own: Tensor) -> str:
        """RIGHT, LOST (since the push, as any server may be at any time), or what is wrong."""
        where, limit = f"rollout server {member.server.url}", TOLERANCE[self._precision]
        try:
            theirs = await member.server.score(self._probe, self._config.rollout.weights.timeout)
        except (ServerGone, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.is_request:
                return f"{where} refuses the probe that proves a push: {error}"
            fleet.lose(member, str(error))
            return LOST
        gap = (torch.tensor(theirs) - own).abs()
        if gap.mean() <= limit:
            return RIGHT
        return (
            f"{where} does not have the weights that were sent: after push {self._version} its log-probs of "
            f"{len(own)} probe tokens differ from the trainer's by {gap.mean():.3g} on average (allowed: "
            f"{limit:g}), {gap.max():.3g} at most. Does it serve the same model, in the same dtype, at a "
            "tested version?"
        )

    @property
    def _precision(self) -> str:
        return "fp8" if self._fp8 is not None else self._config.model.dtype

    def _publish(self) -> Publisher:
        fleet, loop = self._rollouts.fleet, self._rollouts.loop
        assert fleet is not None and loop is not None, "rank 0 has them while the rollouts are open"
        config, device = self._config, _device()
        transport = self._kind.create(config, self._receiver, device)
        return Publisher(
            fleet,
            loop,
            transport,
            config.rollout.weights,
            dtype=getattr(torch, config.model.dtype),
            device=torch.device("cpu") if transport.host_buckets else device,
            expected={name: tensor.shape for name, tensor in self._stored.items()},
            optional=frozenset(["lm_head.weight"] if self._served.get("tie_word_embeddings") else []),
            fp8=self._fp8,
            colocated=config.rollout.servers.colocated,
            report=report,
        )


def _device() -> torch.device:
    """Where buckets are filled."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
