"""A policy without Megatron, and an engine that samples from it, for runs that take hundredths of a second.

Only the output layer trains. The hidden state of a position is fixed: a decaying sum over the tokens before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megatron_gvpo.algorithms.base import TEACHER
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.kernels.divergence import Divergence
from megatron_gvpo.kernels.linear_divergence import TeacherLogits, linear_divergence
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron.loss_pass import KnownWeights, LossInForward, UpdateResult
from megatron_gvpo.megatron.optimizer import Update
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.megatron.scorer import temperature_of
from megatron_gvpo.sampling.draws import Draws
from megatron_gvpo.sampling.embedded import QueuedPrompts, generate_groups
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import BatchTotals, TrainBatch

MODEL = {"vocabulary": 0, "end": 0}  # the run's number of tokens, and the token that ends a response
WIDTH, FADING, ENDING = 8, 0.9, 3.0  # the last is the end token's bias: most responses end
STEP = 1.0  # the length of an update, so that ratios leave the bounds at which losses clip


@cache
def _tables(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, and the output weights with which the policy and the teacher begin."""
    generator = torch.Generator().manual_seed(0)
    scales = (1.0, 0.4, 0.4)
    parts = [scale * torch.randn(vocabulary, WIDTH, generator=generator) for scale in scales]
    return parts[0], parts[1], parts[2]


@cache
def _states(vocabulary: int, ids: tuple[int, ...]) -> Tensor:
    """The state after each token, [t, h]."""
    position = torch.arange(len(ids))
    fading = (FADING ** (position[:, None] - position).clamp(min=0).double()).float().tril()
    return fading @ _tables(vocabulary)[0][list(ids)]


def logits(state_rh: Tensor, weight_vh: Tensor) -> Tensor:
    bias = torch.zeros(len(weight_vh))
    bias[MODEL["end"]] = ENDING
    return state_rh @ weight_vh.T + bias


class SmallPolicy:
    """Stands for `megatron.policy.Policy`: the methods that the trainer calls."""

    data_parallel_ranks = 1

    def __init__(self, config: Config, vocabulary: int) -> None:
        algorithm = config.algorithm
        self.vocabulary = vocabulary
        self._temperature = temperature_of(algorithm, config.rollout)
        self._loss = algorithm.loss.sized(config.rollout.max_tokens)
        self._options, self._scale = algorithm.kept_reference, config.optimizer.lr
        _, weight, self._teacher_vh = _tables(vocabulary)
        self.weight_vh = weight.clone()
        self._reference_vh = weight.clone()
        self.critic = None if algorithm.critic is None else SmallCritic(self, algorithm.critic)

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls(config, MODEL["vocabulary"])

    def states(self, rows: TrainBatch) -> Tensor:
        """The states that predict the responses' tokens, [r, h]."""
        parts = [torch.zeros(0, WIDTH)]
        for row in range(len(rows)):
            own: dict[int, Tensor] = {}
            for segment in rows.segments(row):
                state_th = _states(self.vocabulary, tuple(segment.ids))
                for first, index, count in segment.own:
                    own[index] = state_th[first - 1 : first - 1 + count]
            parts += [own[index] for index in sorted(own)]
        return torch.cat(parts)

    def _logp(self, rows: TrainBatch, weight_vh: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens [r], and of the whole vocabulary [r, v]."""
        z_rv = logits(self.states(rows), weight_vh) / self._temperature
        if rows.support is not None:
            z_rv = z_rv.masked_fill(~_members(rows, self.vocabulary), -torch.inf)
        logp_rv = torch.log_softmax(z_rv, -1)
        label_r = torch.tensor([t for ids in rows.response_ids for t in ids], dtype=torch.int64)
        return logp_rv.gather(1, label_r[:, None]).squeeze(1), logp_rv

    def score(self, rows: TrainBatch) -> Tensor:
        return self._logp(rows, self.weight_vh)[0]

    def score_reference(self, rows: TrainBatch) -> Tensor:
        return self._logp(rows, self._reference_vh)[0]

    def score_teacher(self, rows: TrainBatch) -> Tensor:
        return self._logp(rows, self._teacher_vh)[0]

    def update(self, rows: TrainBatch, *, at_step_start: bool, **_: bool) -> UpdateResult:
        loss, totals, rows = self._loss, BatchTotals.of(rows), rows.with_group_tokens()
        # The order of work is the policy's own: some losses know their weights before the forward.
        rows = Policy._with_weights_first(self, rows, totals, at_step_start, loss.couples_step)  # type: ignore[arg-type]
        weight_vh = self.weight_vh.clone().requires_grad_()
        logp_r, logp_rv = self._logp(rows, weight_vh)
        entropy_r = -(logp_rv.exp() * logp_rv.clamp(min=-1e4)).sum(-1) if loss.wants_entropy else None
        output = self._with_divergence(rows, weight_vh, LinearLogprob(logp_r, entropy_r), totals)
        loss_pass = (KnownWeights if rows.weight_r is not None else LossInForward)(loss, totals)
        scalar, result = loss_pass(rows, output)
        loss_pass.raise_problem()
        metrics = loss_pass.metrics(rows, logp_r.detach(), [result])
        (gradient,) = torch.autograd.grad(scalar, weight_vh, allow_unused=True)
        gradient = torch.zeros_like(weight_vh) if gradient is None else gradient
        norm = float(gradient.norm())
        self.weight_vh = self.weight_vh - STEP * gradient / (norm + 1e-4)
        head = {name: metrics.pop(name) for name in list(metrics) if name.startswith("head/")}
        weight_r = rows.weight_r if result.weight_r is None else result.weight_r
        update = Update(norm, self._scale, False)
        return UpdateResult(update, metrics, logp_r.detach(), head, {}, weight_r)

    def _with_divergence(
        self, rows: TrainBatch, weight_vh: Tensor, output: LinearLogprob, totals: BatchTotals
    ) -> LinearLogprob:
        options = self._loss.divergence
        if options is None:
            return output
        other_vh = self._teacher_vh if options.reference == TEACHER else self._reference_vh
        hidden_rh, labels = self.states(rows), [t for ids in rows.response_ids for t in ids]
        result = linear_divergence(
            hidden_rh,
            weight_vh,
            TeacherLogits(hidden_rh, other_vh, self.vocabulary),
            torch.tensor(labels, dtype=torch.int64),
            torch.full((len(labels),), options.coef / totals.tokens),
            Divergence(options.name, 0.5 if options.beta is None else options.beta, options.top_k),
            temperature=self._temperature,
        )
        return output._replace(divergence_r=result.divergence_r, divergence=result.surrogate)

    def skip_updates(self, count: int) -> None:
        pass

    def end_step(self) -> None:
        if self._options is not None and (decay := self._options.decay) is not None:
            self._reference_vh = decay * self._reference_vh + (1 - decay) * self.weight_vh


def _members(rows: TrainBatch, vocabulary: int) -> Tensor:
    """True for the tokens of each position's support, bool [r, v]."""
    is_member = torch.ones(rows.offsets[-1], vocabulary, dtype=torch.bool)
    for row, support in enumerate(rows.support or ()):
        if support is None:
            continue
        counts, ids = support.arrays
        ends = np.cumsum(counts)
        for t, (count, end) in enumerate(zip(counts, ends, strict=True)):
            if count:
                is_member[rows.offsets[row] + t] = False
                is_member[rows.offsets[row] + t, ids[end - count : end]] = True
    return is_member


class SmallCritic:
    """Stands for `megatron.critic.Critic`."""

    def __init__(self, policy: SmallPolicy, options: Any) -> None:
        self._policy, self._options = policy, options
        seed = 0 if options.path is None else 1
        self.weight_h = 0.1 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
        self._updates = 0

    def values(self, rows: TrainBatch) -> Tensor:
        return self._policy.states(rows) @ self.weight_h

    def update(self, rows: TrainBatch) -> dict[str, float]:
        weight_h = self.weight_h.clone().requires_grad_()
        value_r = self._policy.states(rows) @ weight_h
        share, metrics = self._options.loss(rows, value_r, BatchTotals.of(rows))
        (gradient,) = torch.autograd.grad(share, weight_h)
        self._updates += 1
        warm = min(self._updates / max(self._options.warmup_steps, 1), 1.0)
        self.weight_h = self.weight_h - 1e4 * self._options.lr * warm * gradient
        return {name: float(value) for name, value in metrics.items()}


class SmallEngine:
    """Stands for the embedded engine: samples token by token from the small policy."""

    shares_gpus = False
    metrics: dict[str, float] = {}  # noqa: RUF012 - never filled

    def __init__(
        self, model: Any, rollout: Any, out: Any, cards: Any, task: Any, policy: SmallPolicy
    ) -> None:
        self._policy, self._ends, self._tokenizer = policy, task.end_token_ids, task.tokenizer
        self._talks = rollout.conversation is not None
        self.version = -1

    def sync(self, version: int) -> None:
        self._weight_vh, self.version = self._policy.weight_vh, version

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> QueuedPrompts:
        return QueuedPrompts(prompts, n, sampling, seed)

    def collect(self, tickets: Sequence[QueuedPrompts], on_wait: Any = None) -> list[Group]:
        return [group for ticket in tickets for group in self._groups(ticket)]

    def _groups(self, ticket: QueuedPrompts) -> list[Group]:
        return generate_groups(ticket, lambda _, requests: self._generate(requests, ticket.sampling))

    def _generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Rollout]]:
        embedding = _tables(self._policy.vocabulary)[0]
        prompts = [r.prompt_ids for r in requests for _ in range(r.n)]
        seeds = [(r.seed, i) for r in requests for i in range(r.n)]
        state = torch.stack([_states(self._policy.vocabulary, tuple(ids))[-1] for ids in prompts])
        draws = Draws(sampling, seeds, sampling.max_tokens, torch.device("cpu"))
        tokens: list[list[int]] = [[] for _ in prompts]
        logps: list[list[float]] = [[] for _ in prompts]
        ends, live = set(sampling.stops(self._ends)), list(range(len(prompts)))
        has_ended = [False] * len(prompts)
        for step in range(sampling.max_tokens):
            drawn, logp = draws.next(logits(state[live], self._weight_vh), torch.tensor(live), step)
            for i, token, value in zip(live, drawn.tolist(), logp.tolist(), strict=True):
                tokens[i].append(token)
                # An engine's log-probs differ from the trainer's, more at some tokens than at others.
                logps[i].append(value + (0.6, -0.6, 0.0, 2.0)[token % 4])
                has_ended[i] = token in ends or any(self._text(tokens[i]).endswith(s) for s in sampling.stop)
            state[live] = FADING * state[live] + embedding[drawn]
            live = [i for i in live if not has_ended[i]]
            if not live:
                break
        supports, rows = iter(draws.supports.result()), iter(range(len(prompts)))
        return [
            [
                self._rollout(r, tokens[i], logps[i], has_ended[i], next(supports))
                for _, i in zip(range(r.n), rows, strict=False)
            ]
            for r in requests
        ]

    def _rollout(
        self, request: Request, tokens: list[int], logps: list[float], has_ended: bool, support: Any
    ) -> Rollout:
        reason = "stop" if has_ended else "length"
        rollout = Rollout(tokens, logps, self._text(tokens), reason, self.version, support=support)
        if sum(tokens) % 5 == 0:  # some repeat the prompt, and with it a skill's name
            rollout.text += self._text(request.prompt_ids)
        if len(tokens) > 2 and sum(tokens) % 3 == 0:  # a prediction, for a member that asks for some
            rollout.text += json.dumps({"pass_rate": 0.4, "length": 5, "notions": [rollout.text[:1]]})
        if self._talks:
            rollout.turns = _turns(tokens)
            rollout.messages = [{"role": "assistant", "content": rollout.text}]
        return rollout

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _turns(tokens: Sequence[int]) -> list[Turn]:
    """Turns of two agents, some of them paid, that follow from the tokens alone."""
    turns = [Turn(0, reward=float(tokens[0] % 2))]
    for begin in range(2, len(tokens), 2):
        agent = ("", "searcher")[(begin // 2) % 2]
        after = -1 if agent else len(turns) - 1
        pay = derived_seed(*tokens[: begin + 1]) % 3 / 2
        turns.append(Turn(begin, after, None, (7, 8), agent, pay))
    return turns
