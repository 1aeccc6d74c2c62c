"""What a rollout engine is: token ids in, token ids with their log-probs and weight version out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_gvpo.config import SamplingConfig
from megatron_gvpo.types import Rollout


@dataclass(frozen=True)
class Request:
    """`n` samples of one prompt. The same seed (0 <= seed < 2**63) gives the same samples."""

    prompt_ids: tuple[int, ...]
    n: int
    seed: int


class Engine(Protocol):
    """A sampler of responses; its weights arrive through `megatron_gvpo.weights`."""

    weight_version: int  # of the weights that the next `generate` will use

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Rollout]]:
        """`n` rollouts for each request, in request order.

        Rollouts carry the log-probs at the sampling temperature before top-p, the decoded text and the
        weight version. Raises ValueError for a request that cannot be served, naming it.
        """

    def close(self) -> None:
        """Release what the engine holds; it cannot generate afterwards."""
