"""The checks before anything heavy is loaded: of the configuration, the model's config.json and the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_gvpo.config.checks.output_dir import check_output_dir
from megatron_gvpo.config.checks.parallel_layout import check_layout
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.schema import Config, read_model_config
from megatron_gvpo.conversations.config import PYTHON
from megatron_gvpo.conversations.sandbox.box import Sandbox
from megatron_gvpo.data.generated import check_installed
from megatron_gvpo.megatron.model.attention_kernel import (
    Attention,
    check_attention,
    check_shared_prompts,
    has_flash_attention,
)
from megatron_gvpo.observe.gpus import list_gpus
from megatron_gvpo.observe.loggers.services import SERVICES
from megatron_gvpo.runs.earlier import Earlier, check_earlier_run, newest_step
from megatron_gvpo.runs.lock import check_unlocked
from megatron_gvpo.runs.record import check_unchanged
from megatron_gvpo.runtime.user_functions import check_source

Command = Literal["train", "eval", "export", "slurm"]


def preflight(
    config: Config,
    command: Command,
    world_size: int,
    *,
    earlier: Earlier | None = None,
    allowed: Sequence[str] = (),
) -> None:
    """Raise ConfigError if `command` cannot run with this configuration in `world_size` processes.

    The command line calls it before it loads torch; `Trainer`, `evaluate`, `checkpoint_to_hugging_face` call
    it for Python users, and `slurm` before the job waits in a queue. `slurm` asks for a job that trains, on
    `world_size` ranks of other machines.

    `earlier`: how `train` or `slurm` treats an earlier run in the output directory; None does not look.
    `allowed`: the keys that change the mathematics and may differ from those of the run that is resumed.
    """
    trains = command in ("train", "slurm")
    check_layout(config, world_size)
    if command in ("train", "eval"):
        _check_attention(config)
    if trains:
        check_output_dir(config)
        if command == "train":  # a job may wait in the queue for the end of the run before it
            check_unlocked(config.output_dir)
        if earlier is not None:
            check_earlier_run(config, earlier)
            if allowed and earlier in ("refuse", "overwrite"):
                raise ConfigError(f"--allow-change {allowed[0]}: nothing is compared without --resume")
            if earlier in ("resume", "auto") and newest_step(Path(config.output_dir)) is not None:
                check_unchanged(config, allowed)
    if command == "train":  # a job's nodes, or its container, may have what this machine lacks
        _check_loggers(config)
    if command == "eval" and config.data.eval is None:
        raise ConfigError("data.eval is missing: it names the held-out prompts")
    if command == "eval" or (trains and config.samples_responses):
        _check_rewards(config)
    if command == "eval" or (command == "train" and config.samples_responses):
        _check_tools(config)


def _check_attention(config: Config) -> None:
    """The GPUs of this machine, where torch will use them, must have an attention kernel for packs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or version("torch").endswith("+cpu"):
        return
    shape = read_model_config(config.model.path)
    for capability in {gpu.compute_capability for gpu in list_gpus()}:
        if capability is None:
            continue
        attention = Attention.of(config.model, config.parallel, config.train.deterministic, shape)
        check_attention(attention, capability, has_flash_attention())
        if config.train.share_prompts:
            check_shared_prompts(attention, capability)


def _check_loggers(config: Config) -> None:
    for service in SERVICES:
        project = getattr(config.logging, service.key)
        if project is not None and find_spec(service.package) is None:
            raise ConfigError(
                f"logging.{service.key}={project}: {service.title} is not installed: "
                f"pip install {service.install}, or leave it out"
            )
    if config.logging.opentelemetry and find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ConfigError(
            "logging.opentelemetry=true: its packages are not installed: "
            "pip install 'megatron-gvpo[opentelemetry]', or leave it out"
        )
    if config.logging.profiler == "nsys" and config.logging.profile_steps and not list_gpus():
        raise ConfigError(
            "logging.profiler=nsys: it records the NVIDIA GPUs of this machine, which has none; "
            "logging.profiler=torch profiles CPUs, too"
        )


def _check_rewards(config: Config) -> None:
    """Files of rewards and environments must exist and be Python. They are imported later, by workers."""
    for i, component in enumerate(config.rewards.components):
        try:
            if component.function is None and component.name == "reasoning_gym":
                check_installed()
        except ValueError as error:
            raise ConfigError(f"rewards.components.{i}.name={component.name}: {error}") from None
        try:
            if component.function is not None:
                check_source(component.function)
        except ValueError as error:
            raise ConfigError(f"rewards.components.{i}.function={component.function}: {error}") from None
    talks = config.rollout.conversation
    named = [] if talks is None else [("environment", talks.environment), ("program", talks.program)]
    named += [] if talks is None else [("tools", tool) for tool in talks.tools]
    for key, spec in named:
        try:
            if spec not in (None, PYTHON):
                check_source(spec)
        except ValueError as error:
            raise ConfigError(f"rollout.conversation.{key}={spec}: {error}") from None


def _check_tools(config: Config) -> None:
    """The tool `python` needs a sandbox, and MCP servers their package, on every machine that samples."""
    talks = config.rollout.conversation
    if talks is not None and talks.mcp and find_spec("mcp") is None:
        raise ConfigError(
            "rollout.conversation.mcp: the package mcp is not installed: pip install 'megatron-gvpo[mcp]'"
        )
    if talks is None or PYTHON not in talks.tools:
        return
    try:
        Sandbox(**talks.sandbox.model_dump()).check()
    except ValueError as error:
        raise ConfigError(f"rollout.conversation.tools: {PYTHON}: {error}") from None
