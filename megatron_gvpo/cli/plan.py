"""`megatron-gvpo plan`: predicted memory and step time for every layout of some GPUs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_gvpo.cli.terminal import loading


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict memory and step time of every parallel layout",
        description="All results are predictions; docs/explanation/planner.md reports their accuracy.",
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--model", required=True, metavar="NAME|DIR|config.json", help="a known model, or one's config.json"
    )
    parser.add_argument("--gpus", required=True, help="number of GPUs, with those of all servers", **number)
    parser.add_argument(
        "--reward-gpus",
        default=0,
        help="how many of --gpus serve reward models and judges: the sum of their count x tp (default: 0); "
        "on several nodes they take whole nodes, together with those of --teacher-gpus",
        **number,
    )
    parser.add_argument("--gpu", required=True, metavar="NAME", help="h800, h100, h200, a800 or b200")
    parser.add_argument("--prompts", required=True, help="prompts per step", **number)
    parser.add_argument("--k", required=True, help="responses per prompt", **number)
    parser.add_argument(
        "--response-length",
        required=True,
        metavar="MEAN[,p95=TOKENS][,max=TOKENS]",
        help="tokens of a response",
    )
    parser.add_argument(
        "--prompt-tokens", default=256, help="mean tokens of a prompt (default: 256)", **number
    )
    parser.add_argument(
        "--image-tokens",
        default=0,
        help="how many of --prompt-tokens stand for images (default: 0)",
        **number,
    )
    parser.add_argument(
        "--recipe",
        default="gvpo",
        metavar="NAME",
        help="the method, for its scoring passes and critic (default: gvpo)",
    )
    parser.add_argument(
        "--mini-batches",
        default=1,
        help="optimizer updates per pass over a step's batch (default: 1)",
        **number,
    )
    parser.add_argument("--batch-epochs", default=1, help="passes over a step's batch (default: 1)", **number)
    parser.add_argument(
        "--async-steps", default=1, help="largest number of batches sampled ahead (default: 1)", **number
    )
    parser.add_argument(
        "--adapter-rank",
        default=0,
        help="train adapters of this rank on all linear layers (default: 0, train all weights)",
        **number,
    )
    parser.add_argument("--fp8", action="store_true", help="train the layers in FP8")
    parser.add_argument(
        "--offload",
        default=0.0,
        type=float,
        metavar="FRACTION",
        help="share of the optimizer's states in host memory (default: 0)",
    )
    parser.add_argument(
        "--share-prompts",
        action="store_true",
        help="plan with train.share_prompts: compute a group's prompt once",
    )
    parser.add_argument(
        "--speculate",
        metavar="TOKENS,acceptance=SHARE[,draft=text]",
        help="speculative rollouts: tokens proposed at a time, and the share that is accepted",
    )
    parser.add_argument(
        "--teacher",
        metavar="NAME|DIR|config.json",
        help="the teacher, for a recipe that has one, such as opd; held by the trainer",
    )
    parser.add_argument(
        "--teacher-gpus",
        default=0,
        help="how many of --gpus serve the teacher instead (default: 0, the trainer holds it)",
        **number,
    )
    parser.add_argument("--top", default=5, help="number of layouts to show (default: 5)", **number)
    parser.add_argument("--write", metavar="FILE.yaml", help="write the best layout as a configuration file")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the plan as JSON")
    shown.add_argument(
        "--rehearse",
        action="store_true",
        help="also rehearse the best three layouts, each about a minute (docs/howto/rehearse.md)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan, as a table or as JSON; returns 0, or 1 if the best layout's rehearsal does not fit.

    Raises ConfigError.
    """
    with loading("the methods"):
        from megatron_gvpo.planner.command import run as plan
    planned = plan(options)
    if not options.rehearse:
        return 0
    from megatron_gvpo.rehearsal import of_plan
    from megatron_gvpo.rehearsal.process import RankFailedError

    try:
        return of_plan.show(planned, options)
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
