"""Surrounds the steps of a run: one Trainer a process, signals, the lock, the engine, callbacks, stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, Protocol
from weakref import WeakMethod

from megatron_gvpo.core.collectives import all_have_failed
from megatron_gvpo.core.errors import CheckpointError, ConfigError, RewardError, RolloutError
from megatron_gvpo.core.signals import Interrupt, Interrupted
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.runs.directory import RunDirectory
from megatron_gvpo.training.checkpoints import Checkpoints
from megatron_gvpo.training.components import Components

FAILING = 10.0  # seconds from the first to the last rank's failure of a user's function


class StoppableRun(Protocol):
    """The attributes and methods of a Trainer with which a run is opened, stopped and resumed."""

    interrupt: Interrupt
    directory: RunDirectory
    components: Components
    checkpoints: Checkpoints
    step: int  # the last step that is complete
    is_mid_update: bool  # the weights are no longer those of `step`

    def begin(self) -> None: ...

    def save(self) -> None: ...

    def notify(self, event: str, *args: Any) -> None: ...


@contextmanager
def running(run: StoppableRun) -> Iterator[None]:
    """Holds the run's directory, engine and callbacks open; saves a checkpoint if a signal stops the block.

    A checkpoint that is being written in the background is complete before an error leaves the block. Raises
    Interrupted after a signal and RolloutError without servers, both after a checkpoint; every rank raises
    them at the same point.
    """
    with run.interrupt, run.directory.alone(), run.components:
        run.begin()
        try:
            run.notify("on_start")
            yield
        except Interrupted:
            run.save()
            run.checkpoints.finish()
            raise Interrupted(f"the checkpoint is complete ({run.checkpoints.last})") from None
        except RolloutError:
            run.save()
            run.checkpoints.finish()
            raise
        except Exception:
            with suppress(CheckpointError):  # the user must see the error that ended the run, not this one
                run.checkpoints.settle()
            raise
        finally:
            run.notify("on_exit")


@contextmanager
def naming_the_step(run: StoppableRun, step: int) -> Iterator[None]:
    """Adds the step, and where `--resume` begins, to an error of the user's function, rewards or images."""
    try:
        yield
    except (UserFunctionError, RewardError, ImageError) as error:
        raise type(error)(f"step {step}: {error}; {_where_to_resume(run)}") from error


def _where_to_resume(run: StoppableRun) -> str:
    """Save the step before the failed one, if all ranks know of the failure; say where to resume.

    A step that failed after an update of the weights leaves nothing to save.
    """
    checkpoints = run.checkpoints
    try:
        checkpoints.settle()
        if checkpoints.last_step < run.step and not run.is_mid_update and all_have_failed(FAILING):
            run.save()
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
        """End the earlier Trainer. Raises ConfigError while its fit() runs, in another thread.

        `release`, a method, frees the Trainer's memory and process groups. `end` calls it, unless its object
        no longer exists.
        """
        global _present
        if _present is not None:
            _present.end()
        self._release = WeakMethod(release)
        self._state: Literal["built", "fitting", "fitted", "over"] = "built"
        _present = self

    def end(self) -> None:
        """Release the Trainer's memory and process groups. Raises ConfigError while its fit() runs."""
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
        """Context for the Trainer's only call of fit().

        Raises ConfigError for a second one, and after `end`.
        """
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
