"""Checks that an answer can be from the server's engine, before it becomes part of a response.

The experts that a server routed tokens to are checked, too, and packed for the trainer's router replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Routing
from megatron_gvpo.huggingface.card import ModelCard
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
    stop_strings: Sequence[str]  # the texts that end a response
    vocabulary: float  # the model's token ids are below it
    placeholder: int | None  # the token of an image, where the prompt has images
    supports: bool = False  # true if answers must include the tokens that each token was sampled from


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
        # A server would take a sampled placeholder for an image when a later request has it in the prompt.
        sample = sample.before(expected.placeholder)
    # A push takes a server out of use before it stops its responses. If a server in use stops a response
    # before its first token, it may do so every time, so it counts as failed.
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


@dataclass(frozen=True)
class Routers:
    """The routers of a model, from its config.json."""

    layers: int  # decoder layers, dense ones included
    sparse: tuple[int, ...]  # numbers of the layers with experts
    per_token: int  # experts of one token in one layer
    experts: int

    @staticmethod
    def of(card: ModelCard) -> Routers:
        layers, step = card["num_hidden_layers"], card.get("decoder_sparse_step") or 1
        dense = {*range(card.dense_layers), *(card.get("mlp_only_layers") or [])}
        sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
        return Routers(layers, sparse, card["num_experts_per_tok"], card.experts)

    def pack(self, recorded: np.ndarray, tokens: int) -> Routing:
        """Pack the experts of a sequence of `tokens` tokens.

        `recorded` holds integers [tokens - 1, layers, per_token], in any shape. Raises ValueError if their
        number or one of them does not fit the model, and for a token without recorded experts.
        """
        shape = (tokens - 1, self.layers, self.per_token)
        if recorded.size != np.prod(shape):
            raise ValueError(
                f"{recorded.size} experts for {tokens} tokens: want {self.per_token} in each of "
                f"{self.layers} layers for every token but the last"
            )
        chosen = recorded.reshape(shape)
        width, kind = (1, "<u1") if self.experts <= 256 else (2, "<i2")
        routed = chosen[:, self.sparse]
        if routed.size and not 0 <= routed.min() <= routed.max() < self.experts:
            raise ValueError(f"expert {routed.max()} is out of range: the model has {self.experts} experts")
        # A server leaves zeros for a token that it did not record. Comparing all pairs of a token's experts
        # would take seconds a step.
        if self.per_token > 1 and (routed[..., 0] == routed[..., 1]).any():
            raise ValueError("some token has the same expert twice: the server recorded none for it")
        return Routing(self.layers, self.per_token, width, chosen.astype(kind).tobytes())


def routing_of(routers: Routers | None, recorded: np.ndarray | None, tokens: int) -> Routing:
    """Pack the experts that a server gave for a sequence of `tokens` tokens. Raises ValueError."""
    if routers is None or recorded is None:
        raise ValueError(
            "no experts: for rollout.router_replay servers are started with --enable-return-routed-experts"
        )
    return routers.pack(recorded, tokens)
