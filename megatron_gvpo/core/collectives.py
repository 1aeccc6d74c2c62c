"""Exchanges small objects (numbers, strings, lists, dicts) between ranks as msgpack, never as pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.core.user_functions import UserFunctionError, described


def is_first_rank() -> bool:
    """True on rank 0, and in a process without torch.distributed."""
    return not dist.is_initialized() or dist.get_rank() == 0


def all_gather_msgpack(obj: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's object, in rank order. Collective over `group` (default: all ranks).

    Without torch.distributed it returns `[obj]` after the same msgpack round trip, so tuples come back as
    lists for any number of processes.
    """
    data = _pack(obj)
    if not dist.is_initialized():
        return [_unpack(data)]
    data = data.to(_device(group))
    world = dist.get_world_size(group)
    size = torch.tensor([len(data)], device=data.device)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(s) for s in sizes]
    # all_gather needs equal shapes.
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=data.device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [_unpack(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def first_problem(problem: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Returns the problem of the first rank that has one, or None. Collective over `group`.

    The text names that rank, unless all ranks have a problem. Use this for work that may fail on one rank
    alone: an error raised only there would leave the other ranks waiting for it.
    """
    problems = all_gather_msgpack(problem, group)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if not failed:
        return None
    return f"{problems[failed[0]]}{f' (on rank {failed[0]})' if len(failed) < len(problems) else ''}"


@contextmanager
def all_ranks_agree(kind: type[Exception], *also: type[Exception], where: str = "") -> Iterator[None]:
    """Raises `kind` on every rank if the block raises it, or one of `also`, on any. A collective.

    An error that leaves the block on one rank alone would let the other ranks wait for that rank. The message
    is that of the first rank that failed, behind `where`; it names the rank unless all ranks have failed.
    """
    failure: Exception | None = None
    try:
        yield
    except (kind, *also) as error:
        failure = error
    message = first_problem(None if failure is None else f"{where}{failure}")
    if message is not None:
        raise kind(message) from failure


_votes = count()


def all_have_failed(seconds: float) -> bool:
    """Returns True if every rank calls this within `seconds`, on all ranks alike.

    This is not a collective, because ranks that have not failed are waiting elsewhere.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store, key = dist.distributed_c10d._get_default_store(), f"megatron_gvpo/failed/{next(_votes)}"
    if store.add(f"{key}/ranks", 1) == dist.get_world_size():
        return bool(store.compare_set(key, "", "all") == b"all")
    with suppress(RuntimeError):  # the wait timed out, or the rank that hosts the store has ended
        store.wait([key], timedelta(seconds=seconds))
    with suppress(RuntimeError):
        return bool(store.compare_set(key, "", "not all") == b"all")
    return False


def broadcast_msgpack(obj: Any) -> Any:
    """Returns the object of rank 0 on every rank. The `obj` of other ranks is ignored."""
    if not dist.is_initialized():
        return _unpack(_pack(obj))
    device, is_first = _device(None), dist.get_rank() == 0
    data = _pack(obj).to(device) if is_first else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0)
    if not is_first:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0)
    return _unpack(data)


def call_on_rank0(where: str, call: Callable[[], Any]) -> Any:
    """Return the result of rank 0's `call()`, in msgpack's types, on every rank. A collective.

    Every rank raises an error of the user's function as RolloutError, which begins with `where`. So no rank
    waits for another, and the run writes a checkpoint.
    """
    outcome, cause = None, None
    if is_first_rank():
        try:
            outcome = {"value": call()}
        except Exception as error:
            text = str(error) if isinstance(error, UserFunctionError) else described(error)
            outcome, cause = {"error": text}, error
    outcome = broadcast_msgpack(outcome)
    if "error" in outcome:
        raise RolloutError(f"{where}: {outcome['error']}") from cause
    return outcome["value"]


def _pack(obj: Any) -> Tensor:
    # Texts of data and environments may contain halves of surrogate pairs.
    data = msgpack.packb(obj, default=_long, unicode_errors="surrogatepass")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    packed = data.cpu().numpy().tobytes()
    return msgpack.unpackb(packed, ext_hook=_number, strict_map_key=False, unicode_errors="surrogatepass")


def _long(value: Any) -> msgpack.ExtType:
    """Encode an integer of more than 64 bits, which the policy may write in a tool call."""
    if not isinstance(value, int):
        raise TypeError(f"ranks cannot exchange a {type(value).__name__}")
    return msgpack.ExtType(0, hex(value).encode())


def _number(code: int, data: bytes) -> int:
    return int(data, 16)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device on which the group's backend needs its tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
