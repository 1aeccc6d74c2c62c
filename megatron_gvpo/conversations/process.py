"""The trainer's end of a process in which environments run: it asks, waits no longer than allowed."""

from __future__ import annotations

import math
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.conversations.environment import Messages
from megatron_gvpo.conversations.worker import FAILED, READY, SAID, UNLOADABLE
from megatron_gvpo.rewards.guard import PATIENCE
from megatron_gvpo.rewards.guarded import GuardedProcess, how_it_ended
from megatron_gvpo.rewards.printed import Printout
from megatron_gvpo.rewards.wire import WireError, pack_values, receive_values, send_data

_START = 600.0  # seconds that a worker has to import the environment


class Answer(NamedTuple):
    """An environment's words, reward and counts; `says` is None where it ended the conversation."""

    says: Messages | None
    reward: float = 0.0
    counts: Mapping[str, float] = {}


class StepFailed(Exception):  # noqa: N818 - it is no fault of this program
    """A step has no answer; `gone`: its process ended or was ended, for example because it took too long."""

    def __init__(self, reason: str, gone: bool, late: bool = False) -> None:
        super().__init__(reason)
        self.gone, self.late = gone, late


class EnvironmentProcess(GuardedProcess):
    """One process, which answers one step after the other. Its methods block."""

    def __init__(self, spec: str, options: Mapping[str, Any], printout: Printout) -> None:
        super().__init__("megatron_gvpo.conversations.worker", printout)
        self._spec = spec
        self._number = 0
        with suppress(OSError):  # it is gone, which `wait_ready` finds
            send_data(self.channel, pack_values([sys.path, spec, dict(options)]))

    def wait_ready(self) -> None:
        """Raises ConfigError where the environment cannot be loaded, or not in time."""
        try:
            reply = self._receive(_START)
        except StepFailed as error:
            raise ConfigError(f"rollout.conversation: a worker did not start: {error}") from None
        if reply[:1] == [UNLOADABLE]:
            self.stop()
            raise ConfigError(f"rollout.conversation.environment={self._spec}: {reply[1]}")
        if reply != [READY]:
            self.stop()
            raise ConfigError("rollout.conversation: a worker began with a message that is none of its own")

    def step(
        self,
        conversation: int,
        beginning: tuple[bytes, int, list[str]] | None,
        said: str,
        ended: list[int],
        seconds: float,
    ) -> Answer:
        """The answer to `said`. Raises StepFailed; where it says `gone`, this object is of no more use."""
        self._number += 1
        try:
            send_data(self.channel, pack_values([self._number, conversation, beginning, said, ended]))
        except OSError as error:
            self.stop()
            raise StepFailed(f"its process cannot be asked: {error}", gone=True) from None
        match self._receive(seconds):
            case [kind, number, str(reason)] if kind == FAILED and number == self._number:
                raise StepFailed(reason, gone=False)
            case [kind, number, says, float(reward), dict(counts)] if (
                kind == SAID and number == self._number and _is_right(says, reward, counts)
            ):
                return Answer(says, reward, counts)
        self.stop()
        raise StepFailed("its process sent a message that is no answer", gone=True)

    def _receive(self, seconds: float) -> list[Any]:
        """The next reply as a list. Raises StepFailed."""
        deadline = time.monotonic() + seconds
        try:
            while (values := receive_values(self.channel)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    self.stop()
                    raise StepFailed(f"it took longer than {seconds:g} seconds", gone=True, late=True)
                select.select(self.waits_for(), [], [], min(left, 1.0))
                self.output.drain()
        except WireError as error:
            self.stop()
            raise StepFailed(
                f"its process sent a message that is none of the worker's ({error})", gone=True
            ) from None
        except (EOFError, OSError):
            code = self.stop(patience=PATIENCE)
            killed = " (perhaps by the kernel, for memory)" if code == -signal.SIGKILL else ""
            raise StepFailed(f"it ended its process ({how_it_ended(code)}{killed})", gone=True) from None
        self.output.drain()
        return values if isinstance(values, list) else []


def _is_right(says: Any, reward: float, counts: dict[Any, Any]) -> bool:
    """True for an answer of the worker's own form: the user's code runs there, so everything is checked."""
    numbers = [reward, *counts.values()]
    if not all(type(n) is float and math.isfinite(n) for n in numbers) or not all(
        isinstance(name, str) for name in counts
    ):
        return False
    return says is None or (
        isinstance(says, list)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in says
        )
    )
