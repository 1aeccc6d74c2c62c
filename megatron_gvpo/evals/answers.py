"""The policy's answers to lm-eval's prompts, sampled by the run's engine on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import batched
from typing import Any

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.slow_work import slow_work
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.huggingface.end_tokens import StopStrings
from megatron_gvpo.sampling.engine import RolloutEngine
from megatron_gvpo.servers.request import derived_seed
from megatron_gvpo.settings.sections import EvalConfig

AT_ONCE = 64  # prompts of a ticket; progress is reported after each ticket
MOST_STOPS = 32  # stop strings that an engine takes


class Answers:
    """Rank 0 requests answers (`sample`), the others take part (`serve`) until it closes.

    The engine's methods are collectives, and lm-eval runs on rank 0 alone.
    """

    def __init__(self, engine: RolloutEngine[Any], settings: EvalConfig, tokenizer: Any, chat: bool) -> None:
        """`chat`: a chat template writes the prompts.

        In a chat the engine does not stop at lm-eval's strings, which a model may write while it thinks.
        lm-eval's own models with `think_end_token` do not either.
        """
        self._engine, self._settings, self._is_chat = engine, settings, chat
        self._strings = StopStrings(tokenizer)
        self._is_usable = True

    @property
    def n(self) -> int:
        """The number of answers to a prompt."""
        return self._settings.n

    def sample(
        self, name: str, prompts: Sequence[Sequence[int]], until: Sequence[str]
    ) -> list[list[tuple[str, str]]]:
        """`n` answers to each prompt (token ids), each with its finish reason: "stop" or "length".

        An answer ends before the first of the strings `until` after its thinking. Raises RolloutError, on
        all ranks.
        """
        order = {"name": name, "prompts": [list(ids) for ids in prompts], "until": list(until)}
        groups = self._sample(broadcast_msgpack(order))
        return [[_cut(rollout, until) for rollout in group.rollouts] for group in groups]

    def serve(self) -> None:
        """Take part in rank 0's sampling until it closes. Raises the errors of `sample`."""
        while (order := broadcast_msgpack(None)) is not None:
            self._sample(order)

    def close(self) -> None:
        """End the other ranks' `serve`.

        If sampling has failed, `serve` has already ended there with the same error.
        """
        if self._is_usable:
            broadcast_msgpack(None)

    def _sample(self, order: dict[str, Any]) -> list[Group]:
        self._is_usable = False
        name, settings = order["name"], self._settings
        own = settings.sampling.stop
        further = [text for text in order["until"] if text not in own and not self._is_chat]
        further = [text for text in further if text not in self._strings.unwritable(further)]
        stop = (*own, *further)[: max(MOST_STOPS, len(own))]
        sampling = settings.sampling.model_copy(update={"stop": stop})
        prompts = [Prompt(f"{name}:{i}", tuple(ids), "") for i, ids in enumerate(order["prompts"], start=1)]
        # Servers that share the trainer's GPUs fall asleep after each ticket.
        size = len(prompts) if self._engine.shares_gpus else AT_ONCE
        with slow_work(f"{name}: sampling") as now:
            tickets = [
                self._engine.submit(some, settings.n, sampling, derived_seed(settings.seed, i))
                for i, some in enumerate(batched(prompts, size))
            ]
            groups = list[Group]()
            for ticket in tickets:
                now(f"{len(groups)} of {len(prompts)} problems")
                groups += self._engine.collect([ticket])
        self._is_usable = True
        return groups


def _cut(rollout: Rollout, until: Sequence[str]) -> tuple[str, str]:
    """The answer before the strings, and its finish reason: a string ends it as an end token does."""
    text = _before(rollout.text, until)
    return text, rollout.finish_reason if text == rollout.text else "stop"


def scored_part(text: str) -> str:
    """The text after the last </think>, which lm-eval's own models score; all of it without one."""
    return text.rpartition("</think>")[2]


def _before(text: str, until: Sequence[str]) -> str:
    """The text before the first of the strings after its thinking, as lm-eval's own models cut it."""
    begin = len(text) - len(scored_part(text))
    return text[: min((at for string in until if (at := text.find(string, begin)) >= 0), default=len(text))]
