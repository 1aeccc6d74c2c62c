"""Starts the servers of a reward model, a judge or a teacher on this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_gvpo.core.environment import ON_LOOPBACK
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.secrets import remember
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.servers import sglang, vllm
from megatron_gvpo.servers.cpu_engines import check_on_cpu
from megatron_gvpo.servers.launch.start import free_ports_of, given_key, visible
from megatron_gvpo.servers.launch.supervise import ServerProcess, Supervisor
from megatron_gvpo.servers.server import PLUGINS, Launch
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import MODEL, RewardServers, model_servers


@dataclass(frozen=True)
class ServerAddresses:
    """The servers of one model: their addresses and key, and their supervisor if the run started them."""

    section: str  # key of its section, such as rewards.components.0.model.servers
    urls: list[str]
    api_key: str | None = None
    supervisor: Supervisor | None = None
    listens: dict[str, Callable[[], bool]] = field(default_factory=dict)  # by URL


@dataclass(frozen=True)
class Checkpoint:
    """A model that servers start with."""

    path: str
    dtype: str
    trust_remote_code: bool
    generates: bool = True  # a language model; False: a classification model


def open_servers(
    config: Config,
    section: str,
    servers: RewardServers,
    checkpoint: Checkpoint | None,
    report: Callable[[str], None],
    called: str,
) -> ServerAddresses:
    """Find the servers of a section of the configuration, or start them with the checkpoint.

    `called`: the name of such a server in messages. Raises ConfigError.
    """
    if servers.urls:
        return ServerAddresses(section, list(servers.urls), given_key(servers, section))
    assert checkpoint is not None, "without a path there are urls"
    if any(hide(word) != word for word in servers.args):
        raise ConfigError(f"{section}.args: one has a secret, and all users of a machine see command lines")
    api_key = secrets.token_hex(16)
    remember(api_key)
    on_gpu = torch.cuda.is_available()
    where = f"{section.rpartition('.')[0]}.path"
    model = ModelCard.read(checkpoint.path, where)
    if not on_gpu:
        named = f"{where}={checkpoint.path}"
        check_on_cpu(model, servers.engine, checkpoint.dtype, f"{section}.engine", named)
    gpus = list(_gpus(config, section)) if on_gpu else []
    processes = []
    for number, port in enumerate(free_ports_of(servers, section)):
        launch = command(servers, checkpoint, model, section, port, api_key, on_gpu)
        launch.environment.update({n: os.environ.get(n, lo) for n, lo in ON_LOOPBACK.items()})
        if on_gpu:
            own_gpus = gpus[number * servers.tp : (number + 1) * servers.tp]
            launch.environment["CUDA_VISIBLE_DEVICES"] = visible(own_gpus)
        host = f"[{servers.host}]" if ":" in servers.host else servers.host
        log = Path(config.output_dir) / "servers" / f"{port}.log"
        processes.append(ServerProcess(launch, f"http://{host}:{port}", log))
    supervisor = Supervisor(processes, servers, report, section, called)
    try:
        supervisor.start()
    except OSError as error:
        supervisor.close()
        raise ConfigError(
            f"{section}: the servers cannot be started: {error}. {section}.python={servers.python} is to be "
            "the interpreter of the engine's environment"
        ) from None
    listens = {process.url: process.listens for process in processes}
    return ServerAddresses(section, list(listens), api_key, supervisor, listens)


def command(
    servers: RewardServers,
    checkpoint: Checkpoint,
    model: ModelCard,
    section: str,
    port: int,
    api_key: str,
    on_gpu: bool,
) -> Launch:
    """The command that starts a server of the checkpoint, whose card is `model`."""
    environment = {"PYTHONPATH": str(PLUGINS)}
    trust = ["--trust-remote-code"] if checkpoint.trust_remote_code else []
    if servers.engine == "sglang":
        words = [servers.python, "-m", "sglang.launch_server", "--model-path", checkpoint.path]
        words += ["--host", servers.host, "--port", str(port), "--dtype", checkpoint.dtype]
        words += ["--served-model-name", MODEL, "--tp-size", str(servers.tp), "--skip-server-warmup", *trust]
        if not checkpoint.generates:
            words += ["--is-embedding"]
            # A package in PLUGINS.
            environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "megatron_gvpo_reward_models"
        if servers.context_length:
            words += ["--context-length", str(servers.context_length)]
        return sglang.finished_launch(words, environment, servers, api_key, on_gpu, section)
    words = [servers.python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint.path]
    words += ["--served-model-name", MODEL, "--host", servers.host, "--port", str(port)]
    words += ["--dtype", checkpoint.dtype, "--tensor-parallel-size", str(servers.tp), *trust]
    words += [] if checkpoint.generates else ["--runner", "pooling", "--convert", "classify"]
    if servers.context_length:
        words += ["--max-model-len", str(servers.context_length)]
    environment["VLLM_NO_USAGE_STATS"] = "1"
    return vllm.finished_launch(words, environment, servers, api_key, on_gpu, model)


def _gpus(config: Config, section: str) -> Iterator[int]:
    """The GPUs of a section's servers. They follow those of trainer, rollout servers and earlier sections."""
    rollout = config.rollout
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if rollout.uses_servers and not rollout.servers.urls:
        rollout_gpus = rollout.servers.count * rollout.servers.tp
        taken = max(taken, rollout_gpus) if rollout.servers.colocated else taken + rollout_gpus
    wanted = 0
    for name, servers in model_servers(config):
        wanted = servers.count * servers.tp
        if name == section:
            break
        taken += 0 if servers.urls else wanted
    present = torch.cuda.device_count()
    if taken + wanted > present:
        raise ConfigError(
            f"{section}: the servers need {wanted} GPUs beside {taken} that the trainer and other servers "
            f"have, and this machine has {present}: use fewer, or give urls of others"
        )
    return iter(range(taken, taken + wanted))
