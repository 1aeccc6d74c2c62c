"""Checks of a running server's key: requests need it, and nobody else can read it."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from socket import SOCK_DGRAM

import psutil
import pytest

from megatron_gvpo.servers.launch.supervise import ServerProcess

PATHS = ("/v1/models", "/server_info", "/update_weights", "/collective_rpc", "/pause", "/nowhere")


def assert_key_is_wanted(process: ServerProcess, key: str) -> None:
    """Only /health needs no key."""
    for path in PATHS:
        for headers in ({}, {"Authorization": f"Bearer {key}0"}, {"Authorization": key}):
            request = urllib.request.Request(f"{process.url}{path}", headers=headers)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=30)
    request = urllib.request.Request(f"{process.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert urllib.request.urlopen(request, timeout=30).status == 200


def assert_key_is_hidden(process: ServerProcess, key: str) -> None:
    """The key is neither in the processes' command lines (ps) nor in any file; all ports are on loopback."""
    assert process.pid is not None
    _assert_listens_on_loopback(process.pid)
    lines = _command_lines(process.pid)
    assert len(lines) > 1 and not any(key in line for line in lines)
    assert [file for file in process.log.parent.iterdir() if key in file.read_text()] == []
    assert process.log.stat().st_mode & 0o777 == 0o600


def _assert_listens_on_loopback(group: int) -> None:
    """All processes of the group listen on loopback alone."""
    leader = psutil.Process(group)
    sockets = [
        (each.name(), socket.laddr)
        for each in (leader, *leader.children(recursive=True))
        for socket in each.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN or (socket.type == SOCK_DGRAM and not socket.raddr)
    ]
    assert sockets and [each for each in sockets if not ip_address(each[1].ip).is_loopback] == []


def _command_lines(group: int) -> list[str]:
    """The command lines of a process group's processes."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):  # the process has ended
            if os.getpgid(int(process.name)) == group:
                lines.append((process / "cmdline").read_text())
    return lines
