"""Prompts in the data's order, sampled ahead of the trainer: in batches, or more than a step trains."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_gvpo.core.collectives import is_first_rank
from megatron_gvpo.groups import Group, Prompt
from megatron_gvpo.servers.request import derived_seed

log = logging.getLogger(__name__)


class Order(Protocol):
    """Chooses the next prompts; `seed_for_next` is the seed of their samples."""

    def take(self, k: int, in_progress: Collection[int] = ()) -> list[int]:
        """The indices of the next `k` prompts. `in_progress`: prompts that the batch may have already."""

    def seed_for_next(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class BatchSampler[Pending](Protocol):
    """Samples the groups of a batch: in a run, `ComposedSampler`.

    All ranks give the same arguments and get the same groups.
    """

    def request(self, prompts: Sequence[Prompt], seed: int) -> Pending:
        """Ask for a group of each prompt; returns at once."""

    def complete(self, batch: Pending, step: int) -> list[Group]:
        """The batch's groups, in prompt order, for training step `step`."""


class PartSampler[Pending](BatchSampler[Pending], Protocol):
    """A sampler that can wait for some of its batches. All ranks get the same result."""

    def wait_for_complete(self, batches: Sequence[Pending], count: int, due: int) -> list[int]:
        """Wait until `count` batches, the first `due` among them, are complete; returns their indices."""

    def joined(self, batches: Sequence[Pending]) -> Pending:
        """Return one pending batch with the prompts of all `batches`."""


@dataclass(frozen=True)
class _BatchRequest:
    """A batch: the indices of its prompts in the data, and the seed of their samples."""

    indices: list[int]
    seed: int


class BatchQueue[Pending]:
    """Batches of the groups of `size` prompts, in the order of the data, requested before they are needed."""

    def __init__(
        self, order: Order, prompts: Sequence[Prompt], sampler: BatchSampler[Pending], size: int
    ) -> None:
        self._order, self._prompts, self._sampler, self._size = order, prompts, sampler, size
        self._pending: deque[tuple[_BatchRequest, Pending]] = deque()
        self._again: deque[_BatchRequest] = deque()  # requests that a resumed run repeats

    def request(self, count: int) -> None:
        """Keep `count` batches in progress or ready."""
        while len(self._pending) < count:
            request = self._again.popleft() if self._again else self._next_request()
            prompts = [self._prompts[i] for i in request.indices]
            self._pending.append((request, self._sampler.request(prompts, request.seed)))

    def _next_request(self) -> _BatchRequest:
        seed = self._order.seed_for_next()
        return _BatchRequest(self._order.take(self._size), seed)

    def next_batch(self, step: int) -> list[Group]:
        """Return the groups of the oldest requested batch, for training step `step`."""
        _, pending = self._pending.popleft()
        return self._sampler.complete(pending, step)

    def state_dict(self) -> dict[str, Any]:
        """The order's state, and the batches that are not complete, which a resumed run requests again.

        The state names their prompts, because an order by weight may choose other prompts later.
        """
        batches = [*(request for request, _ in self._pending), *self._again]
        return self._order.state_dict() | {"batches": [[b.seed, b.indices] for b in batches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (count := len(state.get("in_progress", ()))) and is_first_rank():
            log.warning(
                "%d prompts were in progress in the run that saved this, and are not sampled again: "
                "rollout.over_sampling_prompts is 0 now",
                count,
            )
        self._order.load_state_dict(state)
        self._again = deque(_BatchRequest(indices, seed) for seed, indices in state.get("batches", ()))


@dataclass
class _PendingPrompt[Pending]:
    index: int  # the prompt's index in the data
    seed: int
    pending: Pending
    step: int | None = None  # the training step in which it was requested


class OverSampledQueue[Pending]:
    """Partial rollouts: up to `extra` prompts more than the `size` of a batch are in progress at once.

    A batch has the first `size` prompts whose groups are complete. The others continue in later steps, under
    newer weights, and are trained at most `oldest` steps after the step in which they were requested: a batch
    waits for groups that are as old. `extra` is at most `size`, so they fit.
    """

    def __init__(
        self,
        order: Order,
        prompts: Sequence[Prompt],
        sampler: PartSampler[Pending],
        size: int,
        extra: int,
        oldest: int,
    ) -> None:
        self._order, self._prompts, self._sampler = order, prompts, sampler
        self._size, self._extra, self._oldest = size, extra, oldest
        self._pending: list[_PendingPrompt[Pending]] = []  # in the order of their requests
        # (index, seed) of the prompts that a resumed run requests again.
        self._again: list[tuple[int, int]] = []

    def request(self, count: int) -> None:
        """Keep one batch in progress, and the extra prompts where the run takes further batches."""
        for index, seed in self._again:
            self._ask(index, seed)
        self._again = []
        missing = self._size + min(self._extra, self._size * (count - 1)) - len(self._pending)
        if missing > 0:
            seed, in_progress = self._order.seed_for_next(), {prompt.index for prompt in self._pending}
            for i, index in enumerate(self._order.take(missing, in_progress)):
                self._ask(index, derived_seed(seed, i))

    def _ask(self, index: int, seed: int) -> None:
        pending = self._sampler.request([self._prompts[index]], seed)
        self._pending.append(_PendingPrompt(index, seed, pending))

    def next_batch(self, step: int) -> list[Group]:
        """The first groups that are complete, and all that no later step may train, for step `step`."""
        for prompt in self._pending:
            prompt.step = step if prompt.step is None else prompt.step
        due = sum(prompt.step is not None and step - prompt.step >= self._oldest for prompt in self._pending)
        pending = [prompt.pending for prompt in self._pending]
        chosen = self._sampler.wait_for_complete(pending, self._size, due)
        batch = self._sampler.joined([pending[i] for i in chosen])
        self._pending = [prompt for i, prompt in enumerate(self._pending) if i not in set(chosen)]
        return self._sampler.complete(batch, step)

    def state_dict(self) -> dict[str, Any]:
        """The order's state, and the prompts in progress, which a resumed run requests again."""
        pending = [(prompt.index, prompt.seed) for prompt in self._pending]
        return self._order.state_dict() | {"in_progress": [list(pair) for pair in [*pending, *self._again]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state)
        self._again = [(index, seed) for index, seed in state.get("in_progress", ())]
        for seed, indices in state.get("batches", ()):  # the state of a run without over-sampling
            self._again += [(index, derived_seed(seed, i)) for i, index in enumerate(indices)]
