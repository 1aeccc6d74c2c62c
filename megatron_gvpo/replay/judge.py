"""The judge between engine and trainer: transformers in float64, with the weights that the run exported.

A suspicion is a fault that an engine or a trainer may have, with the log-probs that it would then compute.
The suspicion whose log-probs equal those of the engine or trainer is the cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from megatron_gvpo.groups import Routing
from megatron_gvpo.replay.kept_tokens import kept_tokens, limits_of, listed, recorded_tokens
from megatron_gvpo.replay.routing import RouterModules, Rule, by_count, exchanged, recorded_experts, through
from megatron_gvpo.replay.templates import OtherTemplates
from megatron_gvpo.settings.config import Config
from megatron_gvpo.supports import Support
from megatron_gvpo.verify.reference import Exact, load

PRECISIONS = ("float32", "bfloat16", "float8")
_TRIES = 128  # the most exchanges of experts that are tried for a response
_TOKENS = 256  # the most tokens whose scores of the whole vocabulary are in memory in float64
_NOT_RECORDED = "and not over the recorded kept tokens"


class Suspicion(NamedTuple):
    """A possible cause, and the log-probs, fp64 [tokens], that a response would have because of it."""

    cause: str
    detail: str
    logp: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """A response that the judge computes, with the kept tokens and experts that the run recorded, if any.

    A judge remembers the log-probs of each case, so cases are equal only to themselves.
    """

    prompt: list[int]
    ids: list[int]
    temperature: float
    support: Support | None = None
    routing: Routing | None = None

    @property
    def rule(self) -> Rule | None:
        """Return the rule that chooses the recorded experts; None if the routers choose."""
        return self.routing and through(recorded_experts(self.routing))

    def logp(self, logits_tv: Tensor, temperature: float | None = None) -> Tensor:
        """Return the log-probs [tokens] of the response, over the tokens that each was sampled from."""
        kept_tv = self.support and recorded_tokens(self.support, logits_tv.shape[1])
        return logp_over(logits_tv, self.ids, temperature or self.temperature, kept_tv)


class ExactJudge:
    """A model with the weights of one step, in float64; it is loaded when it is needed."""

    def __init__(self, directory: Path, version: int) -> None:
        self.version = version
        self._directory = directory
        self._logp: dict[Case, Tensor] = {}
        self._logp_after: dict[tuple[int, Case], Tensor] = {}

    @cached_property
    def model(self) -> Any:
        return load(self._directory)

    @cached_property
    def routers(self) -> RouterModules:
        return RouterModules.of(self.model)

    def logp(self, case: Case) -> Tensor:
        """Return the log-probs [tokens] of the response, which are computed once."""
        if case not in self._logp:
            self._logp[case] = case.logp(self.logits(case))
        return self._logp[case]

    def logp_after(self, earlier: ExactJudge, case: Case) -> Tensor:
        """Return `logp` after a prompt that earlier weights have read; it is computed once."""
        key = (earlier.version, case)
        if key not in self._logp_after:
            self._logp_after[key] = case.logp(self._logits_after(earlier, case))
        return self._logp_after[key]

    def release(self) -> None:
        """Free the model, and keep its log-probs."""
        for name in ("model", "routers"):
            self.__dict__.pop(name, None)

    def logits(self, case: Case) -> Tensor:
        """Return the logits of each token of the response, [tokens, vocabulary], with the case's experts."""
        return self.logits_by(case.rule, case)

    def logits_by(self, rule: Rule | None, case: Case) -> Tensor:
        """Return the logits of each token of the response, with the experts that `rule` chooses."""
        with Exact(), self.routers.choosing(rule):
            return response_logits(self.model, case)

    @torch.no_grad()
    def _logits_after(self, earlier: ExactJudge, case: Case) -> Tensor:
        """Return the logits after a prompt that earlier weights have read, except for its last token."""
        cache, prompt = DynamicCache(), case.prompt
        experts = case.routing and recorded_experts(case.routing)
        first, second = (
            None if experts is None else through(experts, begin) for begin in (0, len(prompt) - 1)
        )
        with Exact():
            if len(prompt) > 1:
                ids = torch.tensor([prompt[:-1]])
                with earlier.routers.choosing(first):
                    earlier.model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids = torch.tensor([[prompt[-1], *case.ids[:-1]]])
            with self.routers.choosing(second):
                output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        logits: Tensor = output.logits[0]
        return logits

    @torch.no_grad()
    def rounded(self, precision: str) -> Any:
        """Return a model of the same weights in another precision, whose log-probs show its rounding."""
        model = load(self._directory, torch.float32 if precision == "float32" else torch.bfloat16)
        if precision == "float8":
            for name, weight in model.named_parameters():
                if weight.dim() == 2 and "embed" not in name:
                    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
                    weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
        return model

    def own_choice(self, case: Case) -> Rule | None:
        """Return the rule that repeats the experts which this judge chooses; None in a dense model."""
        if not self.routers.modules or case.routing is not None:
            return case.rule
        chosen: dict[int, Tensor] = {}

        def note(layer: int, scores: Tensor, k: int) -> Tensor:
            chosen[layer] = scores.topk(k).indices
            return chosen[layer]

        self.logits_by(note, case)
        return lambda layer, scores, k: chosen[layer]


@torch.no_grad()
def response_logits(model: Any, case: Case) -> Tensor:
    """Return the model's logits of each token of the response, [tokens, vocabulary], in its own dtype."""
    ids = torch.tensor([[*case.prompt, *case.ids]])
    output = model(input_ids=ids, use_cache=False, logits_to_keep=len(case.ids) + 1)
    logits: Tensor = output.logits[0, -len(case.ids) - 1 : -1]
    return logits


def logp_over(
    logits_tv: Tensor, response: Sequence[int], temperature: float, kept_tv: Tensor | None
) -> Tensor:
    """Return the log-probs, fp64 [tokens], of the response's tokens over `kept_tv`; None: over all."""
    parts = []
    for begin in range(0, len(response), _TOKENS):
        part = slice(begin, begin + _TOKENS)
        scores_tv = logits_tv[part].double() / temperature
        own = scores_tv.gather(1, torch.tensor(response[part])[:, None])[:, 0]
        if kept_tv is not None:
            scores_tv = scores_tv.masked_fill(~kept_tv[part], -torch.inf)
        parts.append(own - scores_tv.logsumexp(-1))
    return torch.cat(parts)


@dataclass(frozen=True)
class Sampling:
    """The sampling options of a run, and those of generation_config.json, which a server may use instead."""

    temperature: float
    limits: Mapping[str, float]  # top_p, top_k, min_p below their neutral values
    in_turn: bool  # true if each limit applies to the tokens that the one before left
    recommended: Mapping[str, Any]

    @staticmethod
    def of(config: Config) -> Sampling:
        rollout, file = config.rollout, Path(config.model.path) / "generation_config.json"
        try:
            values = json.loads(file.read_text())
        except (OSError, ValueError):
            values = {}
        recommended = values if isinstance(values, dict) else {}
        limits = limits_of(rollout.model_dump()) if rollout.wants_support else {}
        return Sampling(rollout.temperature, limits, rollout.engine != "sglang", recommended)


def engine_suspicions(judges: Sequence[ExactJudge], case: Case, sampling: Sampling) -> Iterator[Suspicion]:
    """Yield the engine's suspicions. `judges`: with the weights that sampled, then with earlier ones."""
    judge, *earlier = judges
    yield from stale_suspicions(earlier, case)
    for other in earlier:
        cached = judge.logp_after(other, case)
        yield Suspicion("stale cache", f"the prompt's keys and values are of step {other.version}", cached)
    logits = judge.logits(case)
    yield from _engine_supports(logits, case, sampling)
    yield from routing_suspicions(judge, case)
    yield from temperature_suspicions(
        logits, case, {1.0, float(sampling.recommended.get("temperature") or 1)}
    )
    prompt = case.prompt
    for detail, tokens in (
        ("without the prompt's first token", prompt[1:]),
        ("with the prompt's first token twice", [prompt[0], *prompt]),
        ("without the prompt's last token", prompt[:-1]),
    ):
        if tokens:
            changed = replace(case, prompt=tokens, routing=None)
            yield Suspicion("tokens", detail, case.logp(judge.logits(changed)))


def template_suspicions(judge: ExactJudge, case: Case, templates: OtherTemplates) -> Iterator[Suspicion]:
    """Yield the suspicions that the engine rendered the prompt by another chat template."""
    for detail, tokens in templates.prompts(case.prompt):
        yield Suspicion(
            "template", detail, case.logp(judge.logits(replace(case, prompt=tokens, routing=None)))
        )


def trainer_suspicions(judges: Sequence[ExactJudge], case: Case) -> Iterator[Suspicion]:
    """Yield the trainer's suspicions. `judges`: with the weights of the step, then with earlier ones."""
    judge, *earlier = judges
    yield from stale_suspicions(earlier, case)
    logits = judge.logits(case)
    yield from routing_suspicions(judge, case)
    yield from temperature_suspicions(logits, case, {1.0})
    if case.support is not None:
        untruncated = logp_over(logits, case.ids, case.temperature, None)
        yield Suspicion("truncated support", f"over the whole vocabulary, {_NOT_RECORDED}", untruncated)


def stale_suspicions(earlier: Sequence[ExactJudge], case: Case) -> Iterator[Suspicion]:
    for other in earlier:
        yield Suspicion("stale weights", f"those of step {other.version}", other.logp(case))


def routing_suspicions(judge: ExactJudge, case: Case) -> Iterator[Suspicion]:
    """Yield the suspicions that tokens went through other experts than the case's."""
    if not judge.routers.modules:
        return
    rules: list[tuple[str, Rule | None]] = []
    if case.routing is not None:
        experts = recorded_experts(case.routing)
        rules = [
            ("those that the routers choose by themselves, and not the recorded experts", None),
            ("the recorded experts of the token before", through(experts.roll(1, 0))),
            ("the recorded experts of the token after", through(experts.roll(-1, 0))),
            ("the recorded experts of the layer before", through(experts.roll(1, 1))),
        ]
    else:
        rules = [("one expert fewer a token", by_count(-1)), ("one expert more a token", by_count(1))]
        if judge.routers.per_token == 1:
            rules = rules[1:]
        if judge.routers.has_bias:
            with judge.routers.without_bias():
                logits = judge.logits_by(None, case)
            yield Suspicion("routing", "a choice without the router's bias", case.logp(logits))
    for detail, rule in rules:
        yield Suspicion("routing", detail, case.logp(judge.logits_by(rule, case)))


def exchanged_experts(judge: ExactJudge, case: Case, logp: Tensor, limit: float) -> Suspicion | None:
    """Search for single tokens whose last chosen expert is exchanged for the next best one in a program.

    `logp`: the program's log-probs, which the result reproduces within `limit` nats. A token's experts change
    nothing before the token, so each round of the search looks at the first token that still differs. Returns
    None if the exchanges do not explain the log-probs.
    """
    positions: list[tuple[int, int]] = []
    own, tries = judge.logp(case), 0
    while (is_off := (logp - own).abs() > limit).any():
        at = int(is_off.nonzero()[0, 0])
        last = len(case.prompt) - 1 + at
        best: tuple[float, tuple[int, int], Tensor] | None = None
        for token in [last] if at else range(last, -1, -1):
            for layer in judge.routers.modules:
                if (token, layer) in positions or tries == _TRIES:
                    continue
                tries += 1
                other = case.logp(judge.logits_by(exchanged([*positions, (token, layer)]), case))
                difference = float((logp - other)[at].abs())
                if best is None or difference < best[0]:
                    best = difference, (token, layer), other
        if best is None or best[0] > float((logp - own)[at].abs()) / 2:
            return None
        own = best[2]
        positions.append(best[1])
    layers = ", ".join(map(str, sorted({layer for _, layer in positions})))
    return Suspicion(
        "routing", f"the next expert for the last chosen, at single tokens of layer {layers}", own
    )


def temperature_suspicions(logits: Tensor, case: Case, others: set[float]) -> Iterator[Suspicion]:
    for other in sorted(others - {case.temperature}):
        detail = f"{other:g} in place of {case.temperature:g}"
        yield Suspicion("temperature", detail, case.logp(logits, other))


def _engine_supports(logits: Tensor, case: Case, sampling: Sampling) -> Iterator[Suspicion]:
    """Yield the suspicions that log-probs were computed over other tokens than the recorded ones."""
    logp = torch.log_softmax(logits / case.temperature, -1)
    sets: list[tuple[str, Tensor | None]] = []
    if case.support is not None:
        sets.append((f"over the whole vocabulary, {_NOT_RECORDED}", None))
    if sampling.limits:
        recorded = _NOT_RECORDED if case.support is not None else "and no kept tokens are recorded"
        own = kept_tokens(logp, sampling.limits, sampling.in_turn)
        sets.append((f"over the tokens that {listed(sampling.limits)} keeps, {recorded}", own))
    if recommended := limits_of(sampling.recommended):
        of_file = kept_tokens(logp, recommended, sampling.in_turn)
        sets.append((f"over the tokens that {listed(recommended)} of generation_config.json keeps", of_file))
    for detail, kept_tv in sets:
        other = logp_over(logits, case.ids, case.temperature, kept_tv)
        yield Suspicion("truncated support", detail, other)
