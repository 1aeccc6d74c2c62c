"""Starts the servers of a reward model, a judge or a teacher on this machine."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.secrets import remember
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.servers import sglang, vllm
from megatron_gvpo.servers.cpu_engines import check_on_cpu
from megatron_gvpo.servers.launch.addresses import given_key
from megatron_gvpo.servers.launch.start import (
    free_ports_of,
    loopback_variables,
    refuse_secrets,
    server_process,
    supervised,
    visible,
)
from megatron_gvpo.servers.launch.supervise import Supervisor
from megatron_gvpo.servers.server import Launch
from megatron_gvpo.settings.reward_servers import MODEL, RewardServers


@dataclass(frozen=True)
class ServerAddresses:
    """The servers of one model: their addresses and key, and their supervisor if the run started them."""

    section: str  # configuration key of the servers, such as rewards.components.0.model.servers
    urls: list[str]
    api_key: str | None = None
    supervisor: Supervisor | None = None
    listens: dict[str, Callable[[], bool]] = field(default_factory=dict)  # by URL


@dataclass(frozen=True)
class Checkpoint:
    """A model that servers start with."""

    path: str
    card: ModelCard
    dtype: str
    trust_remote_code: bool
    generates: bool = True  # a language model; False: a classification model


def open_servers(
    section: str,
    servers: RewardServers,
    checkpoint: Checkpoint | None,
    output_dir: str,
    first_gpu: int,
    report: Callable[[str], None],
    called: str,
) -> ServerAddresses:
    """Find the servers of a section of the configuration, or start them with the checkpoint.

    `output_dir`: the run's, which gets the servers' logs. `first_gpu`: the first of the GPUs that they take.
    `called`: the name of such a server in messages. Raises ConfigError.
    """
    if servers.urls:
        return ServerAddresses(section, list(servers.urls), given_key(servers, section))
    assert checkpoint is not None, "without a path there are urls"
    refuse_secrets(servers, section)
    api_key = secrets.token_hex(16)
    remember(api_key)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _check_gpus(section, servers, first_gpu)
    else:
        named = f"{section.rpartition('.')[0]}.path={checkpoint.path}"
        check_on_cpu(checkpoint.card, servers.engine, checkpoint.dtype, f"{section}.engine", named)
    processes = []
    for number, port in enumerate(free_ports_of(servers, section)):
        launch = _launch(servers, checkpoint, section, port, api_key, on_gpu)
        launch.environment.update(loopback_variables())
        if on_gpu:
            own = first_gpu + number * servers.tp
            launch.environment["CUDA_VISIBLE_DEVICES"] = visible(range(own, own + servers.tp))
        processes.append(server_process(launch, servers, port, output_dir))
    supervisor = supervised(processes, servers, report, output_dir, section, called)
    listens = {process.url: process.listens for process in processes}
    return ServerAddresses(section, list(listens), api_key, supervisor, listens)


def _launch(
    servers: RewardServers,
    checkpoint: Checkpoint,
    section: str,
    port: int,
    api_key: str,
    on_gpu: bool,
) -> Launch:
    """The command that starts a server of the checkpoint."""
    dialect = sglang if servers.engine == "sglang" else vllm
    path, dtype, trusts_code = checkpoint.path, checkpoint.dtype, checkpoint.trust_remote_code
    command = dialect.base_command(servers, path, dtype, port, trusts_code)
    command += ["--served-model-name", MODEL]
    environment: dict[str, str] = {}
    if servers.engine == "sglang":
        if not checkpoint.generates:
            command += ["--is-embedding"]
            # The name of a package in PLUGINS.
            environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "megatron_gvpo_reward_models"
        return sglang.finished_launch(command, environment, servers, api_key, on_gpu, section)
    if not checkpoint.generates:
        command += ["--runner", "pooling", "--convert", "classify"]
    return vllm.finished_launch(command, environment, servers, api_key, on_gpu, checkpoint.card)


def _check_gpus(section: str, servers: RewardServers, first: int) -> None:
    """Raises ConfigError if this machine has too few GPUs for servers whose first GPU is `first`."""
    wanted, present = servers.count * servers.tp, torch.cuda.device_count()
    if first + wanted > present:
        raise ConfigError(
            f"{section}: the servers need {wanted} GPUs beside {first} that the trainer and other servers "
            f"have, and this machine has {present}: use fewer, or give urls of others"
        )
