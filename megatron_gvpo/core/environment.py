"""Prepares a process for libraries, before they are loaded: environment variables, and open files."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Mapping

from megatron_gvpo.core.errors import ConfigError

# A variable that only Megatron needs. Servers must not inherit it: SGLang needs 8, vLLM the driver's default.
MEGATRONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Gloo and NCCL connect processes through this network. By themselves they would choose the address of the
# machine's name, which other machines may reach.
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


# --- the variables by which torchrun tells a process its rank ----------------------------------------------


def is_first_process() -> bool:
    """True in the process of rank 0 and in one without ranks, also before the ranks have met."""
    return int(os.environ.get("RANK", "0")) == 0


_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "start the ranks with torchrun or --nproc, or `unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT`"
)


def check_rank_variables(processes: int = 0, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError for variables that no launcher sets alone, such as RANK without WORLD_SIZE.

    `processes`: the number of --nproc; 0 without it.
    """
    values = {name: environment[name] for name in (*_NUMBERS, "MASTER_ADDR") if name in environment}
    for name in _NUMBERS:
        if name in values and not (values[name].isascii() and values[name].isdecimal()):
            raise ConfigError(
                f"the environment has {name}={values[name]!r}, which is not a number: {_REMEDY}"
            )
    if "WORLD_SIZE" not in values:
        stale = [name for name in ("RANK", "LOCAL_RANK") if int(values.get(name, "0")) > 0]
        stale += ["MASTER_ADDR"] if "MASTER_ADDR" in values else []
        if stale:
            raise ConfigError(
                f"the environment has {stale[0]}={values[stale[0]]} and no WORLD_SIZE, perhaps of another "
                f"job: {_REMEDY}"
            )
        return
    size = int(values["WORLD_SIZE"])
    if processes and processes != size:
        raise ConfigError(f"--nproc {processes}, and the environment has WORLD_SIZE={size}: {_REMEDY}")
    if missing := [name for name in _NEEDED if name not in values]:
        raise ConfigError(f"the environment has WORLD_SIZE={size} and no {missing[0]}: {_REMEDY}")
    for rank, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in values and of in values and int(values[rank]) >= int(values[of]):
            raise ConfigError(f"the environment has {rank}={values[rank]} of {of}={values[of]}: {_REMEDY}")
    try:
        socket.getaddrinfo(values["MASTER_ADDR"], None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the environment has MASTER_ADDR={values['MASTER_ADDR']!r}, which is not a known host "
            f"({error}): {_REMEDY}"
        ) from None


def check_network_name(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if GLOO_SOCKET_IFNAME names a network interface that this machine lacks."""
    value = environment.get("GLOO_SOCKET_IFNAME", "")
    here = [name for _, name in socket.if_nameindex()]
    if not {name for name in value.split(",") if name} <= set(here):
        raise ConfigError(
            f"the environment has GLOO_SOCKET_IFNAME={value}, and this machine has the network interfaces "
            f"{', '.join(here)}: name one of them, or unset it"
        )


# --- a process that ends when its parent dies, however the parent dies -------------------------------------

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before a fork, after which little is safe


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; call this first in a new child.

    `parent`: the id of the process that started it. If that has ended already, this process ends at once.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
