"""The process group of the trainer's rank 0 and the servers' ranks, and where they meet to form it.

The group is made from only a TCPStore and a backend's process group. The default group, torch's table of
groups and torchrun's store are not involved, so that a server that dies does not take the trainer's groups
with it.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.core.environment import LOOPBACK
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.store import host_store
from megatron_gvpo.settings.sections import RolloutConfig

_numbers = itertools.count()


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the trainer (rank 0) and the servers' ranks form a process group for weights."""

    address: str
    port: int
    world_size: int
    # The name is never used twice in a run: a broadcast that a server refused would become the next one's
    # data.
    name: str
    backend: str  # "gloo" or "nccl"
    max_ctas: int | None = None  # blocks of an operation of NCCL's; None: its own choice
    # The run's directory of shared memory, from which the servers read weights. Then the process group has
    # the trainer's ranks alone, the first `members`, and the servers only use its store.
    memory: str = ""
    members: int = 0


class Background:
    """A call in a separate thread, for which the caller need not wait.

    The thread is a daemon, because NCCL (2.30) never returns from a call that connects the ranks if one of
    them does not come.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._problem: Exception | None = None
        self._has_returned = False
        self.result: Any = None
        threading.Thread(target=self._run, name="connect", daemon=True).start()

    def is_completed(self) -> bool:
        """True when the call has returned. If the call has raised an error, this raises it, too."""
        if self._problem is not None:
            raise self._problem
        return self._has_returned

    def _run(self) -> None:
        try:
            self.result = self._call()
            self._has_returned = True
        except Exception as error:  # raised in the thread that calls is_completed
            self._problem = error


class Sending(Background):
    """A broadcast in progress.

    NCCL connects the ranks in the call that begins a group's first broadcast, so this call returns only when
    all ranks have made it. It runs in a thread, and the caller must tell the servers about the broadcast
    meanwhile.
    """

    def is_completed(self) -> bool:
        """True when the broadcast is done. Raises the error of the call that began it, if any."""
        return super().is_completed() and bool(self.result.is_completed())

    def wait(self) -> None:
        """Finish the broadcast, after `is_completed` has returned true.

        Raises torch's RuntimeError if a rank has died.
        """
        self.result.wait()


@dataclass(frozen=True)
class Membership:
    """One rank in a group, which can send to others. The group needs the store as long as it is used."""

    store: dist.Store
    group: Any  # torch's stubs do not take a backend for a process group
    rank: int
    backend: str  # "gloo" or "nccl"


def join(rendezvous: Rendezvous, rank: int, timeout: float, patience: float) -> Membership:
    """Join a group as another rank of the trainer; blocks until all ranks have joined.

    `timeout` and `patience` as in WeightGroup. Raises torch's RuntimeError after the timeout.
    """
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore(rendezvous.address, rendezvous.port, rendezvous.world_size, False, limit)
    return Membership(store, _form(store, rank, rendezvous, limit, patience), rank, rendezvous.backend)


def _form(
    store: dist.Store, rank: int, rendezvous: Rendezvous, timeout: datetime.timedelta, patience: float
) -> Any:
    members = rendezvous.members or rendezvous.world_size
    if rendezvous.backend != "nccl":
        return dist.ProcessGroupGloo(store, rank, members, timeout)
    options = dist.ProcessGroupNCCL.Options()
    # After this time torch's watchdog ends the whole process. The caller's patience ends earlier, and costs
    # only one push.
    options._timeout = datetime.timedelta(seconds=2 * patience + 60)
    if rendezvous.max_ctas is not None:
        options.config.max_ctas = rendezvous.max_ctas
    with _failures_reach_the_caller():
        return dist.ProcessGroupNCCL(store, rank, members, options)


def exchange(
    group: Any, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]] = ()
) -> list[Any]:
    """Begin to send and receive tensors, each to or from its rank; returns the operations to wait for.

    With NCCL they are one operation on the communicator that all ranks share. Messages that are not grouped
    would each get a communicator of two ranks, with buffers and a kernel of its own.
    """
    if not (outgoing or incoming):
        return []
    if group.supports_coalescing:
        group._start_coalescing()
    works = [group.send([wire], target, 0) for target, wire in outgoing]
    works += [group.recv([wire], source, 0) for source, wire in incoming]
    return [group._end_coalescing()] if group.supports_coalescing else works


class WeightGroup:
    """Rank 0's side of the process group."""

    def __init__(
        self,
        address: str,
        world_size: int,
        backend: str,
        timeout: float,
        patience: float,
        max_ctas: int | None = None,
        memory: str = "",
        members: int = 0,
    ) -> None:
        """`timeout` limits the rendezvous; after `patience` the caller closes the group of a broadcast that
        is not done. Both are in seconds. The other arguments are those of Rendezvous."""
        self._timeout = datetime.timedelta(seconds=timeout)
        self._patience = patience
        self._tcp = host_store(address, 0, world_size, self._timeout)
        name = f"weights-{os.getpid()}-{next(_numbers)}"
        self.rendezvous = Rendezvous(
            address, self._tcp.port, world_size, name, backend, max_ctas, memory, members
        )
        self._group: Any = None  # in torch's stubs a backend is not a process group

    def connect(self, prefixes: Sequence[str]) -> None:
        """Block until all ranks have joined. Raises torch's RuntimeError after the timeout.

        `prefixes` are those of the other ranks' keys in the store, outermost first.
        """
        store: dist.Store = self._tcp
        for prefix in prefixes:
            store = dist.PrefixStore(prefix, store)
        self._group = _form(store, 0, self.rendezvous, self._timeout, self._patience)

    def membership(self) -> Membership:
        """Rank 0's own membership. The caller must have called `connect`."""
        return Membership(self._tcp, self._group, 0, self.rendezvous.backend)

    def broadcast(self, tensor: Tensor) -> Sending:
        """Begin a broadcast from this rank to all others; returns at once."""
        assert self._group is not None, "connect first"
        group = self._group
        return Sending(lambda: group.broadcast([tensor], dist.BroadcastOptions()))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


@contextlib.contextmanager
def _failures_reach_the_caller() -> Iterator[None]:
    """NCCL groups made in this context report a failed broadcast to the caller.

    Without it torch would end the whole process, which is the trainer, when a server dies in a broadcast.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # each group reads it when it is made
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def group_address(rollout: RolloutConfig) -> str:
    """The address where servers meet rank 0: from the configuration, or from torchrun.

    Raises ConfigError if a server on another machine cannot reach it, and for an unknown name.
    """
    servers, weights = rollout.servers, rollout.weights
    address = weights.address or os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        # MASTER_ADDR needs no check, because the ranks have met there.
        socket.getaddrinfo(weights.address or "127.0.0.1", None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"rollout.weights.address={address} is not a known host: {error}") from None
    for url in servers.urls if address in LOOPBACK else ():
        if not is_this_machine(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"rollout.weights.address: rollout server {url} cannot meet the trainer at {address}"
                f"{'' if weights.address else ' (the default here)'}: give an address of the "
                "trainer's first node that the server's node reaches"
            )
    return address


def is_this_machine(host: str) -> bool:
    """True if `host` is one of this machine's addresses, or a name that cannot be resolved."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as own:
            own.bind((address[0], 0))  # only one of this machine's addresses can be bound
            return True
    return False
