"""The state of one server in the pool, and the possible changes of state.

```
        healthy again         a push begins           it has all weights
Lost ----------------> Pending -------------> Receiving ---------------> Serving
  ^                     ^  ^                      |                        |
  |                     |  +------ it failed -----+                        |
  |                     +------------ newer weights, or sleep -------------+
  +---- from every state: it does not answer, or cannot be used
```

Only a server that is `Serving` gets requests. A server on the trainer's GPUs is `Loaded` between the last two
states, until the trainer has released its memory and the server has resumed. It may also be asleep, in any of
the states.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.servers.server import Completion, MemoryPart, Server


@dataclass(frozen=True)
class Lost:
    """The server does not answer, or cannot be used."""

    why: str


@dataclass(frozen=True)
class Pending:
    """The server is healthy, without the current weights."""


@dataclass(frozen=True)
class Receiving:
    """A push is under way to the server, which may be slow to answer meanwhile."""


@dataclass(frozen=True)
class Loaded:
    """The server has the weights of `version`, and is paused: it waits for the rest of its memory."""

    version: int


@dataclass(frozen=True)
class Serving:
    """The server is healthy and has the weights of `version`."""

    version: int


State = Lost | Pending | Receiving | Loaded | Serving
TRANSITIONS: dict[type[State], set[type[State]]] = {
    Lost: {Lost, Pending},
    Pending: {Lost, Pending, Receiving},
    Receiving: {Lost, Pending, Loaded, Serving},
    Loaded: {Lost, Pending, Serving},
    Serving: {Lost, Pending},
}


ALL_PARTS: tuple[MemoryPart, ...] = ("weights", "cache")


@dataclass(frozen=True)
class Asleep:
    """The trainer on the same GPUs uses the memory of these parts of the server."""

    parts: tuple[MemoryPart, ...]
    version: str  # the server's own weight version when it fell asleep; after a restart it has another


@dataclass
class ServerHandle:
    """One server, with the pool's record of its state and requests.

    Only `to` changes the first four fields after `server`.
    """

    server: Server
    state: State = Lost("it has not answered")
    since: float = field(default_factory=running_seconds)  # when a state of this kind began
    version: int = -1  # version of the weights that the server got last; -1 after it was lost
    losses: int = 0  # how often it was lost; each loss ends the process group with the server
    asleep: Asleep | None = None
    outstanding: int = 0  # tokens that requests in flight may still give
    calls: set[asyncio.Task[Completion]] = field(default_factory=set)  # requests in flight

    def to(self, state: State) -> None:
        """Change the server's state.

        Losing a server cancels its requests and ends its group with the trainer.
        """
        if type(state) not in TRANSITIONS[type(self.state)]:
            raise AssertionError(f"{self.server.url}: no server goes from {self.state} to {state}")
        if type(state) is not type(self.state):
            self.since = running_seconds()
        self.state = state
        match state:
            case Lost():
                self.version, self.losses = -1, self.losses + 1
                for call in self.calls:
                    call.cancel()
            case Loaded(version) | Serving(version):
                self.version = version

    @property
    def is_lost(self) -> bool:
        return isinstance(self.state, Lost)

    @property
    def is_ready(self) -> bool:
        return isinstance(self.state, Serving)

    def has(self, version: int) -> bool:
        """True if it has the weights of this version, all of them."""
        return self.state in (Loaded(version), Serving(version))
