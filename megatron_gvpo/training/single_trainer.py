"""One process trains one model at a time: a new Trainer takes the place of the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal
from weakref import WeakMethod

from megatron_gvpo.core.errors import ConfigError

_present: Turn | None = None


class Turn:
    """A Trainer's turn: from its construction to the construction of the next one in this process."""

    def __init__(self, release: Callable[[], None]) -> None:
        """End the turn before. Raises ConfigError while that Trainer's fit() runs, in another thread.

        `release`, a method, frees the Trainer's memory and process groups. It is called at the turn's end,
        unless its object is gone.
        """
        global _present
        if _present is not None:
            _present.end()
        self._release = WeakMethod(release)
        self._state: Literal["built", "fitting", "fitted", "over"] = "built"
        _present = self

    def end(self) -> None:
        """Release what the Trainer holds. Raises ConfigError while its fit() runs."""
        if self._state == "fitting":
            raise ConfigError(
                "fit() of another Trainer is running in this process, which trains one model at a time: wait "
                "for its end, or use a process of its own"
            )
        if self._state != "over" and (release := self._release()) is not None:
            release()
        self._state = "over"

    @contextmanager
    def fit(self, step: Callable[[], int], steps: int) -> Iterator[None]:
        """The Trainer's one fit(). Raises ConfigError for a second one, and after the turn."""
        if self._state == "over":
            raise ConfigError(
                "this Trainer is closed, as by the construction of a later one (one process trains one model "
                "at a time): construct a new one, with resume=True to continue its run"
            )
        if self._state != "built":
            raise ConfigError(
                f"fit() of this Trainer has been called before; the run is at step {step()} of train.steps="
                f"{steps}: construct a new Trainer with resume=True, and more train.steps if they are done"
            )
        self._state = "fitting"
        try:
            yield
        finally:
            self._state = "fitted"
