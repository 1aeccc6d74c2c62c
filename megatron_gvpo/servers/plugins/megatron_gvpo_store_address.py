"""Lets torch's TCPStore listen at the address it is given. By itself it listens on all of the machine's.

Each engine calls `bind_stores` in every process, as one of its general plugins.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function of torch has the same name
_TCPStore = rendezvous.TCPStore


def bind_stores() -> None:
    """From here on a process that hosts the store of a default process group binds it to its own address."""
    setattr(rendezvous, "TCPStore", bound_store)  # noqa: B010 - a function in place of the class


def bound_store(host_name: str, port: int, *arguments: Any, **named: Any) -> Any:
    """A TCPStore; if this process hosts it, on a socket bound to `host_name` alone."""
    if not named.get("is_master"):
        return _TCPStore(host_name, port, *arguments, **named)
    family, _, _, _, address = socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError:  # a translated address: the store listens on all addresses, as torch does
        listening.close()
    else:
        listening.listen(1024)
        port = listening.getsockname()[1]
        named["master_listen_fd"] = listening.detach()  # the store closes it
    return _TCPStore(host_name, port, *arguments, **named)
