"""Where servers meet the trainer's first rank, to form a process group for the weights."""

from __future__ import annotations

import contextlib
import os
import socket
from urllib.parse import urlsplit

from megatron_gvpo.config.schema import Config, ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def group_address(config: Config) -> str:
    """By the configuration, or by torchrun. Raises ConfigError where some server could not reach it."""
    settings, servers = config.rollout.weights, config.rollout.servers
    address = settings.address or os.environ.get("MASTER_ADDR", "127.0.0.1")
    if settings.transport in ("broadcast", "delta") and address in LOOPBACK:
        for url in servers.urls:
            if not is_this_machine(urlsplit(url).hostname or ""):
                raise ConfigError(
                    f"rollout.weights.address: rollout server {url} cannot meet the trainer at {address}"
                    f"{'' if settings.address else ' (the default here)'}: give an address of the trainer's "
                    "first node that the server's node reaches"
                )
    return address


def is_this_machine(host: str) -> bool:
    """Whether one of this machine's own addresses is meant; also for a name that nobody can resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as own:
            own.bind((address[0], 0))  # which only an own address can be
            return True
    return False
