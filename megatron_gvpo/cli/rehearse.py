"""`megatron-gvpo rehearse`: any rank of a GPU run at true size, on a machine without a GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import loading
from megatron_gvpo.training.environment import quieten


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "rehearse",
        help="run a rank of a GPU run at true size without a GPU",
        description="Runs the trainer's step with the real libraries on a CUDA that computes nothing, and "
        "shows memory, launches, waits, copies and collectives. Model weights are not needed: a config.json "
        "or a known name is enough. docs/howto/rehearse.md says what it cannot see.",
    )
    configured.add_config(parser, "parallel.tp=4", nargs="*")
    number = {"type": configured.integer, "metavar": "N"}
    parser.add_argument("--world", default=8, help="ranks of the run, one a GPU (default: 8)", **number)
    parser.add_argument("--rank", help="the rank to rehearse (default: 0)", **number)
    parser.add_argument(
        "--ranks",
        choices=["all-kinds"],
        help="rehearse one rank of every kind, one after the other, and name the fullest",
    )
    parser.add_argument(
        "--gpu", default="h100", metavar="NAME", help="h100, h200, h800, a100 or b200 (default: h100)"
    )
    parser.add_argument(
        "--memory", type=configured.decimal, metavar="GIB", help="memory of the GPU (default: its own)"
    )
    parser.add_argument(
        "--micro-batches",
        help="micro-batches of an update (default: as many as the peak of memory needs)",
        **number,
    )
    parser.add_argument(
        "--rollouts",
        metavar="PATH",
        help="a file of rollouts or a run's output directory, whose last saved step is trained: its prompts, "
        "responses, groups and rewards (default: rows that fill the micro-batches)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--build",
        action="store_true",
        help="only compile the null CUDA and Transformer Engine's extension, and keep them",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0 if every rank fits, 1 if one does not or fails. Raises ConfigError."""
    quieten()
    with loading("the methods"):
        from megatron_gvpo.rehearsal.command import run as rehearse
        from megatron_gvpo.rehearsal.process import RankFailedError
        from megatron_gvpo.rehearsal.progress import StuckRankError
    try:
        return rehearse(options)
    except (RankFailedError, StuckRankError) as error:
        print(error, file=sys.stderr)
        return 1
