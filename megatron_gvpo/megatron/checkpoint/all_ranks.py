"""Runs an action on every rank; if it fails on one, raises on all, so that none waits until the timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megatron_gvpo.runtime.collectives import all_gather_msgpack, first_problem


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier checkpoints are untouched."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing or is not what was saved; an older checkpoint may be whole."""


def run_on_all_ranks(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on every rank; if it fails on any, raise CheckpointError on all, with that error.

    All ranks raise DamagedCheckpointError if only damage was found.

    `action` must not wait for other ranks after a point where one rank alone may fail. `what` begins the
    message, as in "cannot write FILE"; leave it empty if the error says that itself.
    """
    failed: BaseException | None = None
    try:
        action()
    except CheckpointException as error:  # PyTorch wraps the error of a rank in it
        failed = next(cause for cause, _ in error.failures.values())
    except Exception as error:  # the other ranks must learn of any error
        failed = error
    said = first_problem(None if failed is None else _described(failed), group)
    if said is not None:
        damaged = all(all_gather_msgpack(failed is None or isinstance(failed, DamagedCheckpointError), group))
        raise (DamagedCheckpointError if damaged else CheckpointError)(f"{what}: {said}" if what else said)


def run_on_rank_0(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Like `run_on_all_ranks`, but only rank 0 runs `action`; all ranks raise its error."""
    run_on_all_ranks(what, action if dist.get_rank() == 0 else lambda: None, group)


def _described(error: BaseException) -> str:
    """Describe the error's first cause: PyTorch's writer hides a full disk behind an error of its own."""
    if isinstance(error, CheckpointError):
        return str(error)
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"
