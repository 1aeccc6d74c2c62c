"""The messages between the trainer and its reward workers: msgpack of fixed forms, never pickles.

An order (the set-up of a worker, or jobs for it) lies in a memory file, whose descriptor travels over the
socket: an order of any size is sent without waiting for the worker. A reply is one packet of the socket, so
that what a reward function writes there by mistake is a packet of its own, which no reply looks like.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, get_type_hints

import msgpack

from megatron_gvpo.groups import Prompt, Rollout, prompt_of, rollout_of
from megatron_gvpo.workers.reward_functions import Component

MAX_TEXT = 1000  # characters of an error message
MAX_REPLY = 1 << 16  # bytes of a reply
_SHORT = 1 << 16  # bytes of an order that goes through the channel itself
HUNG_UP = 74  # exit code of a worker whose channel does not work any more


class WireError(ValueError):
    """A message that has none of the forms below, or a value that no message can carry."""


class Setup(NamedTuple):
    """The first order. A worker answers it with Ready or Unloadable."""

    path: list[str]  # the trainer's module path
    files: dict[str, bytes]  # the users' files, as the run began with them
    components: list[Component]
    notice: float  # seconds between two notices of a function that imports a module


class Job(NamedTuple):
    """The evaluation of one rollout by one component, given by its index."""

    number: int
    component: int
    prompt: bytes
    rollout: bytes


class Ready(NamedTuple):
    """All components are loaded."""


class Unloadable(NamedTuple):
    """The component of this index cannot be loaded."""

    component: int
    reason: str


class Importing(NamedTuple):
    """The job's function is importing a module."""

    job: int


class Scored(NamedTuple):
    """The job's reward: a finite number."""

    job: int
    reward: float


class Failed(NamedTuple):
    """The job has no reward."""

    job: int
    reason: str


Reply = Ready | Unloadable | Importing | Scored | Failed
_REPLIES: tuple[type[Reply], ...] = (Ready, Unloadable, Importing, Scored, Failed)
_FORMS = {kind: tuple(get_type_hints(kind).values()) for kind in _REPLIES}


def send_order(channel: socket.socket, order: Setup | Sequence[Job]) -> None:
    """Raises OSError if the worker is gone or does not read."""
    send_data(channel, pack_values(order if isinstance(order, Setup) else _shared(order)))


def send_data(channel: socket.socket, data: bytes) -> None:
    """Raises OSError if the worker is gone or does not read.

    A long order goes as a file in memory, which the channel has no room for.
    """
    if len(data) <= _SHORT:
        channel.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return
    file = os.memfd_create("order")
    try:
        with os.fdopen(os.dup(file), "wb") as out:
            out.write(data)
        socket.send_fds(channel, [b"order"], [file], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        os.close(file)


def _shared(jobs: Sequence[Job]) -> tuple[list[bytes], list[tuple[int, int, int, int]]]:
    """Each prompt and rollout once, for several jobs, and the jobs with their positions."""
    places: dict[bytes, int] = {}

    def place(part: bytes) -> int:
        return places.setdefault(part, len(places))

    rows = [(job.number, job.component, place(job.prompt), place(job.rollout)) for job in jobs]
    return list(places), rows


def receive_order(channel: socket.socket) -> Any:
    """The next order's values. Raises EOFError if the trainer has hung up, OSError, WireError."""
    said, files, _, _ = socket.recv_fds(channel, _SHORT, 1)
    if not said:
        raise EOFError
    if not files:
        return unpack_values(said)
    with os.fdopen(files[0], "rb") as file:
        file.seek(0)
        return unpack_values(file.read())


def receive_setup(channel: socket.socket) -> Setup:
    """The first order. Raises EOFError if the trainer has hung up, OSError, WireError."""
    path, files, components, notice = receive_order(channel)
    return Setup(path, files, [Component(*component) for component in components], notice)


def receive_jobs(channel: socket.socket) -> list[Job]:
    """The next order. Raises EOFError if the trainer has hung up, OSError, WireError."""
    parts, rows = receive_order(channel)
    return [Job(number, component, parts[p], parts[r]) for number, component, p, r in rows]


def send_reply(channel: socket.socket, reply: Reply) -> None:
    """Raises OSError if the trainer is gone."""
    channel.send(pack_values([_REPLIES.index(type(reply)), *reply]), socket.MSG_NOSIGNAL)


def receive_reply(channel: socket.socket) -> Reply | None:
    """The next reply; None without one at this moment. Raises EOFError, OSError, WireError.

    The reply comes from a process in which the user's code runs, so all of its values are checked.
    """
    if (values := receive_values(channel)) is None:
        return None
    if not isinstance(values, list) or not values or not _is(values[0], int):
        raise WireError("no list that begins with a number")
    if not 0 <= values[0] < len(_REPLIES):
        raise WireError("no kind of reply")
    kind, (_, *given) = _REPLIES[values[0]], values
    wanted = _FORMS[kind]
    if len(given) != len(wanted) or not all(map(_is, given, wanted)):
        raise WireError(f"no {kind.__name__}")
    reply: Reply = kind(*given)
    if isinstance(reply, Scored) and not math.isfinite(reply.reward):
        raise WireError("not finite")
    if isinstance(reply, Unloadable | Failed):
        return reply._replace(reason=reply.reason[:MAX_TEXT])
    return reply


def receive_values(channel: socket.socket) -> Any:
    """The next packet's values; None without one at this moment. Raises EOFError, OSError, WireError."""
    try:
        data, _, flags, _ = channel.recvmsg(MAX_REPLY, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    if not data:
        raise EOFError
    if flags & socket.MSG_TRUNC:
        raise WireError("too long")
    return unpack_values(data)


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind


def prompt_bytes(prompt: Prompt) -> bytes:
    """Raises WireError for a data record that is nested too deeply."""
    return pack_values({f.name: getattr(prompt, f.name) for f in fields(prompt)})


def rollout_bytes(rollout: Rollout) -> bytes:
    """All of the rollout but its routing, which no reward needs and which may be megabytes."""
    return pack_values({f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name != "routing"})


def unpack_job(job: Job) -> tuple[Prompt, Rollout]:
    """Objects of the job's own, which its function may change."""
    return prompt_of(unpack_values(job.prompt)), rollout_of(unpack_values(job.rollout))


_INTEGER, _DECIMAL, _TIME, _DURATION = range(4)


def pack_values(value: Any) -> bytes:
    """The value as a message's bytes. Raises WireError for one that is nested too deeply."""
    try:
        packed: bytes = msgpack.packb(value, default=_encode, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(str(error)) from None
    return packed


def unpack_values(data: bytes) -> Any:
    """The value of a message. Raises WireError for bytes that are none."""
    try:
        return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass")
    except Exception as error:  # msgpack raises several types, and its hooks raise others
        raise WireError(str(error)) from None


def _encode(value: Any) -> Any:
    """The values of JSON and Parquet records that msgpack does not know; of any other, its `repr`."""
    if isinstance(value, int):  # of more than 64 bits
        return msgpack.ExtType(_INTEGER, hex(value).encode())
    if isinstance(value, Decimal):
        return msgpack.ExtType(_DECIMAL, str(value).encode())
    if isinstance(value, date | time):  # a datetime is a date
        return msgpack.ExtType(_TIME, f"{type(value).__name__} {value.isoformat()}".encode())
    if isinstance(value, timedelta):
        parts = [value.days, value.seconds, value.microseconds]
        return msgpack.ExtType(_DURATION, msgpack.packb(parts))
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    return repr(value)[:MAX_TEXT]


def _decode(code: int, data: bytes) -> Any:
    if code == _INTEGER:
        return int(data, 16)
    if code == _DECIMAL:
        return Decimal(data.decode())
    if code == _DURATION:
        return timedelta(*msgpack.unpackb(data))
    if code == _TIME:
        kind, _, text = data.decode().partition(" ")
        return {"date": date, "time": time, "datetime": datetime}[kind].fromisoformat(text)  # type: ignore[attr-defined]
    raise WireError("no such type")
