"""`megatron-gvpo serve`: the rollout servers of this machine."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_gvpo.cli import configured


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run the rollout servers of this machine")
    configured.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Keep the servers running until SIGTERM or SIGINT. Raises ConfigError."""
    from megatron_gvpo.huggingface.card import ModelCards
    from megatron_gvpo.servers.launch.serve import serve

    config = configured.load(options)
    return serve(config.model, config.rollout, config.output_dir, ModelCards(config))
