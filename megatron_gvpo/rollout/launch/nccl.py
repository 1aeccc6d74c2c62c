"""Checks that the engine loads the trainer's NCCL, which refuses a process group of two versions."""

from __future__ import annotations

import os
import subprocess

from megatron_gvpo.config.schema import Config, ConfigError
from megatron_gvpo.weights.transports import TRANSPORTS

ASK = "import torch; print('.'.join(map(str, torch.cuda.nccl.version())))"
TIMEOUT = 300.0  # seconds; the first import of torch may be from a network file system


def check_nccl(config: Config, ours: str) -> None:
    """Ask the engine's interpreter for its NCCL, before servers start.

    Raises ConfigError for another version than `ours`. If the interpreter does not answer, nothing is raised:
    the start of the servers will show why.
    """
    python, transport = config.rollout.servers.python, config.rollout.weights.transport
    if not config.rollout.weights.traits.forms_group:
        return
    their_environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        asked = subprocess.run(
            [python, "-c", ASK],
            env=their_environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    theirs = asked.stdout.strip()
    if asked.returncode == 0 and theirs and theirs != ours:
        others = [name for name, traits in TRANSPORTS.items() if not traits.forms_group]
        raise ConfigError(
            f"rollout.servers.python={python} has a torch with NCCL {theirs}, the trainer's has {ours}, and "
            f"NCCL refuses the process group of rollout.weights.transport={transport} between two versions: "
            "install one in both environments (pip install --no-deps nvidia-nccl-cu13==...), or choose a "
            f"transport that needs no group: {' or '.join(others)}"
        )
