"""What a rank does and all must hear of where it fails, so that none waits for another until the timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megatron_gvpo.runtime.collectives import first_problem


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; what was on disk before is untouched."""


def everywhere(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Run on this rank; if it failed on any, raise CheckpointError on all, with the first such rank's error.

    `action` must not wait for other ranks after what may fail on one alone. `what` begins the message, as in
    "cannot write FILE"; empty where the error says that itself.
    """
    problem = None
    try:
        action()
    except CheckpointException as error:  # some rank's, with its traceback around it
        problem = _described(next(cause for cause, _ in error.failures.values()))
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = _described(error)
    if (said := first_problem(problem, group)) is not None:
        raise CheckpointError(f"{what}: {said}" if what else said)


def on_rank_0(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    everywhere(what, action if dist.get_rank() == 0 else lambda: None, group)


def _described(error: BaseException) -> str:
    """Its first cause: PyTorch's writer covers a full disk with a complaint of its own."""
    if isinstance(error, CheckpointError):
        return str(error)
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"
