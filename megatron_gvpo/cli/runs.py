"""`megatron-gvpo runs`: the runs below a directory as a table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli.terminal import say
from megatron_gvpo.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.runs.listing import RunSummary


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("runs", help="list the runs below a directory: state, step, best evaluation")
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where to look (default: runs)",
    )
    parser.add_argument(
        "--best",
        default="eval/pass@1",
        metavar="METRIC",
        help="show the step with the highest value of this metric (default: eval/pass@1)",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError for a directory that cannot be read."""
    from megatron_gvpo.runs.listing import find_runs

    try:
        runs = find_runs(options.directory, options.best)
    except OSError as error:
        raise ConfigError(f"{options.directory}: {error.strerror}") from None
    if options.json:
        fields = [{name: getattr(run, name) for name in run.__dataclass_fields__} for run in runs]
        say(json.dumps(fields, indent=2, default=str))
    elif runs:
        say(_table(runs, options))
    else:
        say(f"{options.directory}: no runs there")
    return 0


def _table(runs: list[RunSummary], options: argparse.Namespace) -> str:
    rows = [("run", "state", "step", "checkpoint", "reward", f"best {options.best}")]
    for run in runs:
        best = "-" if run.best is None else f"{run.best:.4g} at step {run.best_step}"
        name = run.directory.relative_to(options.directory)
        reward = "-" if run.reward is None else f"{run.reward:.3f}"
        rows.append((str(name), run.state, _number(run.step), _number(run.checkpoint), reward, best))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
