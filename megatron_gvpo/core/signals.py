"""Handles the signals that ask a run to stop; the run then saves, prints a line and exits.

SIGTERM and SIGUSR1 come from Slurm and Kubernetes before they kill, SIGINT from Ctrl-C, SIGHUP from a
terminal that was closed, such as by the loss of ssh.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import Self

NOTICE = b"\nCtrl-C: the run saves after this step, and ends; Ctrl-C again ends it at once, unsaved\n"

log = logging.getLogger(__name__)


class Interrupted(Exception):  # noqa: N818 - not an error: the run can be resumed
    """A signal has stopped the run, at a point from which it can be resumed."""


class Interrupt:
    """Notes the signals; `check` raises Interrupted on all ranks after any rank has received one.

    A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self._is_signalled = False
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers.enter_context(handled_by(self._note, stopping_signals()))
        else:
            log.warning(
                "training in a thread other than the main one, which alone gets signals: SIGTERM, "
                "SIGUSR1, SIGHUP and Ctrl-C end the process without a checkpoint"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.close()

    def check(self) -> None:
        """Raise Interrupted if any rank has received a signal. A collective, because the ranks must agree."""
        self.check_and_agree(False)

    def check_and_agree(self, wish: bool) -> bool:
        """Check as `check` does, and return True if `wish` is true on any rank; both in one collective.

        Raises Interrupted as `check` does.
        """
        import torch
        import torch.distributed as dist

        votes = torch.tensor([float(self._is_signalled), float(wish)])
        if dist.is_initialized():
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        if votes[0].item():
            raise Interrupted
        return bool(votes[1].item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
        if number == signal.SIGINT:
            # The kernel's own handling: a second Ctrl-C ends the process even in the middle of a long call.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.environ.get("RANK", "0") == "0":
                # `print` is not used, because the signal may have interrupted a print
                with suppress(OSError):
                    os.write(2, NOTICE)


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop.

    SIGINT and SIGHUP are left out where they are ignored: by `nohup`, and by a shell for its background jobs.
    """
    ignorable = (signal.SIGINT, signal.SIGHUP)
    heard = [number for number in ignorable if signal.getsignal(number) != signal.SIG_IGN]
    return [signal.SIGTERM, signal.SIGUSR1, *heard]


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Iterator[None]:
    """Within the block, `handler` handles these signals; at its end the earlier handlers are restored."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def leaving_on_signals() -> AbstractContextManager[None]:
    """Context that SIGTERM and SIGHUP end by SystemExit(128 + n), so that `with` blocks inside it clean up.

    An ignored signal, such as nohup's, stays ignored. In a thread other than the main one nothing changes.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGHUP] if is_main else []
    return handled_by(leave, [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN])
