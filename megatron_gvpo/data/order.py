"""The order in which prompts are visited, epoch after epoch, and a run's place in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_gvpo.data.sources import DataError


class PromptOrder:
    """Endless passes over `count` prompts; each pass has an order of its own, drawn from (seed, epoch).

    The order of an epoch depends on nothing else, so a resumed run needs only (epoch, position).
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if count < 1:
            raise ValueError(f"count={count}: there must be at least one prompt")
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._epoch, self._position, self._order = 0, 0, self._epoch_order(0)

    def take(self, k: int) -> list[int]:
        """The next `k` prompts' indices; they may straddle epochs."""
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
        """Raises DataError if the state is of a data set of another size."""
        if state["count"] != self._count:
            raise DataError(
                f"the checkpoint was trained on {state['count']} prompts, and data.train now has "
                f"{self._count}: resume with the same data, or start a new run"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        order = np.arange(self._count)
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(order)
        return [int(i) for i in order]
