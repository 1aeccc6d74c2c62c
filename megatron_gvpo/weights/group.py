"""A process group of the trainer's first rank and the servers' ranks, beside all others.

It is made from a TCPStore and a backend's process group alone: the default group, torch's table of groups and
torchrun's own store are not touched (a server that dies must not take the trainer's groups with it).
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

from megatron_gvpo.config.schema import Config, ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_numbers = itertools.count()


@dataclass(frozen=True)
class Rendezvous:
    """Where the trainer (rank 0) and the ranks of the servers form a process group for the weights."""

    address: str
    port: int
    world_size: int
    # Never used twice in a run: a broadcast that a server refused would become the next one's data.
    name: str
    backend: str  # "gloo" or "nccl"


class Sending:
    """A broadcast under way.

    NCCL connects the ranks in the call that begins a group's first broadcast, which returns when all of them
    have begun theirs: so a thread of its own makes that call, and whoever has to tell the others goes on.
    """

    def __init__(self, begin: Callable[[], dist.Work]) -> None:
        self._begin = begin
        self._work: dist.Work | None = None
        self._problem: Exception | None = None
        # A daemon: where a rank never comes, NCCL (2.30) lets nobody out of that call.
        threading.Thread(target=self._run, name="broadcast", daemon=True).start()

    def is_completed(self) -> bool:
        """Raises what the call raised."""
        if self._problem is not None:
            raise self._problem
        return self._work is not None and self._work.is_completed()

    def wait(self) -> None:
        """To be called when it is completed. Raises RuntimeError (torch's) where a rank has gone."""
        assert self._work is not None
        self._work.wait()

    def _run(self) -> None:
        try:
            self._work = self._begin()
        except Exception as error:  # for the thread that asks
            self._problem = error


class WeightGroup:
    """Rank 0 of the group. `port` 0 of the store: the system chooses one."""

    def __init__(self, address: str, world_size: int, backend: str, timeout: float, patience: float) -> None:
        """In seconds, `timeout` to meet, and `patience`: how long a broadcast may take before the caller
        closes the group."""
        self._timeout = datetime.timedelta(seconds=timeout)
        self._patience = patience
        self._tcp = dist.TCPStore(
            address, 0, world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        name = f"weights-{os.getpid()}-{next(_numbers)}"
        self.meeting = Rendezvous(address, self._tcp.port, world_size, name, backend)
        self._group: Any = None  # torch's stubs do not make backends process groups

    def connect(self, prefixes: Sequence[str]) -> None:
        """Blocks until all ranks are there. Raises RuntimeError (torch's) after the timeout.

        `prefixes`: what the other ranks put before their keys in the store, outermost first.
        """
        store: dist.Store = self._tcp
        for prefix in prefixes:
            store = dist.PrefixStore(prefix, store)
        world = self.meeting.world_size
        if self.meeting.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            # When an operation takes longer, torch's watchdog ends the whole process: the caller's patience
            # ends first, and costs one push.
            options._timeout = datetime.timedelta(seconds=2 * self._patience + 60)
            with _failures_are_ours():
                self._group = dist.ProcessGroupNCCL(store, 0, world, options)
        else:
            self._group = dist.ProcessGroupGloo(store, 0, world, self._timeout)

    def broadcast(self, tensor: Tensor) -> Sending:
        """From this rank to all others; returns at once."""
        assert self._group is not None, "connect first"
        group = self._group
        return Sending(lambda: group.broadcast([tensor], dist.BroadcastOptions()))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()


@contextlib.contextmanager
def _failures_are_ours() -> Iterator[None]:
    """NCCL groups made inside leave a broadcast that failed to whoever asked for it.

    Without this torch ends the whole process as soon as it sees one: the trainer, with a server that died.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read by each group as it is made
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def group_address(config: Config) -> str:
    """The address where servers meet rank 0: from the configuration, or from torchrun.

    Raises ConfigError if a server on another machine cannot reach it.
    """
    servers = config.rollout.servers
    address = config.rollout.weights.address or os.environ.get("MASTER_ADDR", "127.0.0.1")
    for url in servers.urls if address in LOOPBACK else ():
        if not is_this_machine(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"rollout.weights.address: rollout server {url} cannot meet the trainer at {address}"
                f"{'' if config.rollout.weights.address else ' (the default here)'}: give an address of the "
                "trainer's first node that the server's node reaches"
            )
    return address


def is_this_machine(host: str) -> bool:
    """True if `host` is one of this machine's addresses, or a name that cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as own:
            own.bind((address[0], 0))  # only one of this machine's addresses can be bound
            return True
    return False
