"""`megatron-gvpo eval`: pass@k of a policy on the held-out prompts, or named evaluations through lm-eval."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import loading, refuse, say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.core.launch import launch
from megatron_gvpo.core.lazy_imports import heavy_imports

if TYPE_CHECKING:
    from megatron_gvpo.evals.catalog import ChosenEvaluations
    from megatron_gvpo.evals.run import Outcomes
    from megatron_gvpo.settings.config import Config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure pass@k on the held-out prompts, or named evaluations")
    configured.add_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="evaluate the newest checkpoint instead of model.path"
    )
    configured.add_step(parser, "evaluate the checkpoint of this step instead of model.path")
    parser.add_argument(
        "--tasks",
        metavar="NAME,NAME",
        help="named evaluations through lm-eval instead of the held-out prompts: "
        "gsm8k, math500, aime24, gpqa, ifeval, humaneval",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="with --tasks: a directory with the data, NAME/SPLIT.jsonl or .parquet; default: what the hub's "
        "cache in HF_HOME has, or the hub",
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="with --tasks: only the first N problems of each"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --tasks: print one JSON object instead of a line each"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the metrics of `model.path`, or of a checkpoint. Raises ConfigError."""
    from megatron_gvpo.checks.preflight import preflight
    from megatron_gvpo.training.environment import prepare

    choice = _choice(options)
    config = configured.load(options)
    preflight(config, "eval" if choice is None else "named eval", configured.world_size(options))
    configured.check_step(config, options)
    if configured.is_launcher(options):
        return launch(options.nproc, options.command_line)
    prepare(config.parallel, config.rollout)
    if choice is not None:
        return _evaluate_named(config, choice, options)

    def evaluate() -> None:
        with loading("the engine"), heavy_imports():
            from megatron_gvpo.training.evaluate import evaluate
        say(json.dumps(evaluate(config, options.resume or options.step is not None, options.step), indent=2))

    return run_with_model(evaluate)


def _choice(options: argparse.Namespace) -> ChosenEvaluations | None:
    """The named evaluations that the options ask for; None for the held-out prompts. Raises ConfigError."""
    from megatron_gvpo.evals.catalog import ChosenEvaluations, check_installed, chosen

    if options.tasks is None:
        for name in ("data", "limit", "json"):
            if getattr(options, name):
                raise ConfigError(f"--{name} is of named evaluations: give --tasks, or leave it out")
        return None
    evaluations = chosen(options.tasks)
    check_installed()
    directory = None if options.data is None else Path(options.data)
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--data {directory}: there is no such directory")
    return ChosenEvaluations(evaluations, directory, options.limit)


def _evaluate_named(config: Config, choice: ChosenEvaluations, options: argparse.Namespace) -> int:
    """Print a line of each evaluation as it ends; 1 if one failed."""
    from megatron_gvpo.evals.definitions import prepare

    try:
        prepared = prepare(choice) if os.environ.get("RANK", "0") == "0" else None
    except DataError as error:
        return refuse(error)
    outcomes: list[Outcomes] = []

    def evaluate() -> None:
        with loading("the engine"), heavy_imports():
            from megatron_gvpo.training.evaluate import evaluate_named
        tell = partial(say, file=sys.stderr) if options.json else say
        resume = options.resume or options.step is not None
        outcomes.append(evaluate_named(config, choice, resume, options.step, prepared=prepared, tell=tell))

    code = run_with_model(evaluate)
    if not outcomes:
        return code
    if options.json:
        results = {result.name: result.as_json() for result in outcomes[0].measured}
        say(json.dumps({"results": results, "failed": outcomes[0].failed}, indent=2))
    return code or int(bool(outcomes[0].failed))


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a number of problems, 1 or more")
    return int(text)
