"""Rank 0 leads: it alone talks to the servers, and tells every rank what to do next.

While rank 0 waits for servers, it sends `Wait` once per heartbeat. The other ranks therefore wait on the CPU
for a few seconds at a time, never in a collective that could time out, and a colocated engine has the GPUs to
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.config.schema import ConfigError
from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.runtime.collectives import broadcast_msgpack

HEARTBEAT = 5.0  # seconds that the other ranks wait at most for a command of rank 0


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
    """The work has failed: every rank raises `error`, which is a ConfigError or a RolloutError."""

    error: ConfigError | RolloutError


Command = Wait | Push | Done | Failed


def lead(next_command: Callable[[], Command] | None) -> Command:
    """Rank 0's next command, on every rank. `next_command` is None on the other ranks. A collective."""
    return _decode(broadcast_msgpack(None if next_command is None else _encode(next_command())))


def _encode(command: Command) -> list[Any]:
    match command:
        case Done(payload):
            return ["done", payload]
        case Failed(error):
            return ["misconfigured" if isinstance(error, ConfigError) else "failed", str(error)]
        case Push():
            return ["push", None]
        case Wait():
            return ["wait", None]


def _decode(word: list[Any]) -> Command:
    match word:
        case ["done", payload]:
            return Done(payload)
        case ["misconfigured", problem]:
            return Failed(ConfigError(problem))
        case ["failed", problem]:
            return Failed(RolloutError(problem))
        case ["push", _]:
            return Push()
        case ["wait", _]:
            return Wait()
    raise AssertionError(f"rank 0 sent {word!r}")
