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


MOST_KEYS, MOST_NAMES, LONGEST_VALUE = 4, 12, 24  # columns of keys, further names, characters of a value


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
    """Print the table. Raises ConfigError for a directory that cannot be read, and for an unknown metric."""
    from megatron_gvpo.core.metric_names import entry
    from megatron_gvpo.runs.listing import differing, find_runs

    try:
        runs = find_runs(options.directory, options.best)
    except OSError as error:
        raise ConfigError(f"{options.directory}: {error.strerror}") from None
    if runs and all(run.best is None for run in runs) and entry(options.best) is None:
        raise ConfigError(f"--best {options.best}: no run there has this metric, and no metric has this name")
    if options.json:
        columns = differing(runs)
        fields = [
            {name: getattr(run, name) for name in run.__dataclass_fields__}
            | {"settings": {key: column[i] for key, column in columns.items()}}
            for i, run in enumerate(runs)
        ]
        say(json.dumps(fields, indent=2, default=str))
    elif runs:
        say(_table(runs, differing(runs), options))
    else:
        say(f"{options.directory}: no runs there")
    return 0


def _table(runs: list[RunSummary], columns: dict[str, list[Any]], options: argparse.Namespace) -> str:
    """The table; keys that differ among the runs are its last columns, as many as have room."""
    shown = list(columns)[:MOST_KEYS]
    rows = [("run", "state", "step", "checkpoint", "reward", f"best {options.best}", *shown)]
    for i, run in enumerate(runs):
        best = "-" if run.best is None else f"{run.best:.4g} at step {run.best_step}"
        name = run.directory.relative_to(options.directory)
        reward = "-" if run.reward is None else f"{run.reward:.3f}"
        numbers = (_number(run.step), _number(run.checkpoint), reward, best)
        rows.append((str(name), run.state, *numbers, *(_short(columns[key][i]) for key in shown)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if more := list(columns)[MOST_KEYS:]:
        names = ", ".join(more[:MOST_NAMES]) + (", ..." if len(more) > MOST_NAMES else "")
        lines.append(f"{len(more)} more keys differ: {names}; report RUN RUN ... shows all")
    if damaged := [str(run.directory.relative_to(options.directory)) for run in runs if run.is_damaged]:
        lines.append(f"damaged metrics.jsonl: {', '.join(damaged)}; report RUN names the line")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, default=str).strip('"')
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
