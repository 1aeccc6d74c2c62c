"""`megatron-gvpo plan`: predicted memory and step time for every layout of some GPUs."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_gvpo.cli.terminal import loading


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predicted memory and step time for every layout of some GPUs",
        description="Predicts; measures nothing. docs/explanation/planner.md says how well.",
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--model", required=True, metavar="NAME|DIR|config.json")
    parser.add_argument("--gpus", required=True, help="all of them, rollouts included", **number)
    parser.add_argument("--gpu", required=True, metavar="NAME", help="h800, h100, h200, a800 or b200")
    parser.add_argument("--prompts", required=True, help="of a step", **number)
    parser.add_argument("--k", required=True, help="responses to a prompt", **number)
    parser.add_argument("--response-length", required=True, metavar="MEAN[,p95=TOKENS][,max=TOKENS]")
    parser.add_argument(
        "--prompt-tokens", default=256, help="in a prompt, on average (default: 256)", **number
    )
    parser.add_argument(
        "--recipe",
        default="gvpo",
        metavar="NAME",
        help="the method: its scoring passes, its critic (default: gvpo)",
    )
    parser.add_argument(
        "--mini-batches", default=1, help="a step's batch, an optimizer update each (default: 1)", **number
    )
    parser.add_argument(
        "--batch-epochs", default=1, help="passes of updates over them (default: 1)", **number
    )
    parser.add_argument(
        "--async-steps", default=1, help="at most so many batches ahead (default: 1)", **number
    )
    parser.add_argument("--fp8", action="store_true", help="layers train in FP8")
    parser.add_argument(
        "--offload",
        default=0.0,
        type=float,
        metavar="FRACTION",
        help="of the optimizer's states, in host memory and updated there (default: 0)",
    )
    parser.add_argument("--top", default=5, help="layouts to show (default: 5)", **number)
    parser.add_argument("--write", metavar="FILE.yaml", help="write the best one as a configuration overlay")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan, as a table or as JSON. Raises ConfigError."""
    with loading("the methods"):
        from megatron_gvpo.cluster.planner.command import run as plan
    return plan(options)
