"""Syncs the servers of a run with the policy: connects, pushes, and proves that the weights arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_gvpo.config.schema import Config, ConfigError, ModelConfig, read_model_config
from megatron_gvpo.megatron.model.further_heads import head_pattern
from megatron_gvpo.megatron.model.own_weights import OwnWeights
from megatron_gvpo.rollout.http import ServerGone, ServerRefused
from megatron_gvpo.rollout.launch.start import report
from megatron_gvpo.rollout.pool import ServerHandle
from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.rollout.session import ServerSession
from megatron_gvpo.runtime.collectives import broadcast_msgpack
from megatron_gvpo.types import Prompt, TrainBatch
from megatron_gvpo.weights.adapters.layers import adapted_layers, adapter_of, adapter_shapes
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.fp8 import fp8_layout
from megatron_gvpo.weights.push import Publisher, Weights, push
from megatron_gvpo.weights.receivers import receiver_class
from megatron_gvpo.weights.stored_tensors import stored_tensors
from megatron_gvpo.weights.transport import Follower
from megatron_gvpo.weights.transports import transport_class

if TYPE_CHECKING:
    from megatron_gvpo.megatron.scorer import Scorer

PROBE_TOKENS = 48
# Mean absolute difference, nats a token. "tf32" is float32 on a GPU: Transformer Engine's products of float32
# matrices have TF32's 10 bits, 3 more than bfloat16's.
TOLERANCE = {"float32": 1e-3, "tf32": 6e-3, "bfloat16": 0.05, "fp8": 0.2}
# The first push of a run, and the first with changed weights: a push that does nothing passes the first.
PROOFS = 2


@dataclass(frozen=True)
class Verdict:
    """The outcome of a probe: the server has the weights that were sent, was lost since, or is wrong."""

    outcome: Literal["right", "lost", "wrong"]
    problem: str = ""  # the error, where the outcome is "wrong"


class WeightSync:
    """Pushes the policy's weights to all servers. Every rank calls every method: they are collectives.

    Raises ConfigError for servers that cannot take the weights of this run.
    """

    def __init__(self, config: Config, policy: Scorer, prompts: Sequence[Prompt]) -> None:
        self._config, self._policy = config, policy
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
        self._kind, self._traits = transport_class(name), config.rollout.weights.traits
        self._receiver = receiver_class(config.rollout.engine, name)
        self._kind.check(config)
        if self._fp8 is not None and not self._traits.fp8_ok:
            raise ConfigError(
                f"rollout.weights.transport={name} cannot change a model in FP8 "
                f"({key}={config.served_path}): engines keep it in another arrangement than they load; use "
                "broadcast"
            )
        precision = lowest_precision(config.model, self._fp8 is not None, torch.cuda.is_available())
        self._tolerance = TOLERANCE[precision]
        self._probe = _probe(prompts)
        self._servers: ServerSession | None = None  # rank 0's, and so is the publisher
        self._publisher: Publisher | None = None
        # Another rank's part in a push, and its buffers; rank 0's are the publisher's.
        self._follower: tuple[Follower, DoubleBuffer] | None = None
        self._proved = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last push; empty but on rank 0."""
        return self._publisher.metrics if self._publisher is not None else {}

    def connect(self, servers: ServerSession | None) -> None:
        """Prepare the first push to `servers`, which rank 0 has."""
        self._servers = servers
        if servers is not None:
            self._publisher = self._publish(servers)
        elif (follower := self._kind.follower(self._config, _device())) is not None:
            limit = self._config.rollout.weights.bucket_bytes
            self._follower = follower, DoubleBuffer(limit, _device())

    def expected_probe(self) -> Tensor | None:
        """Log-probs that a server with the present weights gives the probe, fp32 [tokens - 1].

        None once enough pushes have been proved, or where the prompts give no probe.
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

        push(self._publisher, weights, version, None if self._follower is None else self._follow)

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
        """The follower's part in a push: its own weights, or the stream in the same buckets as rank 0's."""
        assert self._follower is not None
        follower, halves = self._follower
        if isinstance(stream, OwnWeights):
            follower.follow_own(stream)
            return
        if self._fp8 is not None:
            stream = self._fp8.quantised(stream)
        try:
            follower.follow(buckets(stream, halves, getattr(torch, self._config.model.dtype)))
        finally:
            halves.rest()
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()

    def prove(self, version: int, expected: Tensor) -> None:
        """Compare the servers' log-probs of the probe with the policy's. Raises RolloutError."""
        verdicts: list[Verdict] = []
        if self._servers is not None:
            handles = [m for m in self._servers.pool.handles if m.has(version)]
            verdicts = [self._servers.loop.run(self._verdict(m, version, expected)) for m in handles]
        verdicts = [Verdict(*fields) for fields in broadcast_msgpack([astuple(v) for v in verdicts])]
        for verdict in verdicts:
            if verdict.outcome == "wrong":
                raise RolloutError(verdict.problem)
        self._proved += any(verdict.outcome == "right" for verdict in verdicts)

    async def _verdict(self, handle: ServerHandle, version: int, expected: Tensor) -> Verdict:
        assert self._servers is not None
        where, limit = f"rollout server {handle.server.url}", self._tolerance
        try:
            theirs = await handle.server.score(self._probe, self._config.rollout.weights.timeout)
        except (ServerGone, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.is_request:
                return Verdict("wrong", f"{where} refuses the probe that proves a push: {error}")
            self._servers.pool.lose(handle, str(error))
            return Verdict("lost")
        gap = (torch.tensor(theirs) - expected).abs()
        if gap.mean() <= limit:
            return Verdict("right")
        return Verdict(
            "wrong",
            f"{where} does not have the weights that were sent: after push {version} its log-probs of "
            f"{len(expected)} probe tokens differ from the trainer's by {gap.mean():.3g} on average "
            f"(allowed: {limit:g}), {gap.max():.3g} at most. Does it serve the same model, in the same "
            "dtype, at a tested version?",
        )

    def _publish(self, servers: ServerSession) -> Publisher:
        config, device = self._config, _device()
        transport = self._kind.create(config, self._receiver, device)
        expected: dict[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self._stored.items()}
        optional = not_pushed(self._served, expected)
        if self._traits.sends_adapter:
            layers, rank = adapted_layers(config), adapter_of(config).rank
            expected, optional = adapter_shapes(expected, layers, rank)
        return Publisher(
            servers.pool,
            servers.loop,
            transport,
            config.rollout.weights,
            dtype=getattr(torch, config.model.dtype),
            device=torch.device("cpu") if transport.host_buckets else device,
            expected=expected,
            optional=optional,
            fp8=self._fp8,
            colocated=config.rollout.servers.colocated,
            report=report,
        )


def not_pushed(served: Mapping[str, Any], stored: Iterable[str]) -> frozenset[str]:
    """The tensors of the servers' checkpoint that a push need not have; `served`: its config.json.

    These are an output layer beside tied embeddings, and heads for further tokens, which never change.
    """
    heads = head_pattern(served)
    tied = ["lm_head.weight"] if served.get("tie_word_embeddings") else []
    return frozenset(tied) | {name for name in stored if heads.fullmatch(name)}


def lowest_precision(model: ModelConfig, served_in_fp8: bool, on_gpu: bool) -> str:
    """The lower of the trainer's and the servers' precision, a key of TOLERANCE."""
    if served_in_fp8 or model.fp8 is not None:
        return "fp8"
    return "tf32" if on_gpu and model.dtype == "float32" else model.dtype


def _device() -> torch.device:
    """The device on which buckets are filled."""
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
