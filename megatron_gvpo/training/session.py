"""Surrounds the steps of a run: one Trainer a process, signals, the lock, the engine, callbacks, stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal
from weakref import WeakMethod

from megatron_gvpo.core.collectives import all_have_failed
from megatron_gvpo.core.errors import CheckpointError, ConfigError, RolloutError
from megatron_gvpo.core.signals import Interrupted
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.data.image_files import ImageError

if TYPE_CHECKING:
    from megatron_gvpo.training.trainer import Trainer

FAILING = 10.0  # seconds from the first to the last rank's failure of a user's function


@contextmanager
def running(trainer: Trainer) -> Iterator[None]:
    """Holds the run's directory, engine and callbacks open; saves a checkpoint if a signal stops the block.

    A checkpoint that is being written in the background is complete before an error leaves the block. Raises
    Interrupted after a signal and RolloutError without servers, both after a checkpoint; every rank raises
    them at the same point.
    """
    with trainer.interrupt, trainer.directory.alone(), trainer.components:
        trainer.begin()
        try:
            trainer.notify("on_start")
            yield
        except Interrupted:
            trainer.save()
            trainer.checkpoints.finish()
            raise Interrupted(f"the checkpoint is complete ({trainer.checkpoints.last})") from None
        except RolloutError:
            trainer.save()
            trainer.checkpoints.finish()
            raise
        except Exception:
            with suppress(CheckpointError):  # the error that ends the run is the one to tell
                trainer.checkpoints.settle()
            raise
        finally:
            trainer.notify("on_exit")


@contextmanager
def naming_the_step(trainer: Trainer, step: int) -> Iterator[None]:
    """Adds the step, and where `--resume` begins, to an error of the user's function or of an image."""
    try:
        yield
    except (UserFunctionError, ImageError) as error:
        raise type(error)(f"step {step}: {error}; {_where_to_resume(trainer)}") from error


def _where_to_resume(trainer: Trainer) -> str:
    """Save the step before the failed one, if all ranks know of the failure; say where to resume.

    A step that failed after an update of the weights leaves nothing to save.
    """
    checkpoints = trainer.checkpoints
    try:
        checkpoints.settle()
        if checkpoints.last_step < trainer.step and not trainer.is_mid_update and all_have_failed(FAILING):
            trainer.save()
            checkpoints.finish()
    except CheckpointError as error:
        return f"and no checkpoint could be saved: {error}"
    if not checkpoints.last_step:
        return "no checkpoint has been saved yet (checkpoint.every)"
    return f"`train ... --resume` continues from step {checkpoints.last_step}"


_present: SingleTrainer | None = None


class SingleTrainer:
    """One process trains one model at a time: a new Trainer ends the Trainer before it."""

    def __init__(self, release: Callable[[], None]) -> None:
        """End the Trainer before. Raises ConfigError while its fit() runs, in another thread.

        `release`, a method, frees the Trainer's memory and process groups. `end` calls it, unless its
        object is gone.
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
        """The Trainer's one fit(). Raises ConfigError for a second one, and after `end`."""
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
