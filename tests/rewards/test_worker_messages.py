"""The messages of worker processes: each survives the way there, and no other bytes are taken for one."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import msgpack
import pytest

from megatron_gvpo.workers.messages import (
    Begin,
    CallError,
    CallResult,
    Cancel,
    Endpoint,
    Function,
    Importing,
    Load,
    Order,
    Ready,
    RunProgram,
    Score,
    Scores,
    Step,
    Unloadable,
    WireError,
    WorkerReply,
    decode,
    encode,
)

# Values that users' data and policies contain, and that msgspec's own encoder refuses.
ODD = {"digits": 10**40, "half": "\ud83d", "day": date(2026, 1, 2), "price": Decimal("1.10"), "deep": [[[]]]}
ORDERS = [
    Load(["/a"], {"mine.py": b"\xff"}, [Function("rewards.components.0.name=a", "mine.py:f", ODD)], 0.5),
    Scores([b"prompt", b"rollout"], [Score(3, 0, 0, 1)]),
    Step(1, 2, Begin(b"prompt", 2**63, ["\ud800"]), "text", 3.0),
    Step(1, 2, None, "text", 3.0),
    RunProgram(1, b"prompt", Endpoint("http://127.0.0.1:1/v1", "key", 7)),
    Cancel([1, 2]),
]
REPLIES = [
    Ready(overlaps=False),
    Unloadable(0, "it is a class"),
    Importing(3),
    CallResult(1, 2.0),
    CallResult(1, -3.4e38, {"calls": 1.0}, [{"role": "tool", "content": "\ud800", "arguments": ODD}]),
    CallError(1, "KeyError: 'a'", "late"),
]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_arrive_as_they_were_sent(order: Any):
    assert decode(encode(order), Order) == order


@pytest.mark.parametrize("reply", REPLIES)
def test_replies_arrive_as_they_were_sent(reply: Any):
    assert decode(encode(reply), WorkerReply) == reply


@pytest.mark.parametrize(
    "values",
    [
        *(None, 3, "CallResult", [], {}, {"type": "CallResult"}, ["Nothing", 1], [3, 1, 1.0]),
        *(["CallResult"], ["CallResult", 1], ["CallResult", "1", 1.0], ["CallResult", True, 1.0]),
        *(["CallResult", 1, value] for value in (None, "1", True, float("nan"), float("inf"), -1e39, [])),
        ["CallResult", 1, msgpack.ExtType(0, hex(10**400).encode())],
        ["CallResult", 1, msgpack.ExtType(9, b"")],
        *(["CallResult", 1, 1.0, counts] for counts in (None, [], {"a": float("nan")}, {1: 1.0})),
        *(
            ["CallResult", 1, 1.0, {}, messages]
            for messages in ("a", [3], [{"role": "a"}], [{"content": "a"}])
        ),
        ["CallResult", 1, 1.0, {}, [{"role": 1, "content": "a"}]],
        ["CallResult", 1, 1.0, {}, None, 7],
        *(["CallError", 1, "x" * 1001], ["CallError", 1, "x", "killed"], ["CallError", 1, 2]),
        *(["Importing", 1.5], ["Importing"], ["Ready", 1], ["Unloadable", "a", "b"]),
        *(["Cancel", [1]], ["Load", [], {}, [], 0.5]),
    ],
    ids=lambda values: repr(values)[:40],
)
def test_other_values_are_not_replies(values: Any):
    with pytest.raises(WireError):
        decode(msgpack.packb(values), WorkerReply)


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"\xff" * 9, b"\x91" * 60_000, b"\x80\x04\x95cos\nsystem\n(S'touch /tmp/pwned'\ntR."],
    ids=lambda data: repr(data[:12]),
)
def test_other_bytes_are_not_replies(data: bytes):
    with pytest.raises(WireError):
        decode(data, WorkerReply)


def test_a_value_that_is_nested_too_deeply_is_not_sent():
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(WireError):
        encode(CallResult(1, 0.0, {}, [{"role": "tool", "content": "", "deep": deep}]))
