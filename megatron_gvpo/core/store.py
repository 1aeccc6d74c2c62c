"""The store at which ranks meet: torch's TCPStore, here at one address instead of all of the machine."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_gvpo.core.errors import ConfigError


def host_store(address: str, port: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """A TCPStore that this process hosts at `address`:`port`; port 0 finds a free one.

    If `address` belongs to this machine only by translation (a container's published port, for example), the
    store listens on all addresses. Raises OSError for a port that is taken, or a name that does not resolve.
    """
    named: dict[str, Any] = {}
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(socket_address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise OSError(error.errno, f"{address}:{port}: {error.strerror}") from None
        else:
            listening.listen(1024)
            port = listening.getsockname()[1]
            named["master_listen_fd"] = listening.detach()  # the store closes it
    return dist.TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False, **named
    )


def meet(backend: str, timeout: timedelta) -> None:
    """Join the process group of torchrun's environment.

    Raises ConfigError for an impossible address, and if some rank does not join in time.
    """
    # torchrun's own store exists already. Otherwise rank 0 hosts one, which torch would bind to all addresses
    # of the machine.
    hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ.get("RANK") == "0"
    rank, address, port, world = (
        os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    )
    address_shown = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    options: dict[str, Any] = {}
    if hosts:
        try:
            tcp = host_store(address, int(port), int(world), timeout)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"{address_shown}: rank 0 cannot listen there: {error}") from None
        # The prefix that torch's own rendezvous uses for the other ranks.
        options = {"store": dist.PrefixStore("default_pg", tcp), "rank": 0, "world_size": int(world)}
    try:
        dist.init_process_group(backend, timeout=timeout, **options)
    except dist.DistError:
        raise ConfigError(
            f"{address_shown}: rank {rank} did not meet all ranks of WORLD_SIZE={world} there within "
            f"parallel.timeout_seconds={timeout.total_seconds():.0f}: see why the others did not come; if "
            "nobody has started them, these variables are another job's: unset them"
        ) from None


SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> Path:
    """The directory of this machine in which runs have their directories of shared memory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
