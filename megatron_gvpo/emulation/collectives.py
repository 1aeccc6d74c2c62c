"""Runs the collectives of `cuda` tensors with gloo in place of NCCL, over the tensors' own memory.

A collective begins when it is called and ends when the caller waits for it, as with NCCL. The ranks exchange
real messages, in the same order and of the same sizes as NCCL's, but for pieces of different sizes in one
collective. gloo's sums round differently from NCCL's.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_gvpo.core import unequal_pieces
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

# Collectives that may still run, each with the tensors whose memory it reads or writes.
_pending: list[tuple[Any, list[torch.Tensor]]] = []
_backends: dict[int, str] = {}  # requested backend, by id of the group
_NCCL = "nccl"


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of torch.distributed on CPU tensors that share the memory of the arguments."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if any(not t.is_cuda for t in tensors):
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise RuntimeError(f"{func}: NCCL takes tensors of a GPU only, and these are on {devices}")
    if any(not t.is_contiguous() for t in tensors):
        raise RuntimeError(f"{func}: NCCL takes contiguous tensors only")
    moves, is_mixed = "reduce" not in func._schema.name, len({t.dtype for t in tensors}) > 1
    if is_mixed and not moves:
        raise RuntimeError(f"{func}: gloo adds tensors of one dtype only")
    as_bytes = functools.partial(_as_bytes, is_mixed=is_mixed) if moves else alias
    args, kwargs = tree_map_only(torch.Tensor, as_bytes, (args, kwargs))
    result = func(*args, **kwargs)
    _pending[:] = [one for one in _pending if not one[0].is_completed()]
    work = result[-1] if isinstance(result, tuple | list) else result
    if work is None:
        return None
    _pending.append((dist.Work.unbox(work), tensors))
    by_address = {t.data_ptr(): t for t in tensors}
    return tree_map_only(torch.Tensor, lambda t: by_address.get(t.data_ptr(), tensors[0]), result)


def _as_bytes(tensor: torch.Tensor, is_mixed: bool) -> torch.Tensor:
    """Return the CPU alias of a tensor that is only moved, as bytes where gloo would change its dtype.

    gloo does not know the FP8 dtypes, and it copies the tensors of a coalesced collective into one tensor of
    one dtype.
    """
    memory = alias(tensor)
    return memory.view(torch.uint8) if is_mixed or memory.dtype.itemsize == 1 else memory


class Transfer:
    """A message between two ranks. Callers may wait for it more than once, as for a message of NCCL.

    Transformer Engine's ring attention waits twice in its backward. A second wait for gloo's own work object
    would wait for another message, which never comes.
    """

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        self._is_done = False

    def wait(self, *timeout: Any) -> bool:
        if not self._is_done:
            self._work.wait(*timeout)
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        return self._is_done or self._work.is_completed()


class ProcessGroup:
    """Replaces torch's ProcessGroupNCCL for code that makes a process group itself, as a weight push does.

    As with NCCL, the operations between `_start_coalescing` and `_end_coalescing` form one operation, and
    messages have no tags.
    """

    class Options:
        def __init__(self) -> None:
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(max_ctas=None)

    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        # The type is Any because torch's type stubs do not list these methods for a backend.
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._begun: list[Any] | None = None  # the operations since _start_coalescing

    def size(self) -> int:
        return int(self._group.size())

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._begin(self._group.broadcast([_memory(tensor) for tensor in tensors], options))

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        return self._begin(self._group.send([_memory(tensor) for tensor in tensors], target, 0))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._begin(self._group.recv([_memory(tensor) for tensor in tensors], source, 0))

    def abort(self) -> None:
        self._group.abort()

    def _start_coalescing(self) -> None:
        if self._begun is not None:
            raise RuntimeError("a group of operations inside another")
        self._begun = []

    def _end_coalescing(self) -> Any:
        begun, self._begun = self._begun, None
        if begun is None:
            raise RuntimeError("no group of operations has begun")
        return Together(begun)

    def _begin(self, work: Any) -> Any:
        if self._begun is not None:
            self._begun.append(work)
        return work


class Together:
    """Several operations that count as one. A thread waits for them, since gloo does not report their end."""

    def __init__(self, works: list[Any]) -> None:
        self._works, self._outcome = works, Future[None]()
        threading.Thread(target=self._wait_for_all, daemon=True).start()

    def wait(self, *timeout: Any) -> bool:
        self._outcome.result()
        return True

    def is_completed(self) -> bool:
        return self._outcome.done()

    def _wait_for_all(self) -> None:
        try:
            for work in self._works:
                work.wait()
            self._outcome.set_result(None)
        except Exception as error:  # raised in the thread that waits for the group
            self._outcome.set_exception(error)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as bytes on the CPU. Raises RuntimeError for a tensor that NCCL refuses."""
    if not (tensor.is_cuda and tensor.is_contiguous()):
        raise RuntimeError(f"NCCL takes contiguous tensors of a GPU only: one is on {tensor.device}")
    return _as_bytes(tensor, is_mixed=True)


def _waited_for_often(function: Any) -> Any:
    @functools.wraps(function)
    def transfer(*args: Any, **options: Any) -> Transfer | None:
        work = function(*args, **options)
        return None if work is None else Transfer(work)

    return transfer


def install() -> None:
    """Make torch.distributed use gloo wherever a program requests NCCL; `get_backend` still answers "nccl".

    Call it before megatron-core is imported.
    """
    for name, function in [
        ("_new_process_group_helper", _helper_by_gloo(dist.distributed_c10d._new_process_group_helper)),
        ("init_process_group", _init_by_gloo(dist.init_process_group)),
        ("_coalescing_manager", _coalesced_by_gloo(dist.distributed_c10d._coalescing_manager)),
        ("new_group", _new_group_by_gloo(dist.new_group)),
        ("get_backend", _requested_backend(dist.get_backend)),
        ("isend", _waited_for_often(dist.isend)),
        ("irecv", _waited_for_often(dist.irecv)),
        ("all_gather", unequal_pieces.all_gather),
        ("reduce_scatter", unequal_pieces.reduce_scatter),
        ("ProcessGroupNCCL", ProcessGroup),
    ]:
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, function)


def _init_by_gloo(init: Any) -> Any:
    @functools.wraps(init)
    def init_gloo(backend: str | None = None, *args: Any, **options: Any) -> None:
        options.pop("pg_options", None)
        options.pop("device_id", None)
        init("gloo", *args, **options)
        _backends[id(dist.group.WORLD)] = _NCCL if backend is None or _NCCL in backend else backend

    return init_gloo


def _new_group_by_gloo(new_group: Any) -> Any:
    @functools.wraps(new_group)
    def new_gloo(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
    ) -> Any:
        named = {k: v for k, v in options.items() if k not in ("pg_options", "device_id")}
        group = new_group(ranks, timeout, "gloo", **named)
        _backends[id(group)] = backend or _backends[id(dist.group.WORLD)]
        return group

    return new_gloo


def _requested_backend(get_backend: Any) -> Any:
    @functools.wraps(get_backend)
    def requested(group: Any = None) -> str:
        group = dist.group.WORLD if group is None else group
        return _backends[id(group)] if id(group) in _backends else str(get_backend(group))

    return requested


def _coalesced_by_gloo(coalesced: Any) -> Any:
    @functools.wraps(coalesced)
    def without_device(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return coalesced(group, None, async_ops)  # gloo joins the tensors itself, and takes no device

    return without_device


def _helper_by_gloo(new_helper: Any) -> Any:
    @functools.wraps(new_helper)
    def helper_by_gloo(
        size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **options: Any
    ) -> Any:
        if backend != _NCCL:
            return new_helper(size, rank, ranks, backend, store, *args, **options)
        options |= {"backend_options": None}
        # "cuda" becomes a part of the keys in the group's store, and the other ranks look for these keys.
        group, own_store = new_helper(size, rank, ranks, "cuda:gloo", store, *args, **options)
        gloo = group._get_backend(torch.device("cuda"))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group, own_store

    return helper_by_gloo
