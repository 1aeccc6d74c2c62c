"""Samples from clients' models on SGLang or vLLM servers, which get the weights of one snapshot at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.end_tokens import end_token_ids
from megatron_gvpo.megatron.scorer import ScoredModel
from megatron_gvpo.sampling.served import ServedEngine
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.tinker import TinkerConfig
from megatron_gvpo.tinker.gradients import rows_of
from megatron_gvpo.tinker.losses import TARGETS
from megatron_gvpo.tinker.sampler import SampleOrder, Sequence3, SnapshotSampler, sequence_of
from megatron_gvpo.tinker.state import Slot
from megatron_gvpo.tinker.wire import Datum, Refusal

UNAVAILABLE = 503  # the status of a refusal because of a failure of the servers
# The log-probs of this text prove the first pushes: a push that does nothing does not change them.
PROBE = "The quick brown fox jumps over 13 lazy dogs, and each of them asks: what is 6 * 7, and why?"


class ServedSampler(SnapshotSampler):
    """The rollout servers of `rollout`, as a training run has them; another snapshot is pushed first."""

    def __init__(self, config: TinkerConfig, slot: Slot, tokenizer: Any) -> None:
        super().__init__(config, slot)
        run = config.run
        cards = ModelCards(run)
        ends = end_token_ids(run.model.path, cards.policy, tokenizer)
        tokens = tokenizer.encode(PROBE, add_special_tokens=False)
        task = Task(tokenizer, ends, [Prompt("probe", tuple(tokens), PROBE)], [])
        self._policy = ScoredModel(slot.model, self._max_tokens)
        self._servers = ServedEngine(run.model, run.rollout, run.output_dir, cards, task, self._policy)
        self._version = -1  # the version of the servers' weights

    def __enter__(self) -> Self:
        """Start or find the servers. Raises ConfigError, RolloutError."""
        self._servers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._servers.__exit__(*error)

    @property
    def positions(self) -> int | None:
        """The shortest context of the servers; None on other ranks than 0."""
        return None if self._servers.servers is None else self._servers.servers.context_length

    def _load(self) -> None:
        self._version += 1
        try:
            self._servers.sync(self._version)
        except RolloutError as error:
            raise Refusal(f"the rollout servers did not get the weights: {error}", UNAVAILABLE) from None

    def _generate(self, orders: Sequence[SampleOrder], sampling: SamplingConfig) -> list[list[Sequence3]]:
        prompts = [Prompt(f"order {i}", tuple(order.prompt), "") for i, order in enumerate(orders)]
        ticket = self._servers.submit_requests(prompts, [order.request for order in orders], sampling)
        try:
            groups = self._servers.collect([ticket])
        except RolloutError as error:
            raise Refusal(f"the rollout servers did not sample: {error}", UNAVAILABLE) from None
        rows = [[sequence_of(rollout) for rollout in group.rollouts] for group in groups]
        return self._with_own_logprobs(orders, rows, sampling.temperature) if sampling.truncates else rows

    def _with_own_logprobs(
        self, orders: Sequence[SampleOrder], rows: list[list[Sequence3]], temperature: float
    ) -> list[list[Sequence3]]:
        """The samples with the Megatron model's log-probs.

        vLLM's are over the tokens that top_p and top_k left.
        """
        data = [
            Datum(
                [*order.prompt, *token_ids[:-1]],
                {TARGETS: np.asarray([*order.prompt[1:], *token_ids], np.int64)},
            )
            for order, row in zip(orders, rows, strict=True)
            for token_ids, _, _ in row
        ]
        scored = self._policy.score(rows_of(data), temperature)
        parts = iter(scored.split([len(datum.tokens) for datum in data]))
        return [[(ids, next(parts)[-len(ids) :].tolist(), reason) for ids, _, reason in row] for row in rows]
