"""Starts the rollout servers of one machine: their command lines, GPUs, ports and logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_gvpo.config.schema import Config, ConfigError, ServersConfig
from megatron_gvpo.rollout.nccl import check_nccl
from megatron_gvpo.rollout.server import Server
from megatron_gvpo.rollout.sglang import SGLang
from megatron_gvpo.rollout.supervise import ServerProcess, Supervisor, free_ports
from megatron_gvpo.rollout.vllm import VLLM

DIALECTS: dict[str, type[Server]] = {"sglang": SGLang, "vllm": VLLM}


def start_servers(config: Config, key: str | None, report: Callable[[str], None]) -> Supervisor:
    """Start `rollout.servers.count` servers on this machine, under a supervisor. Raises ConfigError."""
    servers = config.rollout.servers
    dialect = DIALECTS[config.rollout.engine]
    first = servers.port
    ports = [first + i for i in range(servers.count)] if first else free_ports(servers.count, servers.host)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        check_nccl(config, ".".join(map(str, torch.cuda.nccl.version())))
    gpus = server_gpus(servers, torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    logs = Path(config.output_dir) / "servers"
    processes = []
    for i, port in enumerate(ports):
        launch = dialect.launch(config, port, key, on_gpu)
        if on_gpu:
            launch.environment["CUDA_VISIBLE_DEVICES"] = visible(gpus[i])
            if servers.colocated:  # SGLang's memory saver refuses expandable segments, which help the trainer
                names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
                launch.environment.update(dict.fromkeys(names, "expandable_segments:False"))
        else:  # a server keeps the memory that it frees: fresh pages for large tensors cost more than a copy
            large = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
            launch.environment.update(large)
        processes.append(ServerProcess(launch, f"http://{servers.host}:{port}", logs / f"{port}.log"))
    supervisor = Supervisor(processes, servers, report)
    try:
        supervisor.start()
    except OSError as error:
        supervisor.close()
        raise ConfigError(
            f"rollout servers cannot be started: {error}. Their logs go to {logs}; "
            f"rollout.servers.python={servers.python} is to be the interpreter of the engine's environment"
        ) from None
    return supervisor


def server_gpus(servers: ServersConfig, present: int, ranks: int) -> list[range]:
    """Each server's GPUs. This machine has `present` GPUs; the trainer has the first `ranks` of them.

    Raises ConfigError where there are too few. A machine without GPUs (`present` is 0) passes.
    """
    first = 0 if servers.colocated else ranks
    wanted = servers.count * servers.tp
    if present and first + wanted > present:
        needed = f"{wanted} GPUs beside the trainer's {first}" if first else f"{wanted} GPUs"
        raise ConfigError(
            f"rollout.servers.count={servers.count} x rollout.servers.tp={servers.tp}: {needed}, "
            f"and this machine has {present}; use fewer, let them share with the trainer "
            "(rollout.servers.colocated=true), or start them elsewhere (megatron-gvpo serve)"
        )
    return [range(first + i * servers.tp, first + (i + 1) * servers.tp) for i in range(servers.count)]


def visible(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs, numbered among those that this process may see."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ",".join(ours[i].strip() if ours != [""] else str(i) for i in gpus)


def report(message: str) -> None:
    """Tell the user something, beside the progress display."""
    print(message, file=sys.stderr, flush=True)
