"""Samples from clients' models by the embedded engine, and scores prompts by the Megatron model.

A client's sampling request becomes an order in the engine's terms first, on rank 0 (`sampling_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError

from megatron_gvpo.core.collectives import all_gather_msgpack, all_ranks_agree
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

NEVER = 2**31 - 2  # a token that no model has: the only one to stop at where the client wants none
Sequence3 = tuple[list[int], list[float], str]  # tokens, log-probs, stop reason


@dataclass(frozen=True)
class SampleOrder:
    """`n` samples of a prompt, as the ranks exchange it."""

    prompt: list[int]
    n: int
    seed: int
    max_tokens: int
    prompt_logprobs: bool


class SnapshotSampler:
    """The embedded engine on this rank, with the weights of one snapshot at a time."""

    def __init__(self, config: TinkerConfig, slot: Slot, tokenizer: Any) -> None:
        self._slot = slot
        self._max_tokens = config.max_tokens_per_micro_batch * config.parallel.cp
        self._engine = LocalModel(
            config.model.path,
            tokenizer,
            device=parallel.device(),
            dtype=getattr(torch, config.model.dtype),
            batch_size=config.sampling_batch_size,
            end_token_ids=(),  # every request names its own
            trust_remote_code=config.model.trust_remote_code,
        )
        self._loaded: str | None = None  # the snapshot that the engine has

    def forget(self, snapshot: str) -> None:
        """Do not take a later snapshot of this name for the one that the engine has."""
        if self._loaded == snapshot:
            self._loaded = None

    def sample(
        self, snapshot: str, orders: Sequence[SampleOrder], sampling: SamplingConfig
    ) -> list[list[Sequence3]]:
        """Sample from the weights in the slot, which are those of `snapshot`. A collective.

        Every rank samples a contiguous share of the orders. Raises Refusal on all ranks.
        """
        if self._loaded != snapshot:
            self._loaded = None
            try:
                self._engine.load(self._slot.model.export(on_host=False), 0)
            except ValueError as error:
                raise Refusal(f"the embedded engine cannot sample from this model: {error}") from None
            self._loaded = snapshot
        rank, world = dist.get_rank(), dist.get_world_size()
        share = orders[rank * len(orders) // world : (rank + 1) * len(orders) // world]
        requests = [Request(tuple(o.prompt), o.n, o.seed, o.max_tokens) for o in share]
        parts: list[list[Sequence3]] = []
        with all_ranks_agree(Refusal, ValueError, FloatingPointError):
            for rollouts in self._engine.generate(requests, sampling):
                parts.append([(r.token_ids, r.logprobs or [], r.finish_reason) for r in rollouts])
        return [row for part in all_gather_msgpack(parts) for row in part]

    def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs of the prompts' tokens under the weights in the slot; NaN for the first. A collective."""
        data = [Datum(p[:-1], {TARGETS: np.asarray(p[1:], np.int64)}) for p in prompts if len(p) > 1]
        logp_r = (
            score(self._slot.model, rows_of(data), self._max_tokens, TEMPERATURE) if data else torch.zeros(0)
        )
        parts = iter(logp_r.split([len(datum.tokens) for datum in data]))
        return [[float("nan"), *(next(parts).tolist() if len(p) > 1 else [])] for p in prompts]


COLDEST = 0.01  # below, only the likeliest token is left


def sampling_of(body: SampleBody, model: ServedModel, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(SampleOrder, SamplingConfig) as the ranks exchange them. Raises Refusal.

    Requests with equal SamplingConfigs are sampled together. `seed`: for a request that has none.
    """
    params, prompt = body.sampling_params, body.prompt.tokens()
    if body.record_stability_info:
        raise Refusal(f"record_stability_info=True: {UNPUBLISHED}")
    if not prompt:
        raise Refusal("the prompt is empty; it needs at least one token")
    model.check_tokens("prompt", prompt)
    room = model.positions - len(prompt)
    longest = room if params.max_tokens is None else params.max_tokens
    if longest > room or longest < 1:
        raise Refusal(
            f"{len(prompt)} prompt tokens + max_tokens={longest} exceed the model's {model.positions} "
            "positions"
        )
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


def _stops(params: SamplingParams, model: ServedModel) -> tuple[list[int], list[str]]:
    """(tokens, texts) that end a sample: the model's own end, too, unless the client wants no stop at all."""
    if params.stop == []:
        return [NEVER], []
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    ids = [stop for stop in stops if isinstance(stop, int)]
    model.check_tokens("sampling_params.stop", ids)
    return sorted({*model.end_token_ids, *ids}), [stop for stop in stops if isinstance(stop, str) and stop]
