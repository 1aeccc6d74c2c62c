"""The arguments that name a configuration, shared by the commands that take one."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from megatron_gvpo.config.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG.yaml | key.sub=value",
        help="configuration files, of which later ones win, and single values on top",
    )
    parser.add_argument(
        "--nproc",
        type=_processes,
        default=0,
        metavar="N",
        help="start N ranks on this machine (torchrun works, too)",
    )


def load(options: argparse.Namespace) -> Config:
    """The configuration that the arguments name. Raises ConfigError."""
    from megatron_gvpo.config.schema import load_config

    files = [word for word in options.config if "=" not in word]
    overrides = [word for word in options.config if "=" in word]
    if not files:
        raise ConfigError("no configuration file given: megatron-gvpo train CONFIG.yaml [key.sub=value ...]")
    return load_config(files, overrides)


def world_size(options: argparse.Namespace) -> int:
    """The number of ranks: torchrun's, or --nproc."""
    return int(os.environ.get("WORLD_SIZE", options.nproc or 1))


def is_launcher(options: argparse.Namespace) -> bool:
    """True in the process that is to start the ranks, and is none itself."""
    return options.nproc > 1 and "WORLD_SIZE" not in os.environ


def _processes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of processes, at least 1")
    return int(text)
