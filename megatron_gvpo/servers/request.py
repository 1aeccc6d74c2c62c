"""Requests to a rollout engine, their seeds, and its responses in a form that ranks can exchange."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.groups import Image, Prompt, Rollout, rollout_of
from megatron_gvpo.settings.sections import SamplingConfig

if TYPE_CHECKING:
    from megatron_gvpo.servers.request_images import ImageSender, RequestImage


@dataclass(frozen=True)
class Request:
    """`n` samples of one prompt. The same seed (0 <= seed < 2**63) gives the same samples."""

    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    max_tokens: int | None = None  # longest response; None: the limit of `sampling`
    images: tuple[Image, ...] = ()  # images in the prompt

    def longest(self, sampling: SamplingConfig) -> int:
        """The largest number of tokens of a sample."""
        return self.max_tokens or sampling.max_tokens


def requests_for(prompts: Sequence[Prompt], n: int, seed: int) -> list[Request]:
    """A request for each prompt. Seeds belong to positions, so the number of ranks does not change them."""
    return [
        Request(prompt.token_ids, n, derived_seed(seed, i), images=prompt.images)
        for i, prompt in enumerate(prompts)
    ]


def derived_seed(*parts: int) -> int:
    """A seed made from others, such as a prompt's from the step's: 63 bits of BLAKE2b("a/b/...").

    Hashing makes neighbouring seeds and positions independent. The result has 63 bits, because engines take
    signed 64-bit seeds.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_request(
    request: Request, sampling: SamplingConfig, vocabulary: int, room: int | None
) -> str | None:
    """The error in a request to a model of `vocabulary` tokens and `room` positions, or None."""
    length, longest = len(request.prompt_ids), request.longest(sampling)
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
    if room and length + longest > room:
        return (
            f"{length} prompt tokens + max_tokens={longest} exceed the model's {room} "
            f"positions; max_tokens <= {room - length} fits"
        )
    return None


async def images_of(request: Request, sender: ImageSender | None) -> tuple[RequestImage, ...]:
    """The request's images as a server gets them. Raises RolloutError."""
    if not request.images:
        return ()
    assert sender is not None, "checked with the configuration"
    try:
        return await asyncio.to_thread(sender.sent, request.images)
    except ImageError as error:
        raise RolloutError(str(error)) from None


def pack(rows: Iterable[Iterable[Rollout]]) -> list[list[dict[str, Any]]]:
    """Rows of rollouts as msgpack takes them; `unpack` makes them rollouts again."""
    names = [field.name for field in fields(Rollout)]
    return [[{name: getattr(rollout, name) for name in names} for rollout in row] for row in rows]


def unpack(rows: Iterable[Iterable[dict[str, Any]]]) -> list[list[Rollout]]:
    """The rows of rollouts that `pack` was given."""
    return [[rollout_of(values) for values in row] for row in rows]
