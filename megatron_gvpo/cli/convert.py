"""`megatron-gvpo convert`: weights from a Hugging Face directory to a Megatron one, or back."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "convert", help="convert weights from a Hugging Face directory to a Megatron one, or back"
    )
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face or a Megatron directory")
    parser.add_argument(
        "target", type=configured.directory, metavar="TARGET", help="directory to write; empty or new"
    )
    parser.add_argument(
        "--like",
        metavar="DIR",
        help="when SOURCE is a Megatron directory: the Hugging Face directory the model came from",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write TARGET, which must be empty or not exist. Raises ConfigError."""
    from megatron_gvpo.huggingface.card import ModelCard
    from megatron_gvpo.runs.existing_run import check_empty

    source, target = Path(options.source), Path(options.target)
    check_empty(target, f"TARGET={target}")
    from_megatron = os.path.isfile(source / ".metadata")
    if from_megatron and options.like is None:
        raise ConfigError(
            f"SOURCE={source} is a Megatron checkpoint: --like DIR names the Hugging Face directory that "
            "the model came from"
        )
    if options.like is not None and not from_megatron:
        raise ConfigError(
            f"SOURCE={source} has no .metadata, so it is not a Megatron checkpoint: leave --like out"
        )

    if from_megatron:
        ModelCard.read(options.like, "--like")
    else:
        ModelCard.read(source, "SOURCE")

    def convert() -> None:
        from megatron_gvpo.training.conversion import to_hugging_face, to_megatron

        if from_megatron:
            to_hugging_face(source, target, Path(options.like))
        else:
            to_megatron(source, target)
        say(f"{source} written to {target}")

    return run_with_model(convert)
