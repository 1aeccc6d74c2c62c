"""Ends a server when the process that started it ends: `python -IS server_guard.py STARTER COMMAND...`.

The guard leads the server's process group. When the process STARTER ends for any reason, the guard ends the
whole group, because processes that an engine is just starting do not notice that their parents have ended.

A server on several machines has a guard on each (PART in the environment). They start its parts when all
guards have met at machine 0, and where one part ends, the others end as well.
"""

import hashlib
import hmac
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PART = "MEGATRON_GVPO_PART"  # JSON: node, nodes, host and port of the meeting, key
GRACE = 15.0  # seconds between asking the group to end and ending it
ANSWER = 5.0  # seconds in which a guard answers another
GO = b"go"
# Signals that reach the whole group, or every process of a Slurm job; the guard waits for the server's end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    part = json.loads(os.environ.pop(PART, "null"))
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the server would inherit
    starter_ends = os.pidfd_open(starter)
    if os.getppid() != starter:
        return 1  # the process has ended, and another process has its number
    others: list[socket.socket] = []
    if part is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit(1))
        others = gather(part, starter_ends) if part["node"] == 0 else [join(part, starter_ends)]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
    server = subprocess.Popen(command)
    server_ends = os.pidfd_open(server.pid)
    ended = _first([starter_ends, server_ends, *others])
    if server_ends not in ended:
        if starter_ends not in ended:
            print("the server's part on another machine has ended, and so does this one", flush=True)
        os.killpg(0, signal.SIGTERM)
        select.select([server_ends], [], [], GRACE if starter_ends in ended else 1.0)
        os.killpg(0, signal.SIGKILL)  # this also kills the guard
    code = server.wait()
    return code if code >= 0 else 128 - code


def gather(part: dict[str, Any], starter_ends: int) -> list[socket.socket]:
    """On machine 0: wait for the guards of all others and start them; returns the connections to them."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        part["host"], part["port"], type=socket.SOCK_STREAM
    )[0]
    guards: dict[int, socket.socket] = {}
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        while len(guards) < part["nodes"] - 1:
            ready = _first([starter_ends, listener, *guards.values()])
            if starter_ends in ready:
                sys.exit(1)
            for ended in [node for node, other in guards.items() if other in ready]:
                guards.pop(ended).close()  # it ended before all guards had met, and sent nothing
            if listener in ready:
                other, _ = listener.accept()
                node = _who(other, part)
                if node in range(1, part["nodes"]):
                    guards[node] = other
                else:
                    other.close()
    for other in guards.values():
        other.sendall(GO)
    return list(guards.values())


def join(part: dict[str, Any], starter_ends: int) -> socket.socket:
    """On another machine: wait for machine 0 and its order to start; returns the connection to it."""
    while True:
        try:
            other = _watched(socket.create_connection((part["host"], part["port"]), ANSWER))
            node = part["node"].to_bytes(4, "big")
            other.sendall(node + _signed(_read(other, 32) + node, part))
            if starter_ends in _first([starter_ends, other]):
                sys.exit(1)
            if _read(other, len(GO)) == GO:
                return other
        except OSError:  # machine 0 does not listen yet, or has ended before all guards had met
            pass
        if select.select([starter_ends], [], [], 1.0)[0]:
            sys.exit(1)


def _first(waited: Sequence[int | socket.socket]) -> list[int | socket.socket]:
    """Wait until some have ended or have data to read, and return these."""
    return select.select(waited, [], [])[0]


def _who(other: socket.socket, part: dict[str, Any]) -> int:
    """The number of the machine at the other end, which must have the key; -1 for a stranger."""
    challenge = os.urandom(32)
    try:
        _watched(other).settimeout(ANSWER)
        other.sendall(challenge)
        node = _read(other, 4)
        known = hmac.compare_digest(_read(other, 32), _signed(challenge + node, part))
    except OSError:
        return -1
    if not known:
        print("a process without the key wanted to be a part of this server", flush=True)
    return int.from_bytes(node, "big") if known else -1


def _signed(message: bytes, part: dict[str, Any]) -> bytes:
    return hmac.digest(part["key"].encode(), message, hashlib.sha256)


def _read(other: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := other.recv(count - len(data))):
            raise OSError("closed")
        data += more
    return data


def _watched(other: socket.socket) -> socket.socket:
    """The connection, set to end within half a minute after the machine at its other end dies."""
    other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        other.setsockopt(socket.IPPROTO_TCP, option, value)
    return other


if __name__ == "__main__":
    sys.exit(main())
