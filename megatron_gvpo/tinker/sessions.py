"""Sessions of clients, with their models, samplers and pending results. All belong to the HTTP thread."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from megatron_gvpo.tinker.checkpoints import CheckpointPath
from megatron_gvpo.tinker.wire import Refusal

KEPT_SECONDS = 600.0  # a result stays for this long after it was first fetched: the answer may have been lost


@dataclass
class ClientModel:
    """A model in training."""

    model_id: str
    rank: int | None  # of its adapters
    metadata: dict[str, Any] = field(default_factory=dict)
    saves: int = 0  # of checkpoints that have no name
    snapshots: list[str] = field(default_factory=list)  # unnamed weights to sample from, the oldest first


@dataclass
class ClientSampler:
    """A sampling session: whose requests are sampled from the weights of one snapshot."""

    sampler_id: str
    session_id: str
    snapshot: str
    path: CheckpointPath | None = None  # of its weights, where they are a checkpoint's


@dataclass
class WireAnswer:
    """A result as it goes over the wire."""

    body: bytes | dict[str, Any]  # protobuf, or JSON
    fetched: float | None = None


@dataclass
class PendingResult:
    """A request that waits for the ranks. Its answer comes once."""

    request_id: str
    answer: asyncio.Future[WireAnswer]
    sample_ids: list[str] | None = None

    def is_over(self, now: float) -> bool:
        """True if nobody will ask for the answer any more."""
        if self.answer.cancelled():
            return True
        fetched = self.answer.result().fetched if self.answer.done() else None
        return fetched is not None and now - fetched > KEPT_SECONDS


@dataclass
class Session:
    """One client."""

    session_id: str
    seen: float  # when it last said something, by the monotonic clock
    models: dict[str, ClientModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    pending: dict[str, PendingResult] = field(default_factory=dict)
    ended: str = ""  # why it has ended


class Sessions:
    """All sessions of the server."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, str] = {}  # why sessions have ended

    def open(self) -> Session:
        session = Session(str(uuid.uuid4()), time.monotonic())
        self._sessions[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The session, which is alive from now on for `seconds` more. Raises Refusal."""
        if (reason := self._ended.get(session_id)) is not None:
            raise Refusal(f"the session {session_id} has ended: {reason}", 410)
        if (session := self._sessions.get(session_id)) is None:
            raise Refusal(
                f"there is no session {session_id[:80]!r}: it may be of an earlier start of this server", 404
            )
        session.seen = time.monotonic()
        return session

    def of_model(self, model_id: str) -> tuple[Session, ClientModel]:
        """Raises Refusal."""
        session = self.get(model_id.partition(":")[0])
        if (model := session.models.get(model_id)) is None:
            raise Refusal(f"the session has no model {model_id[:120]!r}", 404)
        return session, model

    def of_sampler(self, sampler_id: str) -> tuple[Session, ClientSampler]:
        """Raises Refusal."""
        session = self.get(sampler_id.partition(":")[0])
        if (sampler := session.samplers.get(sampler_id)) is None:
            raise Refusal(f"the session has no sampler {sampler_id[:120]!r}", 404)
        return session, sampler

    @property
    def models(self) -> int:
        """The number of models in training."""
        return sum(len(session.models) for session in self._sessions.values())

    def end(self, session_id: str, reason: str) -> Session:
        """Forget a session. Raises Refusal where there is none."""
        session = self.get(session_id)
        del self._sessions[session_id]
        self._ended[session_id] = session.ended = reason
        return session

    def silent(self) -> list[str]:
        """The sessions whose clients have said nothing for too long."""
        now = time.monotonic()
        return [s.session_id for s in self._sessions.values() if now - s.seen > self._seconds]

    def drop_fetched(self) -> None:
        """Forget results that were fetched long ago, and those that their clients have given up."""
        now = time.monotonic()
        for session in self._sessions.values():
            for request_id in [name for name, p in session.pending.items() if p.is_over(now)]:
                del session.pending[request_id]
