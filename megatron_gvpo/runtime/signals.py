"""Handles SIGTERM, which Slurm and Kubernetes send before they kill: the run saves, says so, and exits."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist


class Interrupted(Exception):  # noqa: N818 - not an error: the run can be resumed
    """The run was asked to stop, and has stopped at a point from which it can be resumed."""


class Interrupt:
    """Notes SIGTERM and SIGUSR1; `check` raises Interrupted on all ranks after any rank has received one."""

    def __init__(self) -> None:
        self._told = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if any rank has received a signal. A collective, because the ranks must agree."""
        told = torch.tensor([float(self._told)])
        if dist.is_initialized():
            dist.all_reduce(told, dist.ReduceOp.MAX)
        if told.item():
            raise Interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True
