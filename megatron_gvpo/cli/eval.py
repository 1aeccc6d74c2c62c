"""`megatron-gvpo eval`: pass@k of a policy on the held-out prompts, as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import loading, say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.lazy_imports import heavy_imports


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure pass@k on the held-out prompts")
    configured.add_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="evaluate the newest checkpoint instead of model.path"
    )
    configured.add_step(parser, "evaluate the checkpoint of this step instead of model.path")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the metrics of `model.path`, or of a checkpoint. Raises ConfigError."""
    from megatron_gvpo.checks.preflight import preflight
    from megatron_gvpo.training.environment import prepare

    config = configured.load(options)
    preflight(config, "eval", configured.world_size(options))
    configured.check_step(config, options)
    if configured.is_launcher(options):
        from megatron_gvpo.core.launch import launch

        return launch(options.nproc, options.command_line)
    prepare(config.parallel, config.rollout)

    def evaluate() -> None:
        with loading("the engine"), heavy_imports():
            from megatron_gvpo.training.evaluate import evaluate
        say(json.dumps(evaluate(config, options.resume or options.step is not None, options.step), indent=2))

    return run_with_model(evaluate)
