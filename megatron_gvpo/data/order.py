"""The order in which prompts are visited, epoch after epoch, and a run's place in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_gvpo.algorithms.curriculum.tracker import Counts, PromptHistory, Tracker
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.plain_values import cut, finite_number

if TYPE_CHECKING:
    from megatron_gvpo.algorithms.curriculum.prompts import PromptChoice
    from megatron_gvpo.groups import Group, Prompt


class PromptOrder:
    """Endless passes over `count` prompts; each pass has an order of its own, drawn from (seed, epoch).

    The order of an epoch depends on nothing else, so a resumed run needs only (epoch, position).
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if count < 1:
            raise ValueError(f"count={count}: there must be at least one prompt")
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._epoch, self._position, self._order = 0, 0, self._epoch_order(0)

    def take(self, k: int, in_progress: Collection[int] = ()) -> list[int]:
        """The next `k` prompts' indices; they may belong to several epochs, whatever is still in progress."""
        taken: list[int] = []
        while len(taken) < k:
            if self._position == self._count:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order(self._epoch)
            end = min(self._position + k - len(taken), self._count)
            taken += self._order[self._position : end]
            self._position = end
        return taken

    def seed_for_next(self) -> int:
        """A seed (32 bits) for sampling responses to the next prompts; it follows from the position alone."""
        return int(np.random.SeedSequence((self._seed, self._epoch, self._position)).generate_state(1)[0])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError if the state is of a data set of another size.

        After draws by weight (`WeightedOrder`) the first epoch begins.
        """
        _check_count(state, self._count)
        if "draws" not in state:
            self._epoch, self._position = state["epoch"], state["position"]
            self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = np.arange(self._count)
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(order)
        return [int(i) for i in order]


class SuccessTracker:
    """Counts the successes and failures of each prompt's earlier responses, for a Beta posterior."""

    def __init__(self, rule: Tracker) -> None:
        self.rule = rule
        self._counts: dict[str, Counts] = {}

    def known(self, prompt: Prompt, field: str | None = None) -> PromptHistory | None:
        """Counts of a prompt; before its first visit, from the rate in its record's `field`; else None."""
        if (counts := self._counts.get(prompt.id)) is not None:
            success = counts.won / (counts.won + counts.lost)
            return PromptHistory(success, self.rule.posterior(counts), sum(counts))
        stated = prompt.record.get(field) if field else None
        return None if stated is None else PromptHistory(float(stated), float(stated), self.rule.weight)

    def expected_reward(self, prompt: Prompt) -> float:
        """The prior of a prompt's reward."""
        return self.rule.reward(self.rule.posterior(self._counts.get(prompt.id, self.rule.start)))

    def learn(self, groups: Sequence[Group]) -> None:
        """Count the rewards of the policy's own responses."""
        for group in groups:
            rewards = [rollout.reward for rollout in group.rollouts if rollout.source == "policy"]
            if rewards:
                before = self._counts.get(group.prompt.id, self.rule.start)
                self._counts[group.prompt.id] = self.rule.updated(before, rewards)

    def state_dict(self) -> dict[str, Any]:
        return {prompt: list(counts) for prompt, counts in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = {prompt: Counts(*counts) for prompt, counts in state.items()}


class WeightedOrder:
    """Batches of prompts drawn by weight, without repetition in a batch, in place of a `PromptOrder`.

    A draw depends on the seed, its number, the tracker's counts and the prompts that are in progress, and on
    nothing else.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, by: PromptChoice, tracker: SuccessTracker
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._by = by
        self._tracker = tracker
        self._draws = 0
        if (field := by.stated_in) is not None:
            _check_rates(prompts, field)

    def take(self, k: int, in_progress: Collection[int] = ()) -> list[int]:
        """Indices of `k` prompts, none of them `in_progress`.

        Prompts that repeat or are in progress are returned only if there are not enough others.
        """
        taken: list[int] = []
        while len(taken) < k:
            taken += self._draw(min(k - len(taken), len(self._prompts)), frozenset(in_progress))
        return taken

    def _draw(self, k: int, in_progress: Collection[int]) -> list[int]:
        known = [self._tracker.known(prompt, self._by.stated_in) for prompt in self._prompts]
        weight = np.array([self._by.weight(record) for record in known])
        generator = np.random.default_rng((self._seed, self._draws))
        self._draws += 1
        # The k smallest of exponential times with these rates: prompts of weight 0 come last.
        with np.errstate(divide="ignore"):
            times = generator.exponential(size=len(weight)) / weight
        order = np.lexsort((generator.random(len(weight)), times))
        return sorted(map(int, order), key=in_progress.__contains__)[:k]  # the sort is stable

    def seed_for_next(self) -> int:
        return int(np.random.SeedSequence((self._seed, 1, self._draws)).generate_state(1)[0])

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self._prompts), "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DataError if the state is of a data set of another size.

        After epochs (`PromptOrder`) the draws begin with the first.
        """
        _check_count(state, len(self._prompts))
        if "epoch" not in state:
            self._draws = state["draws"]


def _check_count(state: Mapping[str, Any], count: int) -> None:
    if state["count"] != count:
        raise DataError(
            f"the checkpoint was trained on {state['count']} prompts, and data.train now has {count}: resume "
            "with the same data, or start a new run"
        )


def _check_rates(prompts: Sequence[Prompt], field: str) -> None:
    """Raises DataError for a stated success rate outside 0 to 1: percentages would reverse the order."""
    for prompt in prompts:
        if (rate := prompt.record.get(field)) is None:
            continue
        number = finite_number(rate)
        if number is None or not 0 <= number <= 1:
            raise DataError(
                f"prompt {prompt.id}: field {field!r} (algorithm.prompts.field) is {cut(repr(rate))}: want a "
                "success rate from 0 to 1"
            )
