"""A sequence-classification model on servers: its logit for a conversation is the reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import batched
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.core.plain_values import LARGEST, cut, finite_number
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.rewards.judge import Messages
from megatron_gvpo.servers.http import Http, ServerRefused
from megatron_gvpo.servers.model_requests import Misfit, Refused, Servers, Unanswered, Verdict, check_model
from megatron_gvpo.settings.reward_servers import MODEL, RewardModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE: Messages = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
# Largest difference of the probe's score between servers, divided by 1 + its size.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


class RewardModel:
    """Scores conversations. `tokenizer` and `card` are the reward model's own."""

    def __init__(
        self, served: RewardModelConfig, key: str, tokenizer: PreTrainedTokenizerBase, card: ModelCard
    ) -> None:
        self._served, self._key, self._tokenizer = served, key, tokenizer
        if not tokenizer.chat_template:
            raise ConfigError(f"{key}.path={served.path}: its tokenizer has no chat template")
        context_length = served.servers.context_length or card.get("max_position_embeddings") or math.inf
        # SGLang reserves a position for a new token.
        self._longest = context_length - (served.servers.engine == "sglang")
        self._scored_probe: float | None = None
        self.probe_ids = self.ids(PROBE)

    def ids(self, messages: Messages) -> list[int]:
        """The conversation's token ids, as the model's chat template writes it. Raises DataError."""
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template is a program, and may fail in any way
            problem = " ".join(str(error).split())
            raise DataError(f"{self._key}: the chat template refuses the conversation: {problem}") from None
        ids: list[int] = self._tokenizer([text], add_special_tokens=False)["input_ids"][0]
        return ids

    async def check(self, http: Http, timeout: float) -> None:
        """Compare a server's files with `path`, and its score of a probe with the first server's.

        Raises Misfit.
        """
        served = self._served
        await http.get("/health", timeout=timeout)
        await check_model(http, served.servers.engine, served.path, f"{self._key}.path", timeout)
        try:
            [score] = await self._scores(http, [self.probe_ids], timeout)
        except ServerRefused as error:
            if not error.is_request:
                raise
            problem = f"it does not score as {served.servers.engine} scores: {error}"
            raise Misfit(f"{self._key}: {problem}") from None
        if self._scored_probe is None:
            self._scored_probe = score
        if abs(score - self._scored_probe) > TOLERANCE[served.dtype] * (1 + abs(self._scored_probe)):
            raise Misfit(
                f"{self._key}: server {http.url} gives a fixed text the score {score:g}, and it had "
                f"{self._scored_probe:g} before: it serves another model"
            )

    @property
    def metrics(self) -> dict[str, float]:
        return {} if self._scored_probe is None else {"probe": self._scored_probe}

    async def verdicts(self, servers: Servers, requests: Sequence[tuple[str, Messages]]) -> list[Verdict]:
        """A verdict on each (prompt id, conversation). Raises Misfit."""
        verdicts: dict[int, Verdict] = {}
        tokens: list[tuple[int, list[int]]] = []
        for number, (prompt, messages) in enumerate(requests):
            try:
                ids = self.ids(messages)
            except DataError as error:
                verdicts[number] = Verdict(None, str(error))
                continue
            if len(ids) <= self._longest:
                tokens.append((number, ids))
                continue
            problem = (
                f"{self._key}: prompt {prompt}: with its response it has {len(ids)} tokens, and the reward "
                f"model takes {self._longest}"
            )
            if self._served.too_long == "error":
                raise Misfit(
                    f"{problem}: lower rollout.max_tokens, or let such responses leave their groups with "
                    "too_long=drop"
                )
            verdicts[number] = Verdict(None, problem)
        batches = list(batched(tokens, self._served.batch_size))
        answers = await asyncio.gather(*(self._batch(servers, [ids for _, ids in b]) for b in batches))
        for batch, scored in zip(batches, answers, strict=True):
            verdicts |= {number: verdict for (number, _), verdict in zip(batch, scored, strict=True)}
        return [verdicts[number] for number in range(len(requests))]

    async def _batch(self, servers: Servers, batch: list[list[int]]) -> list[Verdict]:
        try:
            scores = await servers.ask(lambda http: self._scores(http, batch, servers.timeout))
        except Refused as error:
            if len(batch) == 1:
                return [Verdict(None, str(error))]
            alone = await asyncio.gather(*(self._batch(servers, [ids]) for ids in batch))
            return [verdict for [verdict] in alone]
        except Unanswered as error:
            return [Verdict(None, str(error))] * len(batch)
        return [Verdict(score) for score in scores]

    async def _scores(self, http: Http, batch: Sequence[list[int]], timeout: float) -> list[float]:
        """The logit of each text. Raises ServerGone, ServerRefused, Misfit."""
        if self._served.servers.engine == "sglang":
            answer = await http.post("/classify", {"input_ids": list(batch)}, timeout=timeout)
            read = _read_sglang
        else:
            model = MODEL if not self._served.servers.urls else None
            body = {"model": model, "input": list(batch), "use_activation": False}
            answer = await http.post("/classify", body, timeout=timeout)
            read = _read_vllm
        try:
            scores, counted = read(answer)
            one_each = len(scores) == len(batch) and all(len(score) == 1 for score in scores)
            checked = [finite_number(score, LARGEST) for [score] in scores] if one_each else []
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefused(f"{http.url}/classify: its answer has no scores: {error!r}", 502) from None
        numbers = [number for number in checked if number is not None]
        if len(numbers) < len(batch):
            raise Misfit(
                f"{self._key}: {http.url}/classify does not give each text one finite number of at most "
                f"{LARGEST:.2g}: {cut(str(scores))}"
            )
        if counted != sum(map(len, batch)):
            raise Misfit(
                f"{self._key}: {http.url}/classify has read {counted} tokens, and {sum(map(len, batch))} "
                "were sent: the server cuts off what is too long for it"
            )
        return numbers


def _read_sglang(answer: Any) -> tuple[list[list[float]], int]:
    """Returns (scores of each text, tokens that the server has read)."""
    return [one["embedding"] for one in answer], sum(one["meta_info"]["prompt_tokens"] for one in answer)


def _read_vllm(answer: Any) -> tuple[list[list[float]], int]:
    ordered = sorted(answer["data"], key=lambda one: one["index"])
    if (indices := [one["index"] for one in ordered]) != [*range(len(ordered))]:
        raise ValueError(f"its scores have the indices {cut(str(indices))}, and each text has one")
    return [one["probs"] for one in ordered], answer["usage"]["prompt_tokens"]
