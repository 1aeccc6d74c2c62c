"""`megatron-gvpo export`: a checkpoint of a run as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.launch import launch


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("export", help="write a checkpoint as a Hugging Face directory")
    configured.add_arguments(parser)
    configured.add_step(parser, "export the checkpoint of this step (default: the newest)")
    parser.add_argument(
        "--out",
        type=configured.directory,
        required=True,
        metavar="DIR",
        help="directory to write; empty or new",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of model.adapter alone, as Hugging Face PEFT does (default: the whole "
        "model, adapters merged, with the adapters in its folder `adapter`)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint to --out, which must be empty or not exist. Raises ConfigError."""
    from megatron_gvpo.checks.preflight import preflight
    from megatron_gvpo.runs.existing_run import check_empty, check_outside
    from megatron_gvpo.training.environment import prepare

    config = configured.load(options)
    preflight(config, "export", configured.world_size(options))
    configured.check_step(config, options)
    check_empty(Path(options.out), f"--out {options.out}")
    check_outside(Path(options.out), f"--out {options.out}", [Path(config.output_dir, "checkpoints")])
    if options.adapter and config.model.adapter is None:
        raise ConfigError("--adapter: the run trains no adapters (model.adapter is not set)")
    if configured.is_launcher(options):
        return launch(options.nproc, options.command_line)
    prepare(config.parallel, config.rollout)

    def export() -> None:
        from megatron_gvpo.training.conversion import checkpoint_to_hugging_face

        written = checkpoint_to_hugging_face(config, Path(options.out), options.step, options.adapter)
        say(f"step {written} written to {options.out}")

    return run_with_model(export)
