"""A server's address: the key that it needs, who can reach it, and who listens there.

Loads no torch, so that `serve` refuses an address at once.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

import psutil

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.secrets import read_variable
from megatron_gvpo.settings.servers import EngineServers, ServersConfig

# Only looked for, never listened at: who listens at one of these has the port at every address.
WILDCARDS = ("0.0.0.0", "::")
_OWN_NAME = "127.0.1.1"


def check_address(servers: ServersConfig) -> str | None:
    """The servers' key, None on the loopback address.

    Raises ConfigError for a host that other machines cannot reach, and for one that they can, without a key.
    """
    _check_host(servers.host)
    return _needed_key(servers)


def _check_host(host: str) -> None:
    """Raises ConfigError for a name that on this machine has another address than on all others.

    Debian and Ubuntu write a machine's own name beside 127.0.1.1 into its /etc/hosts.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return  # the guard reports the port when it has bound it
    if address == _OWN_NAME != host:
        raise ConfigError(
            f"rollout.servers.host={host}: /etc/hosts gives it {_OWN_NAME} here, and no other machine "
            "reaches that: give the address that others know, or correct the line"
        )


def _needed_key(settings: ServersConfig) -> str | None:
    """The servers' key; None for servers that this machine alone can reach. Raises ConfigError."""
    key = given_key(settings)
    if key is None and not is_loopback(settings.host):
        raise ConfigError(
            f"rollout.servers.host={settings.host}: without a key everyone on its network could use the "
            "servers and load weights into them: export ROLLOUT_KEY=$(openssl rand -hex 16), here and for "
            "the trainer, and give both rollout.servers.api_key_env=ROLLOUT_KEY"
        )
    return key


def given_key(servers: EngineServers, section: str = "rollout.servers") -> str | None:
    """The key in `api_key_env`'s variable; None if none is named. Raises ConfigError."""
    if servers.api_key_env is None:
        return None
    try:
        return read_variable(servers.api_key_env, f"{section}.api_key_env")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def is_loopback(host: str) -> bool:
    """True if only processes of this machine reach a server at `host`; False for an unknown name."""
    try:
        return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))
    except OSError:
        return False


def listens_alone(leader: int, host: str, port: int) -> bool:
    """True if only the process `leader` and its children listen at the address of `host`:`port`."""
    with contextlib.suppress(OSError, psutil.Error):
        listeners = _listeners(host, port)
        return bool(listeners) and _family(leader).issuperset(listeners)
    return False


def stranger(host: str, port: int, leader: int | None = None) -> str | None:
    """A process outside `leader`'s family that listens there, for a message; None if there is none."""
    with contextlib.suppress(OSError, psutil.Error):
        family = set() if leader is None else _family(leader)
        for pid in _listeners(host, port) - family:
            return f"process {pid} ({psutil.Process(pid).name()})" if pid else "a process of another user"
    return None


def check_free(host: str, port: int) -> None:
    """Raise OSError, which says who listens there, if no server can listen at `host`:`port`."""
    for address in _addresses(host):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            # Servers set this option, too, so that a new one can follow one that ended.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                by = stranger(host, port) if error.errno == errno.EADDRINUSE else None
                problem = f"{host}:{port}: " + (f"in use by {by}" if by else str(error.strerror))
                raise OSError(error.errno, problem) from None


def _addresses(host: str) -> set[str]:
    """The IP addresses of a host. Raises OSError for a name that does not resolve."""
    resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(address[0]).split("%")[0] for *_, address in resolved}


def _listeners(host: str, port: int) -> set[int | None]:
    """The processes that listen there; None stands for those of other users."""
    wanted = {*_addresses(host), *WILDCARDS}
    return {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.laddr.ip in wanted
    }


def _family(leader: int) -> set[int | None]:
    if not psutil.pid_exists(leader):
        return {leader}
    return {leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))}
