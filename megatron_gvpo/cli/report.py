"""`megatron-gvpo report`: one HTML file with a run's curves, samples and configuration."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import say
from megatron_gvpo.core.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("report", help="write a page with the curves and samples of runs")
    add_runs(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: report.html in the first RUN)"
    )
    parser.set_defaults(run=run)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """The arguments that `report` and `watch` share."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="output directory of a run; give several to compare them",
    )
    parser.add_argument(
        "--responses",
        type=configured.integer,
        default=10_000,
        metavar="N",
        help="show at most about N responses, of evenly chosen steps (default: 10000)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the page. Raises ConfigError for a directory without a run and a file that cannot be written.

    Only a page that `report` wrote before is replaced.
    """
    from megatron_gvpo.core.named_file import PAGE, check_named_file, write_named_file
    from megatron_gvpo.observe.report import Reporter, page_text

    check(options)
    file = options.out or options.runs[0] / "report.html"
    target = (file, f"--out {file}", "a page that `report` wrote", PAGE)
    if options.out is not None:  # a first RUN that is not a run is named as such
        check_named_file(*target)
    report = Reporter(options.runs, options.responses).report()
    write_named_file(*target, page_text(report))
    say(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for a wrong number of responses, or a run that is not a directory."""
    if options.responses < 0:
        raise ConfigError(f"--responses {options.responses}: want 0 or more")
    for run in options.runs:
        if os.path.lexists(run) and not os.path.isdir(run):
            raise ConfigError(f"{run} is not a directory; give the output_dir of a run")
