"""The preflight of a Python program, in which every rank calls an entry point with the same configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from megatron_gvpo.checks.preflight import Command, preflight
from megatron_gvpo.core.collectives import first_problem
from megatron_gvpo.core.environment import check_rank_variables
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.existing_run import Earlier
from megatron_gvpo.settings.config import Config


def preflight_on_ranks(
    config: Config, command: Command, *, earlier: Earlier | None = None, allowed: Sequence[str] = ()
) -> None:
    """Raise ConfigError on every rank for what `preflight` refuses on any: one node may lack a file.

    Without a process group each rank raises its own.
    """
    problem = None
    try:
        if not dist.is_initialized():
            check_rank_variables()
        preflight(config, command, int(os.environ.get("WORLD_SIZE", "1")), earlier=earlier, allowed=allowed)
    except ConfigError as error:
        problem = str(error)
    if (said := first_problem(problem)) is not None:
        raise ConfigError(said)
