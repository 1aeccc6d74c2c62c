"""Proves that pushed weights have arrived: servers and policy compute the log-probs of the same probe."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from megatron_gvpo.groups import Prompt
    from megatron_gvpo.megatron.scorer import ScoredModel
    from megatron_gvpo.servers.session import ServerSession
    from megatron_gvpo.settings.sections import ModelConfig

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


@dataclass(frozen=True)
class ProbeOutcome:
    """The result of a probe: the server has the pushed weights, has been lost, or has other weights."""

    outcome: Literal["right", "lost", "wrong"]
    problem: str = ""  # the error, if the outcome is "wrong"


class Probe:
    """Tokens of some prompts, whose log-probs show which weights a server has.

    Every rank calls every method: they are collectives.
    """

    def __init__(
        self, policy: ScoredModel, prompts: Sequence[Prompt], tolerance: float, timeout: float
    ) -> None:
        """`tolerance` in nats a token, one of TOLERANCE; `timeout`: seconds in which a server must answer."""
        self._policy, self._tolerance, self._timeout = policy, tolerance, timeout
        self._tokens = _first_tokens(prompts)
        self.servers: ServerSession | None = None  # set on rank 0 before the first push
        self.proved = 0  # the versions that were proved
        self._proved_version = -1  # the last of them

    def expected(self) -> Tensor | None:
        """Log-probs that a server with the present weights gives the probe, fp32 [tokens - 1].

        None after enough pushes have been proved, or if the prompts give no probe.
        """
        if self.proved >= PROOFS or len(self._tokens) < 2:
            return None
        return self._policy.score(_rows(self._tokens), temperature=1.0)

    def prove(self, version: int, expected: Tensor) -> None:
        """Compare the servers' log-probs of the probe with the policy's. Raises RolloutError."""
        outcomes: list[ProbeOutcome] = []
        if self.servers is not None:
            handles = [handle for handle in self.servers.pool.handles if handle.has(version)]
            outcomes = self.servers.loop.run(self._compare_all(handles, version, expected))
        fields = broadcast_msgpack([astuple(outcome) for outcome in outcomes])
        outcomes = [ProbeOutcome(*each_fields) for each_fields in fields]
        for result in outcomes:
            if result.outcome == "wrong":
                raise RolloutError(result.problem)
        # Colocated servers get the same weights again before the first step: only new weights count as a
        # second push.
        if version != self._proved_version and any(result.outcome == "right" for result in outcomes):
            self.proved, self._proved_version = self.proved + 1, version

    async def _compare_all(
        self, handles: Sequence[ServerHandle], version: int, expected: Tensor
    ) -> list[ProbeOutcome]:
        return await asyncio.gather(*(self._compare(handle, version, expected) for handle in handles))

    async def _compare(self, handle: ServerHandle, version: int, expected: Tensor) -> ProbeOutcome:
        assert self.servers is not None
        where, limit = f"rollout server {handle.server.url}", self._tolerance
        try:
            logprobs = await handle.server.score(self._tokens, self._timeout)
        except (ServerGone, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.is_request:
                return ProbeOutcome("wrong", f"{where} refuses the probe that proves a push: {error}")
            self.servers.pool.lose(handle, str(error))
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


def lowest_precision(model: ModelConfig, served_in_fp8: bool, on_gpu: bool) -> str:
    """The lower of the trainer's and the servers' precision, a key of TOLERANCE."""
    if served_in_fp8 or model.fp8 is not None:
        return "fp8"
    return "tf32" if on_gpu and model.dtype == "float32" else model.dtype


def _first_tokens(prompts: Sequence[Prompt]) -> list[int]:
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
