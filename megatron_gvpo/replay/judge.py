"""The judge between engine and trainer: transformers in float64 on exported weights, under each suspicion.

A suspicion is a way in which an engine can be wrong: it says what the log-probs would then be. The one that
reproduces the engine's log-probs is the cause.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.verify.reference import Exact, load

PRECISIONS = ("float32", "bfloat16", "float8")


class Suspicion(NamedTuple):
    """The log-probs, fp64 [tokens], that a response would have if the cause were this one."""

    cause: str
    detail: str
    logp: Tensor


class ExactJudge:
    """A model with the weights of one step, in float64."""

    def __init__(self, directory: Path, version: int) -> None:
        self.version = version
        self.model = load(directory)

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int], model: Any = None) -> Tensor:
        """The logits before each token of the response, [tokens, vocabulary], by this model or a copy."""
        with Exact():
            output = (model or self.model)(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False)
        return output.logits[0, len(prompt) - 1 : -1].double()

    @torch.no_grad()
    def logits_after(self, earlier: ExactJudge, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        """The same where the prompt's keys and values, without its last token's, are of earlier weights."""
        cache = DynamicCache()
        with Exact():
            if len(prompt) > 1:
                earlier.model(input_ids=torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True)
            ids = torch.tensor([[prompt[-1], *response[:-1]]])
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return output.logits[0].double()

    @torch.no_grad()
    def rounded(self, precision: str, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        """The logits of the same weights in another precision; its rounding is a measure of what is usual."""
        model = self._copies.get(precision)
        if model is None:
            model = copy.deepcopy(self.model)
            if precision == "float8":
                for name, weight in model.named_parameters():
                    if weight.dim() == 2 and "embed" not in name:
                        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
                        weight.copy_((weight / scale).to(torch.float8_e4m3fn).double() * scale)
            model = model.to(torch.float32 if precision == "float32" else torch.bfloat16)
            self._copies[precision] = model
        output = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False)
        return output.logits[0, len(prompt) - 1 : -1].double()

    @property
    def _copies(self) -> dict[str, Any]:
        copies: dict[str, Any] = self.__dict__.setdefault("_by_precision", {})
        return copies


def logp_of(logits: Tensor, response: Sequence[int], temperature: float) -> Tensor:
    """The log-probs [tokens] of the response's tokens."""
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(response)[:, None])[:, 0]


def supported(
    logits: Tensor, response: Sequence[int], sampling: Mapping[str, Any], temperature: float
) -> Tensor:
    """The log-probs over the tokens that `top_k`, `top_p` and `min_p` keep; -inf for one that they do not."""
    logp = torch.log_softmax(logits / temperature, -1)
    falling, order = logp.sort(-1, descending=True)
    p = falling.exp()
    is_kept = torch.ones_like(p, dtype=torch.bool)
    if (top_k := sampling.get("top_k") or 0) > 0:
        is_kept[:, top_k:] = False
    if (top_p := sampling.get("top_p") or 1.0) < 1:
        is_kept &= p.cumsum(-1) - p < top_p
    if (min_p := sampling.get("min_p") or 0.0) > 0:
        is_kept &= p >= min_p * p[:, :1]
    is_kept[:, 0] = True
    falling = falling.masked_fill(~is_kept, -torch.inf)
    falling = falling - falling.logsumexp(-1, keepdim=True)
    kept_logp = torch.empty_like(logp).scatter(1, order, falling)
    return kept_logp.gather(1, torch.tensor(response)[:, None])[:, 0]


def suspicions(
    judges: Sequence[ExactJudge],
    prompt: Sequence[int],
    response: Sequence[int],
    sampling: SamplingConfig,
    recommended: Mapping[str, Any],
) -> Iterator[Suspicion]:
    """Each cause that a response's log-probs can have. `judges`: of the sampling weights, then earlier ones.

    `recommended`: the sampling that the model's generation_config.json asks for, which servers may follow.
    """
    judge, *earlier = judges
    temperature = sampling.temperature
    for other in earlier:
        stale = logp_of(other.logits(prompt, response), response, temperature)
        yield Suspicion("stale weights", f"those of step {other.version}", stale)
    for other in earlier:
        cached = logp_of(judge.logits_after(other, prompt, response), response, temperature)
        yield Suspicion("stale cache", f"the prompt's keys and values are of step {other.version}", cached)
    logits = judge.logits(prompt, response)
    limits = {name: recommended[name] for name in ("top_p", "top_k", "min_p") if recommended.get(name)}
    limits = {name: value for name, value in limits.items() if value not in (-1, 1.0)}
    if limits:
        listed = ", ".join(f"{name}={value:g}" for name, value in limits.items())
        limited = supported(logits, response, limits, temperature)
        yield Suspicion("truncated support", f"{listed} of generation_config.json", limited)
    for other_temperature in {1.0, float(recommended.get("temperature") or 1.0)} - {temperature}:
        warmer = logp_of(logits, response, other_temperature)
        yield Suspicion("temperature", f"{other_temperature:g} in place of {temperature:g}", warmer)
    for detail, tokens in (
        ("without the prompt's first token", prompt[1:]),
        ("with the prompt's first token twice", [prompt[0], *prompt]),
        ("without the prompt's last token", prompt[:-1]),
    ):
        if tokens:
            yield Suspicion("tokens", detail, logp_of(judge.logits(tokens, response), response, temperature))
