"""Shows who listens at an address of this machine, so that no key is sent to a process that took the port."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

import psutil

WILDCARDS = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """True if only processes of this machine reach a server at `host`; False for an unknown name."""
    try:
        return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))
    except OSError:
        return False


def listens_alone(leader: int, host: str, port: int) -> bool:
    """True if the process `leader` and its children listen where `host`:`port` leads, and nobody else."""
    with contextlib.suppress(OSError, psutil.Error):
        found = _listeners(host, port)
        return bool(found) and _family(leader).issuperset(found)
    return False


def stranger(host: str, port: int, leader: int | None = None) -> str | None:
    """A process outside `leader`'s family that listens there, for a message; None if there is none."""
    with contextlib.suppress(OSError, psutil.Error):
        ours = set() if leader is None else _family(leader)
        for pid in _listeners(host, port) - ours:
            return f"process {pid} ({psutil.Process(pid).name()})" if pid else "a process of another user"
    return None


def check_free(host: str, port: int) -> None:
    """Raise OSError, which says who listens there, if no server can listen at `host`:`port`."""
    for address in _addresses(host):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, after one that ended
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                by = stranger(host, port) if error.errno == errno.EADDRINUSE else None
                problem = f"{host}:{port}: " + (f"in use by {by}" if by else str(error.strerror))
                raise OSError(error.errno, problem) from None


def _addresses(host: str) -> set[str]:
    """The IP addresses of a host. Raises OSError for a name that does not resolve."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(address[0]).split("%")[0] for *_, address in found}


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
