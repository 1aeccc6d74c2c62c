"""Rank 0 leads: it alone talks to the servers, and tells every rank what to do next.

While rank 0 waits for servers, it sends `Wait` once per heartbeat. The other ranks therefore wait on the CPU
for a few seconds at a time, never in a collective that could time out, and a colocated engine has the GPUs to
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

from megatron_gvpo.config.schema import ConfigError
from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.runtime.collectives import broadcast_msgpack

HEARTBEAT = 5.0  # seconds that the other ranks wait at most for a command of rank 0


class Messages[T]:
    """The messages that one rank may send another: frozen dataclasses, whose fields have msgpack's types.

    On the way a message is the name of its class and its fields. Both ends refuse any other.
    """

    def __init__(self, *kinds: type[T]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: T) -> list[Any]:
        kind: Any = type(message)
        if kind not in self._kinds.values():
            raise AssertionError(f"{message!r} is not one of {', '.join(self._kinds)}")
        return [kind.__name__, *(getattr(message, field.name) for field in fields(kind))]

    def decode(self, sent: list[Any]) -> T:
        match sent:
            case [str(name), *values] if name in self._kinds:
                return self._kinds[name](*values)
        raise AssertionError(f"another rank sent {sent!r}, which is not one of {', '.join(self._kinds)}")


@dataclass(frozen=True)
class Wait:
    """Nothing has happened; ask again."""


@dataclass(frozen=True)
class Push:
    """A server needs the current weights: all ranks take part in a push."""


@dataclass(frozen=True)
class Done:
    """The work has ended well; `payload` is its result, in msgpack's types."""

    payload: Any = None


@dataclass(frozen=True)
class Failed:
    """The work has failed: every rank raises `error`."""

    problem: str
    misconfigured: bool = False  # the error is a ConfigError, else a RolloutError

    @classmethod
    def by(cls, error: ConfigError | RolloutError) -> Self:
        return cls(str(error), isinstance(error, ConfigError))

    @property
    def error(self) -> ConfigError | RolloutError:
        return ConfigError(self.problem) if self.misconfigured else RolloutError(self.problem)


Command = Wait | Push | Done | Failed
COMMANDS: Messages[Command] = Messages(Wait, Push, Done, Failed)


def lead(next_command: Callable[[], Command] | None) -> Command:
    """Rank 0's next command, on every rank. `next_command` is None on the other ranks. A collective."""
    sent = None if next_command is None else COMMANDS.encode(next_command())
    return COMMANDS.decode(broadcast_msgpack(sent))
