"""Batches of prompts in the data's order, sampled ahead of the trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_gvpo.groups import Group, Prompt
from megatron_gvpo.sampling.engine import OnWait


class Order(Protocol):
    """Chooses the next prompts; `seed_for_next` is the seed of their samples."""

    def take(self, k: int) -> list[int]: ...

    def seed_for_next(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BatchSampler(Protocol):
    """Samples the groups of a batch. All ranks give the same arguments and get the same groups."""

    def submit(self, prompts: Sequence[Prompt], seed: int) -> Any:
        """Ask for a group of each prompt; returns a ticket at once."""

    def collect(self, ticket: Any, step: int, on_wait: OnWait = None) -> list[Group]:
        """The ticket's groups, in prompt order, for training step `step`."""


class BatchQueue:
    """Batches of the groups of `size` prompts, in the order of the data, asked for before they are needed."""

    def __init__(self, order: Order, prompts: Sequence[Prompt], sampler: BatchSampler, size: int) -> None:
        self._order, self._prompts, self._sampler, self._size = order, prompts, sampler, size
        self._asked: deque[tuple[dict[str, Any], Any]] = deque()  # the order's state before it, ticket

    def ask(self, count: int) -> None:
        """Keep `count` batches in progress or ready."""
        while len(self._asked) < count:
            before, seed = self._order.state_dict(), self._order.seed_for_next()
            prompts = [self._prompts[i] for i in self._order.take(self._size)]
            self._asked.append((before, self._sampler.submit(prompts, seed)))

    def collect(self, step: int, on_wait: OnWait = None) -> list[Group]:
        """The groups of the oldest batch that was asked for; the engine calls `on_wait` while it waits."""
        return self._sampler.collect(self._asked.popleft()[1], step, on_wait)

    def state_dict(self) -> dict[str, Any]:
        """The order's state before the oldest batch not collected: a resumed run asks for it again."""
        return self._asked[0][0] if self._asked else self._order.state_dict()
