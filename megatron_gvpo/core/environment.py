"""Prepares a process for libraries, before they are loaded: environment variables, and open files."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Mapping

from megatron_gvpo.core.errors import ConfigError

# Only Megatron needs it. Servers must not inherit it: SGLang needs 8, and vLLM the driver's default.
MEGATRONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Gloo and NCCL connect processes through sockets of these networks. By themselves they take the address of
# the machine's name, which others may reach.
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


# Checks the variables by which torchrun tells a process its rank: left-overs of another job are named.

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "start the ranks with torchrun or --nproc, or `unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT`"
)


def check_rank_variables(processes: int = 0, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for variables that no launcher has set together, such as RANK without WORLD_SIZE.

    `processes`: the number that --nproc asks for; 0 without it.
    """
    found = {name: environment[name] for name in (*_NUMBERS, "MASTER_ADDR") if name in environment}
    for name in _NUMBERS:
        if name in found and not (found[name].isascii() and found[name].isdecimal()):
            raise ConfigError(f"the environment has {name}={found[name]!r}, which is no number: {_REMEDY}")
    if "WORLD_SIZE" not in found:
        stale = [name for name in ("RANK", "LOCAL_RANK") if int(found.get(name, "0")) > 0]
        stale += ["MASTER_ADDR"] if "MASTER_ADDR" in found else []
        if stale:
            raise ConfigError(
                f"the environment has {stale[0]}={found[stale[0]]} and no WORLD_SIZE, perhaps of another "
                f"job: {_REMEDY}"
            )
        return
    size = int(found["WORLD_SIZE"])
    if processes and processes != size:
        raise ConfigError(f"--nproc {processes}, and the environment has WORLD_SIZE={size}: {_REMEDY}")
    if missing := [name for name in _NEEDED if name not in found]:
        raise ConfigError(f"the environment has WORLD_SIZE={size} and no {missing[0]}: {_REMEDY}")
    for rank, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in found and of in found and int(found[rank]) >= int(found[of]):
            raise ConfigError(f"the environment has {rank}={found[rank]} of {of}={found[of]}: {_REMEDY}")
    try:
        socket.getaddrinfo(found["MASTER_ADDR"], None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the environment has MASTER_ADDR={found['MASTER_ADDR']!r}, no known host ({error}): {_REMEDY}"
        ) from None


# Ends a process when its parent dies, however the parent dies.

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before a fork, after which little is safe


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; call it first in a new child.

    `parent`: the process that started it. Where that is gone by now, this process ends at once.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
