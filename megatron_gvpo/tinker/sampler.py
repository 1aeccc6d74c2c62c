"""Samples from clients' models, here by the embedded engine, and scores prompts by the Megatron model.

Rank 0 first translates a client's sampling request into an order in the engine's terms (`sampling_of`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError

from megatron_gvpo.core.collectives import all_gather_msgpack, all_ranks_agree
from megatron_gvpo.groups import Rollout
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.scorer import score
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import GREEDY, SamplingConfig
from megatron_gvpo.settings.tinker import TinkerConfig
from megatron_gvpo.tinker.gradients import TEMPERATURE, rows_of
from megatron_gvpo.tinker.losses import TARGETS, UNPUBLISHED
from megatron_gvpo.tinker.requests import SampleBody, SamplingParams
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.state import Slot
from megatron_gvpo.tinker.wire import Datum, Refusal

NEVER = 2**31 - 2  # a token that no model has: the only stop token if the client requests none
Sequence3 = tuple[list[int], list[float], str]  # tokens, log-probs, stop reason


@dataclass(frozen=True)
class SampleOrder:
    """`n` samples of a prompt, as the ranks exchange it."""

    prompt: list[int]
    n: int
    seed: int
    max_tokens: int
    prompt_logprobs: bool

    @property
    def request(self) -> Request:
        """The order in the engine's terms."""
        return Request(tuple(self.prompt), self.n, self.seed, self.max_tokens)


def sequence_of(rollout: Rollout) -> Sequence3:
    return rollout.token_ids, rollout.logprobs or [], rollout.finish_reason


class SnapshotSampler(ABC):
    """An engine with the weights of one snapshot at a time. It samples only inside its context."""

    def __init__(self, config: TinkerConfig, slot: Slot) -> None:
        self._slot = slot
        self._max_tokens = config.max_tokens_per_micro_batch * config.parallel.cp
        self._loaded: str | None = None  # the snapshot that the engine has

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @property
    def positions(self) -> int | None:
        """The most tokens of a prompt with its response; None: as many as the model has positions."""
        return None

    def forget(self, snapshot: str) -> None:
        """Forget that the engine has this snapshot, because a later one may have the same name."""
        if self._loaded == snapshot:
            self._loaded = None

    def sample(
        self, snapshot: str, orders: Sequence[SampleOrder], sampling: SamplingConfig
    ) -> list[list[Sequence3]]:
        """Sample from the weights in the slot, which are those of `snapshot`. A collective.

        Raises Refusal on all ranks.
        """
        if self._loaded != snapshot:
            self._loaded = None
            self._load()
            self._loaded = snapshot
        return self._generate(orders, sampling)

    @abstractmethod
    def _load(self) -> None:
        """Give the engine the weights in the slot. A collective. Raises Refusal on all ranks."""

    @abstractmethod
    def _generate(self, orders: Sequence[SampleOrder], sampling: SamplingConfig) -> list[list[Sequence3]]:
        """The samples of each order, on all ranks. A collective. Raises Refusal on all ranks."""

    def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs of the prompts' tokens under the weights in the slot; NaN for the first. A collective."""
        data = [Datum(p[:-1], {TARGETS: np.asarray(p[1:], np.int64)}) for p in prompts if len(p) > 1]
        logp_r = (
            score(self._slot.model, rows_of(data), self._max_tokens, TEMPERATURE) if data else torch.zeros(0)
        )
        parts = iter(logp_r.split([len(datum.tokens) for datum in data]))
        return [[float("nan"), *(next(parts).tolist() if len(p) > 1 else [])] for p in prompts]


class EmbeddedSampler(SnapshotSampler):
    """The embedded engine: every rank has a copy of the model, and samples a share of the orders."""

    def __init__(self, config: TinkerConfig, slot: Slot, tokenizer: Any) -> None:
        super().__init__(config, slot)
        self._engine = LocalModel(
            config.model.path,
            tokenizer,
            device=parallel.device(),
            dtype=getattr(torch, config.model.dtype),
            batch_size=config.sampling_batch_size,
            end_token_ids=(),  # every request names its own end tokens
            trust_remote_code=config.model.trust_remote_code,
        )

    def _load(self) -> None:
        try:
            self._engine.load(self._slot.model.export(on_host=False), 0)
        except ValueError as error:
            raise Refusal(f"the embedded engine cannot sample from this model: {error}") from None

    def _generate(self, orders: Sequence[SampleOrder], sampling: SamplingConfig) -> list[list[Sequence3]]:
        """Return all samples, of which every rank samples those of a contiguous share of the orders."""
        rank, world = dist.get_rank(), dist.get_world_size()
        share = orders[rank * len(orders) // world : (rank + 1) * len(orders) // world]
        requests = [order.request for order in share]
        parts: list[list[Sequence3]] = []
        with all_ranks_agree(Refusal, ValueError, FloatingPointError):
            for rollouts in self._engine.generate(requests, sampling):
                parts.append([sequence_of(rollout) for rollout in rollouts])
        return [row for part in all_gather_msgpack(parts) for row in part]


COLDEST = 0.01  # lower temperatures leave only the likeliest token


def sampling_of(body: SampleBody, model: ServedModel, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(SampleOrder, SamplingConfig) as the ranks exchange them. Raises Refusal.

    Requests with equal SamplingConfigs are sampled together. `seed`: the seed of a request without one.
    """
    params, prompt = body.sampling_params, body.prompt.tokens()
    if body.record_stability_info:
        raise Refusal(f"record_stability_info=True: {UNPUBLISHED}")
    if not prompt:
        raise Refusal("the prompt is empty; it needs at least one token")
    model.check_tokens("prompt", prompt)
    longest = _longest_response(params, len(prompt), model)
    if body.prompt_logprobs_last_n is not None and not (
        body.prompt_logprobs and 1 <= body.prompt_logprobs_last_n < len(prompt)
    ):
        raise Refusal("prompt_logprobs_last_n needs prompt_logprobs, and a number from 1 to len(prompt) - 1")
    stop_ids, stop_texts = _stops(params, model)
    order = {
        "prompt": prompt,
        "n": body.num_samples,
        "seed": seed if params.seed is None else params.seed,
        "max_tokens": longest,
        "prompt_logprobs": bool(body.prompt_logprobs),
    }
    is_greedy = params.temperature < COLDEST
    sampling = {
        # The log-prob that is reported for the likeliest token is the model's own.
        "temperature": 1.0 if is_greedy else params.temperature,
        "top_p": GREEDY if is_greedy else params.top_p,
        "top_k": params.top_k if params.top_k > 0 else None,
        "max_tokens": model.positions,
        "stop_token_ids": stop_ids,
        "stop": stop_texts,
    }
    try:
        SamplingConfig.model_validate(sampling)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refusal(f"sampling_params.{first['loc'][0]}: {first['msg']}") from None
    return order, sampling


def _longest_response(params: SamplingParams, prompt_tokens: int, model: ServedModel) -> int:
    """The most tokens of a response: as requested, or all that fit. Raises Refusal."""
    room = model.sampled_positions - prompt_tokens
    longest = room if params.max_tokens is None else params.max_tokens
    if longest > room or longest < 1:
        whose = "the model's" if model.sampled_positions == model.positions else "the rollout servers'"
        raise Refusal(
            f"{prompt_tokens} prompt tokens + max_tokens={longest} exceed {whose} {model.sampled_positions} "
            "positions"
        )
    return longest


def _stops(params: SamplingParams, model: ServedModel) -> tuple[list[int], list[str]]:
    """(tokens, texts) that end a sample: the model's own end, too, unless the client wants no stop at all."""
    if params.stop == []:
        if model.is_always_ended:
            raise Refusal(
                "sampling_params.stop=[]: this server's rollout servers end every sample at the model's own "
                "end; name what ends it, or leave stop out"
            )
        return [NEVER], []
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    ids = [stop for stop in stops if isinstance(stop, int)]
    model.check_tokens("sampling_params.stop", ids)
    return sorted({*model.end_token_ids, *ids}), [stop for stop in stops if isinstance(stop, str) and stop]
