"""What a rollout engine is: token ids in, token ids with their log-probs and weight version out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_gvpo.config.schema import SamplingConfig
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


def derived_seed(*parts: int) -> int:
    """A seed from others, such as a prompt's from the step's: the first 63 bits of BLAKE2b("a/b/...").

    A hash, so that neighbouring seeds and positions share nothing; 63 bits, because engines take
    signed 64-bit seeds.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_request(
    request: Request, sampling: SamplingConfig, vocabulary: int, room: int | None
) -> str | None:
    """What is wrong with a request to a model of `vocabulary` tokens and `room` positions, if anything is."""
    length = len(request.prompt_ids)
    if request.n < 1:
        return f"n={request.n}, but at least 1 sample must be asked for"
    if request.seed < 0:
        return f"seed={request.seed} is negative"
    if not length:
        return "the prompt is empty; it needs at least one token"
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
        return f"the prompt has a token id outside the model's vocabulary [0, {vocabulary})"
    if room and length >= room:
        return f"the prompt has {length} tokens, and the model only {room} positions"
    if room and length + sampling.max_tokens > room:
        return (
            f"{length} prompt tokens + max_tokens={sampling.max_tokens} exceed the model's {room} "
            f"positions; max_tokens <= {room - length} fits"
        )
    return None
