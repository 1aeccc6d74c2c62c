"""The checks before anything heavy is loaded: of the configuration, the model's config.json and the disk."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.output_dir import check_output_dir, refuse_earlier_run
from megatron_gvpo.config.parallel_layout import check_layout
from megatron_gvpo.config.schema import Config
from megatron_gvpo.runtime.user_functions import check_source

Command = Literal["train", "eval", "export", "slurm"]


def preflight(config: Config, command: Command, world_size: int, *, fresh: bool = True) -> None:
    """Raise ConfigError if `command` cannot run with this configuration in `world_size` processes.

    The command line calls it before it loads torch, `Trainer` for Python users, and `slurm` before the job
    waits in a queue. `slurm` asks for a job that trains, on `world_size` ranks of other machines.

    `fresh`: the run is to start in an output directory without an earlier run (neither --resume nor
    --overwrite was given). Only `train` and `slurm` write there, so other commands ignore it.
    """
    trains = command in ("train", "slurm")
    check_layout(config, world_size)
    if trains:
        check_output_dir(config)
        if fresh:
            refuse_earlier_run(config.output_dir)
    if command == "train":  # a job's nodes, or its container, may have what this machine lacks
        _check_loggers(config)
    if command == "eval" and config.data.eval is None:
        raise ConfigError("data.eval is missing: it names the held-out prompts")
    if command == "eval" or (trains and config.samples_responses):
        _check_rewards(config)


def _check_loggers(config: Config) -> None:
    if config.logging.wandb_project is not None and find_spec("wandb") is None:
        raise ConfigError(
            f"logging.wandb_project={config.logging.wandb_project}: Weights & Biases is not installed: "
            "pip install wandb, or leave it out"
        )


def _check_rewards(config: Config) -> None:
    """Reward files must exist and be Python. They are imported later, by the workers alone."""
    for i, component in enumerate(config.rewards.components):
        try:
            if component.function is not None:
                check_source(component.function)
        except ValueError as error:
            raise ConfigError(f"rewards.components.{i}.function={component.function}: {error}") from None
