"""A sampling request in the embedded engine's terms."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megatron_gvpo.settings.sections import GREEDY, SamplingConfig
from megatron_gvpo.tinker.requests import SampleBody, SamplingParams
from megatron_gvpo.tinker.sampler import NEVER
from megatron_gvpo.tinker.served_model import ServedModel
from megatron_gvpo.tinker.wire import Refusal

COLDEST = 0.01  # below, only the likeliest token is left


def sampling_of(body: SampleBody, model: ServedModel, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(SampleOrder, SamplingConfig) as the ranks exchange them. Raises Refusal.

    Requests with equal SamplingConfigs are sampled together. `seed`: for a request that has none.
    """
    params, prompt = body.sampling_params, body.prompt.tokens()
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
