"""The judge between engine and trainer: transformers in float64 on exported weights, under each suspicion.

A suspicion is a way in which an engine can be wrong: it says what the log-probs would then be. The one that
reproduces the engine's log-probs is the cause.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_TRIES = 128  # exchanged experts that are tried for a response
_NOT_RECORDED = "and not over the recorded kept tokens"


class Suspicion(NamedTuple):
    """The log-probs, fp64 [tokens], that a response would have if the cause were this one."""

    cause: str
    detail: str
    logp: Tensor


@dataclass(frozen=True)
class Case:
    """A response as the judge computes it: with the kept tokens and experts that the run recorded, if any."""

    prompt: list[int]
    ids: list[int]
    temperature: float
    support: Support | None = None
    routing: Routing | None = None

    @property
    def rule(self) -> Rule | None:
        """The choice of the recorded experts; None: the routers choose."""
        return self.routing and through(recorded_experts(self.routing))

    def logp(self, logits_tv: Tensor, temperature: float | None = None) -> Tensor:
        """The log-probs [tokens] of the response's tokens over what they were sampled from."""
        kept_tv = self.support and recorded_tokens(self.support, logits_tv.shape[1])
        return logp_over(logits_tv, self.ids, temperature or self.temperature, kept_tv)


class ExactJudge:
    """A model with the weights of one step, in float64."""

    def __init__(self, directory: Path, version: int) -> None:
        self.version = version
        self.model = load(directory)
        self.routers = RouterModules.of(self.model)

    def logits(self, case: Case) -> Tensor:
        """The logits before each token of the response, [tokens, vocabulary], with the case's experts."""
        return self.logits_by(case.rule, case)

    @torch.no_grad()
    def logits_by(self, rule: Rule | None, case: Case) -> Tensor:
        """The same with the experts that `rule` chooses."""
        with Exact(), self.routers.choosing(rule):
            output = self.model(input_ids=torch.tensor([[*case.prompt, *case.ids]]), use_cache=False)
        return output.logits[0, len(case.prompt) - 1 : -1].double()

    @torch.no_grad()
    def logits_after(self, earlier: ExactJudge, case: Case) -> Tensor:
        """The same where the prompt's keys and values, without its last token's, are of earlier weights."""
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
        return output.logits[0].double()

    @torch.no_grad()
    def rounded(self, precision: str, rule: Rule | None, case: Case) -> Tensor:
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
        with RouterModules.of(model).choosing(rule):
            output = model(input_ids=torch.tensor([[*case.prompt, *case.ids]]), use_cache=False)
        return output.logits[0, len(case.prompt) - 1 : -1].double()

    def own_choice(self, case: Case) -> Rule | None:
        """The rule of the experts that this judge sends the case through; None in a dense model."""
        if not self.routers.modules or case.routing is not None:
            return case.rule
        chosen: dict[int, Tensor] = {}

        def note(layer: int, scores: Tensor, k: int) -> Tensor:
            chosen[layer] = scores.topk(k).indices
            return chosen[layer]

        self.logits_by(note, case)
        return lambda layer, scores, k: chosen[layer]

    @property
    def _copies(self) -> dict[str, Any]:
        copies: dict[str, Any] = self.__dict__.setdefault("_by_precision", {})
        return copies


def logp_over(
    logits_tv: Tensor, response: Sequence[int], temperature: float, kept_tv: Tensor | None
) -> Tensor:
    """The log-probs [tokens] of the response's tokens over `kept_tv`; None: over all tokens."""
    scores_tv = logits_tv / temperature
    own = scores_tv.gather(1, torch.tensor(response)[:, None])[:, 0]
    if kept_tv is not None:
        scores_tv = scores_tv.masked_fill(~kept_tv, -torch.inf)
    return own - scores_tv.logsumexp(-1)


@dataclass(frozen=True)
class Sampling:
    """How a run samples, and what generation_config.json recommends, which servers may follow."""

    temperature: float
    limits: Mapping[str, float]  # top_p, top_k, min_p below their neutral values
    in_turn: bool  # the limits apply one after the other
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
    """The engine's log-probs under each cause. `judges`: of the sampling weights, then earlier ones."""
    judge, *earlier = judges
    yield from stale_suspicions(earlier, case)
    for other in earlier:
        cached = case.logp(judge.logits_after(other, case))
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
    """The log-probs after prompts that an engine has rendered by another chat template."""
    for detail, tokens in templates.prompts(case.prompt):
        yield Suspicion(
            "template", detail, case.logp(judge.logits(replace(case, prompt=tokens, routing=None)))
        )


def trainer_suspicions(judges: Sequence[ExactJudge], case: Case) -> Iterator[Suspicion]:
    """The trainer's log-probs under each cause. `judges`: of the present weights, then earlier ones."""
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
        stale = case.logp(other.logits(case))
        yield Suspicion("stale weights", f"those of step {other.version}", stale)


def routing_suspicions(judge: ExactJudge, case: Case) -> Iterator[Suspicion]:
    """The log-probs through other experts than the case's."""
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
    """The search for single tokens whose last chosen expert another program has exchanged for the next one.

    `logp`: of that program, which the result reproduces within `limit` nats. A token's experts change
    nothing before it, so each search begins at the first token that differs; None if it ends without one.
    """
    positions: list[tuple[int, int]] = []
    own, tries = case.logp(judge.logits(case)), 0
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
    """Log-probs over other tokens than the recorded ones."""
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
