"""Sessions of clients, with their models, samplers and pending results. Only the HTTP thread uses them."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.tinker.checkpoints import CheckpointPath
from megatron_gvpo.tinker.wire import Refusal

# a result is kept for this time after it was first fetched, because its answer may be lost
KEPT_SECONDS = 600.0


@dataclass
class ClientModel:
    """A model in training."""

    model_id: str
    rank: int | None  # the rank of its adapters
    metadata: dict[str, str] = field(default_factory=dict)
    saves: int = 0  # number of checkpoints that have no name
    # Unnamed weights to sample from, in the order of their last use.
    snapshots: list[str] = field(default_factory=list)


@dataclass
class ClientSampler:
    """A sampling session: its requests are sampled from the weights of one snapshot."""

    sampler_id: str
    session_id: str
    snapshot: str
    path: CheckpointPath | None = None  # the checkpoint with these weights, if there is one
    is_forgotten: bool = False  # others of its model took the place of its weights


@dataclass
class WireAnswer:
    """A result in the form in which it is sent."""

    body: bytes | dict[str, Any]  # protobuf, or JSON
    fetched: float | None = None


@dataclass
class PendingResult:
    """A request that waits for the ranks. Its answer comes once."""

    request_id: str
    answer: asyncio.Future[WireAnswer]
    sample_ids: list[str] | None = None

    def is_over(self, now: float) -> bool:
        """True if no client will fetch the answer any more."""
        if self.answer.cancelled():
            return True
        fetched = self.answer.result().fetched if self.answer.done() else None
        return fetched is not None and now - fetched > KEPT_SECONDS


@dataclass
class Session:
    """One client."""

    session_id: str
    seen: float  # the time of the client's last request, by `running_seconds`: a stopped server hears nobody
    models: dict[str, ClientModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    pending: dict[str, PendingResult] = field(default_factory=dict)
    ended: str = ""  # the reason why the session has ended

    def note_use(self, sampler: ClientSampler) -> None:
        """Note that the sampler is used now, if it has unnamed weights of a model of this session."""
        for model in self.models.values():
            if sampler.snapshot in model.snapshots:
                model.snapshots.remove(sampler.snapshot)
                model.snapshots.append(sampler.snapshot)


class Sessions:
    """All sessions of the server."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, str] = {}  # why sessions have ended

    def open(self) -> Session:
        session = Session(str(uuid.uuid4()), running_seconds())
        self._sessions[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Return the session, and extend its life by `seconds` from now. Raises Refusal."""
        if (reason := self._ended.get(session_id)) is not None:
            raise Refusal(f"the session {session_id} has ended: {reason}", 410)
        if (session := self._sessions.get(session_id)) is None:
            raise Refusal(
                f"there is no session {session_id[:80]!r}: it may be of an earlier start of this server", 404
            )
        session.seen = running_seconds()
        return session

    def of_model(self, model_id: str) -> tuple[Session, ClientModel]:
        """A model, and the session that it belongs to. Raises Refusal where there is none."""
        session = self.get(model_id.partition(":")[0])
        if (model := session.models.get(model_id)) is None:
            raise Refusal(f"the session has no model {model_id[:120]!r}", 404)
        return session, model

    def of_sampler(self, sampler_id: str) -> tuple[Session, ClientSampler]:
        """A sampler, and the session that it belongs to. Raises Refusal where there is none."""
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
        """The sessions whose clients have sent nothing for too long."""
        now = running_seconds()
        return [s.session_id for s in self._sessions.values() if now - s.seen > self._seconds]

    def drop_fetched(self) -> None:
        """Forget results that were fetched long ago, and results that their clients have dropped."""
        now = running_seconds()
        for session in self._sessions.values():
            for request_id in [name for name, p in session.pending.items() if p.is_over(now)]:
                del session.pending[request_id]
