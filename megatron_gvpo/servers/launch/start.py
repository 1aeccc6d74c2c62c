"""Starts the rollout servers of one machine: their command lines, GPUs, ports and logs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_gvpo.core.environment import ON_LOOPBACK
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.launch import free_ports
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.secrets import remember
from megatron_gvpo.core.store import shared_memory
from megatron_gvpo.huggingface.architectures import check_family
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.complete_weights import stored_tensors
from megatron_gvpo.servers.cpu_engines import check_rollout_model
from megatron_gvpo.servers.launch.addresses import check_free, is_loopback
from megatron_gvpo.servers.launch.server_guard import PART
from megatron_gvpo.servers.launch.supervise import RanksProcess, ServerProcess, Supervisor
from megatron_gvpo.servers.server import Launch, Server
from megatron_gvpo.servers.sglang import SGLang
from megatron_gvpo.servers.speculation import check_draft
from megatron_gvpo.servers.vllm import VLLM
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig
from megatron_gvpo.settings.servers import AFTER_PORT, EngineServers, ServersConfig, run_directory
from megatron_gvpo.settings.transports import TRANSPORTS

DIALECTS: dict[str, type[Server]] = {"sglang": SGLang, "vllm": VLLM}


def start_servers(
    model: ModelConfig,
    rollout: RolloutConfig,
    output_dir: str,
    cards: ModelCards,
    key: str | None,
    report: Callable[[str], None],
) -> Supervisor:
    """Start `rollout.servers.count` servers on this machine, under a supervisor. Raises ConfigError.

    `output_dir`: the run's; the servers write their logs there, and read weights below it.
    """
    servers = rollout.servers
    refuse_secrets(servers, "rollout.servers")
    if key is not None:
        remember(key)
    ports = free_ports_of(servers, "rollout.servers")
    _check_served_model(model, rollout, cards)
    gpus = server_gpus(servers, torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    on_gpu = torch.cuda.is_available()
    processes = [
        _process(model, rollout, output_dir, cards, key, port, gpus[number] if on_gpu else None)
        for number, port in enumerate(ports)
    ]
    return supervised(processes, servers, report, output_dir)


def refuse_secrets(servers: EngineServers, section: str) -> None:
    """Raises ConfigError for a secret among the words that the user adds to command lines."""
    if any(hide(word) != word for word in servers.args):
        raise ConfigError(
            f"{section}.args: one has a secret, and all users of a machine can read command lines: name "
            f"a key's environment variable in {section}.api_key_env"
        )


def server_process(launch: Launch, servers: EngineServers, port: int, output_dir: str) -> ServerProcess:
    """The process of a server that answers at `port` of this machine, not started yet."""
    host = f"[{servers.host}]" if ":" in servers.host else servers.host
    return ServerProcess(launch, f"http://{host}:{port}", _logs(output_dir) / f"{port}.log")


def supervised(
    processes: Sequence[ServerProcess],
    servers: EngineServers,
    report: Callable[[str], None],
    output_dir: str,
    section: str = "rollout.servers",
    kind: str = "rollout server",
) -> Supervisor:
    """Start the processes under a supervisor, which calls each a `kind`. Raises ConfigError."""
    supervisor = Supervisor(processes, servers, report, section, kind)
    try:
        supervisor.start()
    except OSError as error:
        supervisor.close()
        raise ConfigError(
            f"{kind}s cannot be started: {error}. Their logs go to {_logs(output_dir)}; "
            f"{section}.python={servers.python} is to be the interpreter of the engine's environment"
        ) from None
    return supervisor


def _check_served_model(model: ModelConfig, rollout: RolloutConfig, cards: ModelCards) -> None:
    """Raise ConfigError for a model, a draft, an interpreter or an NCCL with which no server can start."""
    check_family(cards.served, f"{cards.served_key}={cards.served_path}")
    stored_tensors(Path(cards.served_path), cards.served_key)
    check_draft(rollout.speculation, cards)
    if shutil.which(rollout.servers.python) is None:
        raise ConfigError(
            f"rollout.servers.python={rollout.servers.python}: there is no such program, or it may not be "
            "run; name the one of the engine's own environment (docs/howto/rollout_servers.md)"
        )
    if torch.cuda.is_available():
        check_nccl(rollout, ".".join(map(str, torch.cuda.nccl.version())))
    else:
        check_rollout_model(model, rollout, cards)


def _process(
    model: ModelConfig,
    rollout: RolloutConfig,
    output_dir: str,
    cards: ModelCards,
    key: str | None,
    port: int,
    gpus: range | None,
) -> ServerProcess:
    """The process of the server at `port`, not started yet. `gpus`: None on a machine without GPUs."""
    servers = rollout.servers
    # Only the server's HTTP interface asks for the key.
    server_key = None if servers.node else key
    launch = DIALECTS[rollout.engine].launch(model, rollout, cards, port, server_key, gpus is not None)
    # Servers may map and read these directories alone (megatron_gvpo_memory). A user may name another
    # directory of weights.
    weights = os.environ.get("MEGATRON_GVPO_WEIGHTS", str(run_directory(output_dir, rollout.weights)))
    launch.environment["MEGATRON_GVPO_MEMORY"] = str(shared_memory())
    launch.environment["MEGATRON_GVPO_WEIGHTS"] = weights
    if servers.nodes > 1:
        launch.environment[PART] = _part(servers, key)
    if is_loopback(servers.host):
        launch.environment.update(loopback_variables())
    launch.environment.update(_memory_settings(servers, gpus))
    if servers.node:
        machine = f"http://{servers.leader}:{port}, machine {servers.node} of {servers.nodes}"
        return RanksProcess(launch, machine, _logs(output_dir) / f"{port}_{servers.node}.log")
    return server_process(launch, servers, port, output_dir)


def loopback_variables() -> dict[str, str]:
    """Environment variables with which a server's ranks meet within this machine."""
    return {name: os.environ.get(name, network) for name, network in ON_LOOPBACK.items()}


def _memory_settings(servers: ServersConfig, gpus: range | None) -> dict[str, str]:
    """Environment variables that choose a server's GPUs and how its memory is allocated."""
    if gpus is None:  # a server keeps the memory that it frees: fresh pages cost more than a copy
        return {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
    # Newer releases of torch have a second NCCL backend, whose ranks meet in another way.
    settings = {"CUDA_VISIBLE_DEVICES": visible(gpus), "TORCH_DIST_USE_NCCL2": "0"}
    if servers.colocated:  # SGLang's memory saver refuses expandable segments, which help the trainer
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        settings |= dict.fromkeys(names, "expandable_segments:False")
    return settings


def _logs(output_dir: str) -> Path:
    return Path(output_dir) / "servers"


def _part(servers: ServersConfig, key: str | None) -> str:
    """The options by which this machine's guard meets the guards of the server's other machines."""
    if not servers.port:
        raise ConfigError(
            f"rollout.servers.port=0 with rollout.servers.nodes={servers.nodes}: give all its machines one "
            "port"
        )
    if servers.node and servers.leader is None:
        raise ConfigError(
            f"rollout.servers.leader is missing: machine {servers.node} of a server needs the address of "
            "machine 0"
        )
    address = {"host": servers.leader or servers.host, "port": servers.port + AFTER_PORT["guards"]}
    return json.dumps({"node": servers.node, "nodes": servers.nodes, **address, "key": key or ""})


def free_ports_of(servers: EngineServers, section: str) -> list[int]:
    """A free port for each server. Raises ConfigError, which names the process that has one."""
    key = f"{section}.host={servers.host}, {section}.port={servers.port}"
    try:
        if not servers.port:
            return free_ports(servers.count, servers.host)
        ports = [servers.port + i for i in range(servers.count)]
        for port in ports:
            check_free(servers.host, port)
        return ports
    except socket.gaierror as error:
        raise ConfigError(f"{section}.host={servers.host}: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {error.strerror}") from None


def server_gpus(servers: ServersConfig, present: int, ranks: int) -> list[range]:
    """Each server's GPUs. This machine has `present` GPUs; the trainer has the first `ranks` of them.

    Raises ConfigError if there are too few. A machine without GPUs (`present` is 0) passes.
    """
    first = 0 if servers.colocated else ranks
    each = servers.tp // servers.nodes
    wanted = servers.count * each
    if present and first + wanted > present:
        over = f" / rollout.servers.nodes={servers.nodes}" if servers.nodes > 1 else ""
        needed = f"{wanted} GPUs beside the trainer's {first}" if first else f"{wanted} GPUs"
        raise ConfigError(
            f"rollout.servers.count={servers.count} x rollout.servers.tp={servers.tp}{over}: {needed}, "
            f"and this machine has {present}; use fewer, let them share with the trainer "
            "(rollout.servers.colocated=true), or start them elsewhere (megatron-gvpo serve)"
        )
    return [range(first + i * each, first + (i + 1) * each) for i in range(servers.count)]


def visible(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs, numbered among those that this process may see."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ",".join(devices[i].strip() if devices != [""] else str(i) for i in gpus)


def report(message: str) -> None:
    """Tell the user something, beside the progress display."""
    print(hide(message), file=sys.stderr, flush=True)


# Checks that the engine loads the trainer's NCCL, which refuses a process group of two versions.

ASK = "import torch; print('.'.join(map(str, torch.cuda.nccl.version())))"
TIMEOUT = 300.0  # seconds; the first import of torch may be from a network file system


def check_nccl(rollout: RolloutConfig, own_version: str) -> None:
    """Ask the engine's interpreter for its NCCL, before servers start.

    Raises ConfigError for another version than `own_version`. If the interpreter does not answer, nothing is
    raised: the start of the servers will show why.
    """
    python, transport = rollout.servers.python, rollout.weights.transport
    if not rollout.weights.traits.forms_group:
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        answer = subprocess.run(
            [python, "-c", ASK],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    version = answer.stdout.strip()
    if answer.returncode == 0 and version and version != own_version:
        others = [name for name, traits in TRANSPORTS.items() if not traits.forms_group]
        raise ConfigError(
            f"rollout.servers.python={python} has a torch with NCCL {version}, the trainer's has "
            f"{own_version}, and NCCL refuses the process group of rollout.weights.transport={transport} "
            "between two versions: install one in both environments (pip install --no-deps "
            "nvidia-nccl-cu13==...), or choose a "
            f"transport that needs no group: {' or '.join(others)}"
        )
