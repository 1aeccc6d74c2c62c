"""`megatron-gvpo check`: tests a run before it starts, in about a minute, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import loading, say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.gpu_packages import check_no_null_cuda
from megatron_gvpo.core.lazy_imports import heavy_imports

SHOWN = 600  # the most characters of a prompt or a response


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="look at a run before it starts: prompts, reward, first responses, memory, a tiny step",
        description="Shows prompts as the model sees them, tries the reward, samples from the start model "
        "where it is small enough, trains a tiny model of the same architecture for a step, and says what to "
        "change. Exit code 1: the run could not work.",
    )
    configured.add_config(parser, "optimizer.lr=1e-5")
    parser.add_argument(
        "--world", type=configured.integer, metavar="N", help="ranks of the run (default: the fewest)"
    )
    parser.add_argument(
        "--memory", type=configured.decimal, default=79.6, metavar="GIB", help="of a GPU (default: 79.6)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0 if the run could work, else 1. Raises ConfigError for an invalid configuration."""
    config = configured.load(options)
    check_no_null_cuda()  # otherwise the tiny step would judge values that were never computed
    parallel = config.parallel
    fewest = parallel.pp * max(parallel.tp * parallel.cp, parallel.ep * parallel.etp)
    world = fewest if options.world is None else options.world
    if not 1 <= world <= 65536:
        raise ConfigError(f"--world {world}: must be from 1 to 65536")
    if not 0 < options.memory < 4096:
        raise ConfigError(f"--memory {options.memory}: must be above 0 and below 4096 GiB")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        if os.environ.get(name, value) != value:
            raise ConfigError(f"{name}={os.environ[name]}: this command runs in one process")
    codes: list[int] = []

    def work() -> None:
        with loading("the checks"), heavy_imports():
            from megatron_gvpo.inspection.run import inspect
        result = inspect(config, world, options.memory, lambda v: None if options.json else say(v.line()))
        codes.append(0 if result.could_work else 1)
        if options.json:
            say(json.dumps(result.as_json(), indent=1, ensure_ascii=False))
            return
        _show("prompt, as the model sees it", result.prompts)
        _show("what is trained of a solution", result.solutions)
        _show("response of the start model", result.responses)
        levels = [verdict.level for verdict in result.verdicts]
        conclusion = "the run could work" if result.could_work else "the run could not work"
        say(f"\n{conclusion}: failures {levels.count('failure')}, warnings {levels.count('warning')}")

    return run_with_model(work) or (codes or [1])[0]


def _show(title: str, texts: Sequence[str]) -> None:
    for number, text in enumerate(texts, 1):
        say(f"\n--- {title} ({number} of {len(texts)})\n{text[:SHOWN]}")
