"""Checks that an answer is one that the server's engine can give: nothing else becomes part of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.servers.server import Completion, shortened

RESERVED = 2  # tokens that SGLang leaves free in its context when it ends a response for its length


class SampleFailure(NamedTuple):
    """A server did not give a usable sample. The request goes to another server."""

    why: str


@dataclass(frozen=True)
class Expected:
    """The limits of an answer."""

    version: int  # weight version that should sample the response
    max_tokens: int
    stops: Sequence[int]  # the tokens that end a response
    stop_strings: Sequence[str]  # the texts that do
    vocabulary: float  # the model's token ids are below it
    placeholder: int | None  # the token of an image, where the prompt has images
    supports: bool = False  # with what every token was sampled from


def trusted(
    url: str, sample: Completion, expected: Expected, *, is_serving: bool
) -> Completion | SampleFailure:
    """The part of an answer that joins the response, or the reason to distrust the server.

    `is_serving`: the server has been given no reason to stop responses. Raises RolloutError for a response
    that ended at another token than the run's.
    """
    # A server that restarts between two health checks has other weights.
    if sample.version not in (None, str(expected.version)):
        return SampleFailure(f"{url} sampled from weights {sample.version}, not {expected.version}")
    if sample.finish_reason == "abort":
        sample = sample.up_to_stop(expected.stops)
    if (fault := _fault(sample, expected)) is not None:
        return SampleFailure(f"{url} {fault}")
    if (problem := sample.ended_elsewhere(expected.stops)) is not None:
        raise RolloutError(f"rollout server {url} {problem}")
    if sample.finish_reason == "abort" and expected.placeholder is not None:
        # A server would take a sampled placeholder for an image when it is asked to go on.
        sample = sample.before(expected.placeholder)
    # A push takes a server out before it stops its responses. One that stops them by itself, and gives
    # nothing, may do so for ever.
    if sample.finish_reason == "abort" and not sample.token_ids and is_serving:
        return SampleFailure(
            f'{url} answered with finish reason "abort" and no token, and nothing had stopped it'
        )
    return sample


def _fault(sample: Completion, expected: Expected) -> str | None:
    count, most = len(sample.token_ids), expected.max_tokens
    if count > most:
        return f"answered with {count} tokens, and was asked for {most} at most"
    for index, token in enumerate(sample.token_ids):
        if token >= expected.vocabulary:
            return f"answered with token {token} at index {index}, and the model knows {expected.vocabulary}"
        if token in expected.stops and index < count - 1:
            return f"did not end a response at token {token}, index {index} of {count}, which ends it"
    if expected.supports and count and sample.support is None:
        return (
            "did not say what its tokens were sampled from: with rollout.top_p, top_k or min_p start it with "
            "`megatron-gvpo serve` and this configuration"
        )
    if sample.stop_string is not None and sample.stop_string not in expected.stop_strings:
        return f"ended a response at {shortened(sample.stop_string)}, which is not a stop string of the run"
    if sample.finish_reason == "length" and count < most - RESERVED:
        return (
            f'ended a response with finish reason "length" after {count} of {most} tokens: its context or '
            "its cache is too small"
        )
    return None
