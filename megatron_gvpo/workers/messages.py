"""The messages between the trainer and the processes that run users' code.

The trainer sends orders, and a process sends replies. Each message is a msgspec struct, and its reader checks
all of its fields against their types, because users' code runs in the processes that send replies. msgpack
writes the bytes: unlike msgspec's own encoder, it can write integers of more than 64 bits and halves of
surrogate pairs, which data records contain. Nothing is pickled.

An order of any size is sent without waiting for the process: a long one lies in a memory file, whose
descriptor travels over the socket. A reply is one packet of the socket. So bytes that a function writes there
by mistake form a separate packet, which is not a valid reply.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
import msgspec

from megatron_gvpo.core.plain_values import LARGEST
from megatron_gvpo.groups import Prompt, Rollout, prompt_of, rollout_of

MAX_TEXT = 1000  # characters of an error message
MAX_REPLY = 1 << 16  # bytes of a reply
_SHORT = 1 << 16  # an order of at most this many bytes is sent in the socket's message itself
HUNG_UP = 74  # exit code of a process whose socket has failed

Number = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]  # NaN is refused, too
Reason = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class WireError(ValueError):
    """Bytes that are not one of the messages below, or a value that no message can carry."""


class _Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """A message is written as a list: the name of its class, then its fields."""


class Endpoint(NamedTuple):
    """Arguments of the OpenAI client with which a program asks the policy. The key is valid for one rollout.

    The members of a group have the same `seed`, for other random numbers of the program.
    """

    base_url: str
    api_key: str
    seed: int = 0


class Function(NamedTuple):
    """A function or class that a configuration names."""

    key: str  # the configuration's key and value, for errors: "rewards.components.0.name=math"
    spec: str  # "module:function" or "path/file.py:function"
    options: dict[str, Any]  # keyword arguments


# Orders: messages from the trainer to a process.


class Load(_Message):
    """The first order of every process. The answer is Ready or Unloadable."""

    path: list[str]  # the trainer's module path
    files: dict[str, bytes]  # the contents of users' files at the start of the run
    functions: list[Function]
    notice: float  # seconds between two Importing messages


class Score(msgspec.Struct, array_like=True):
    """The evaluation of a rollout by a function. `prompt` and `rollout` are indices into `Scores.parts`."""

    call: int
    function: int  # index in Load.functions
    prompt: int
    rollout: int


class Scores(_Message):
    """Evaluations, one after the other. A prompt or rollout that several of them need is sent once."""

    parts: list[bytes]  # made by `prompt_bytes` and `rollout_bytes`
    calls: list[Score]


class Begin(msgspec.Struct, array_like=True):
    """The beginning of a conversation that a process does not know; `turns` are the policy's so far."""

    prompt: bytes  # made by `prompt_bytes`
    seed: int
    turns: list[str]


class Step(_Message):
    """A turn of the policy, which the conversation's environment answers."""

    call: int
    conversation: int
    begin: Begin | None
    text: str
    seconds: float  # time limit for the answer


class RunProgram(_Message):
    """A rollout by the program."""

    call: int
    prompt: bytes  # made by `prompt_bytes`
    endpoint: Endpoint


class Cancel(_Message):
    """These conversations have ended, or these calls of a program are to end. No reply follows."""

    numbers: list[int]


Order = Load | Scores | Step | RunProgram | Cancel

# Replies: messages from a process to the trainer.


class Ready(_Message):
    """All functions are loaded. If `overlaps` is true, several steps may run at once."""

    overlaps: bool = True


class Unloadable(_Message):
    """The function of this index cannot be loaded."""

    function: int
    reason: Reason


class Importing(_Message):
    """The call's function is importing a module."""

    call: int


class CallResult(_Message):
    """The value of a call. `messages` are an environment's; None ends the conversation."""

    call: int
    reward: Number
    counts: dict[str, Number] = {}
    messages: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for message in self.messages or ():
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError("a chat message without role or content")


Cause = Literal["raised", "late", "ended", "outage"]  # why a call has no value


class CallError(_Message):
    """The call has no value: the function raised, took too long, or the process of a program ended."""

    call: int
    reason: Reason
    cause: Cause = "raised"


WorkerReply = Ready | Unloadable | Importing | CallResult | CallError


def encode(message: Order | WorkerReply) -> bytes:
    """Return the message, encoded as bytes.

    Raises WireError for a value that it cannot carry, such as too deep lists.
    """
    return pack_values(message)


def decode[T](data: bytes, kind: type[T]) -> T:
    """A message of this kind, such as Order or WorkerReply. Raises WireError."""
    values = unpack_values(data)
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise WireError(str(error)) from None


def send_order(channel: socket.socket, order: Order) -> None:
    """Raises WireError, BlockingIOError if the socket is full, and OSError if the process has ended."""
    data, flags = encode(order), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    if len(data) <= _SHORT:
        channel.send(data, flags)
        return
    file = os.memfd_create("order")
    try:
        with os.fdopen(os.dup(file), "wb") as out:
            out.write(data)
        socket.send_fds(channel, [b"order"], [file], flags)
    finally:
        os.close(file)


def receive_order(channel: socket.socket) -> Order:
    """Wait for the next order and return it.

    Raises EOFError if the trainer has hung up, OSError, WireError.
    """
    data, files, _, _ = socket.recv_fds(channel, _SHORT, 1)
    if not data:
        raise EOFError
    if files:
        with os.fdopen(files[0], "rb") as file:
            file.seek(0)
            data = file.read()
    return decode(data, Order)  # type: ignore[arg-type]


def send_reply(channel: socket.socket, reply: WorkerReply) -> None:
    """Raises OSError if the trainer has ended, and WireError."""
    channel.send(encode(reply), socket.MSG_NOSIGNAL)


def receive_reply(channel: socket.socket) -> WorkerReply | None:
    """The next reply; None if there is none at this moment. Raises EOFError, OSError, WireError."""
    try:
        data, _, flags, _ = channel.recvmsg(MAX_REPLY, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    if not data:
        raise EOFError
    if flags & socket.MSG_TRUNC:
        raise WireError("too long")
    return decode(data, WorkerReply)  # type: ignore[arg-type]


# Values inside messages.


def prompt_bytes(prompt: Prompt) -> bytes:
    """Return the prompt, encoded as bytes. Raises WireError for a data record that is nested too deeply."""
    return pack_values({f.name: getattr(prompt, f.name) for f in fields(prompt)})


def read_prompt(data: bytes) -> Prompt:
    """A new object, which users' code may change."""
    return prompt_of(unpack_values(data))


def rollout_bytes(rollout: Rollout) -> bytes:
    """The rollout without its routing and supports, which no reward needs and which may have megabytes."""
    names = [f.name for f in fields(rollout) if f.name not in ("routing", "support")]
    return pack_values({name: getattr(rollout, name) for name in names})


def read_rollout(data: bytes) -> Rollout:
    """A new object, which users' code may change."""
    return rollout_of(unpack_values(data))


_INTEGER, _DECIMAL, _TIME, _DURATION = range(4)


def pack_values(value: Any) -> bytes:
    """Return the value, encoded as bytes. Raises WireError for one that is nested too deeply."""
    try:
        packed: bytes = msgpack.packb(value, default=_encode, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(str(error)) from None
    return packed


def unpack_values(data: bytes) -> Any:
    """Return the value that these bytes encode. Raises WireError for bytes that have none."""
    try:
        return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass")
    except Exception as error:  # msgpack raises several types, and its hooks raise others
        raise WireError(str(error)) from None


def _encode(value: Any) -> Any:
    """Return a message or a record's value in a form that msgpack can write; of unknown types the `repr`."""
    if isinstance(value, _Message):
        return [type(value).__name__, *msgspec.structs.astuple(value)]
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.astuple(value)
    if isinstance(value, int):  # an integer of more than 64 bits
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
    if hasattr(value, "tolist"):  # a value of numpy
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
    raise WireError("unknown type")
