"""Hosts torch's TCPStore at one address. By itself it listens on all addresses of the machine."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def host_store(address: str, port: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """A TCPStore that this process hosts at `address`:`port`; port 0 finds a free one.

    If `address` belongs to this machine only by translation (a container's published port, for example), the
    store listens on all addresses. Raises OSError for a port that is taken, or a name that does not resolve.
    """
    named: dict[str, Any] = {}
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(place)
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
