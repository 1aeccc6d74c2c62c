"""The command line of this room: `megatron-gvpo slurm`, `plan` and `doctor --cluster`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import Config

TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what it tells a rank


def add(commands: Any, configured: argparse.ArgumentParser) -> None:
    """Add the subcommands; `configured` has the arguments that name a configuration."""
    _add_plan(commands)
    slurm = commands.add_parser(
        "slurm",
        parents=[configured],
        help="a Slurm job for a configuration",
        description="Write OUTPUT_DIR/slurm/job.sbatch: the job that trains this configuration.",
    )
    number = {"type": int, "metavar": "N"}
    slurm.add_argument("--nodes", required=True, help="for the trainer", **number)
    slurm.add_argument("--rollout-nodes", default=0, help="more nodes, for the rollout servers", **number)
    slurm.add_argument("--ranks-per-node", default=8, help="GPUs of a node (default: 8)", **number)
    slurm.add_argument("--no-gpus", action="store_true", help="on CPUs, over gloo")
    slurm.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="=--OPTION",
        help="an option of sbatch, such as --sbatch=--partition=h800 or --sbatch=--time=12:00:00; repeatable",
    )
    slurm.add_argument(
        "--save-before",
        default=600,
        type=int,
        metavar="SECONDS",
        help="save and requeue so long before the time limit (default: 600)",
    )
    slurm.add_argument(
        "--container", metavar="IMAGE", help="run in this image: FILE.sif by Apptainer, others by pyxis"
    )
    slurm.add_argument("--rollout-container", metavar="IMAGE", help="another image for the servers")
    slurm.add_argument(
        "--mount", action="append", default=[], metavar="DIR", help="a directory that the containers see"
    )
    earlier = slurm.add_mutually_exclusive_group()
    earlier.add_argument("--resume", dest="how", action="store_const", const="--resume", default="")
    earlier.add_argument("--overwrite", dest="how", action="store_const", const="--overwrite")
    what = slurm.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show the script and do nothing")
    what.add_argument("--submit", action="store_true", help="submit it too")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="predicted memory and step time for every layout of some GPUs",
        description="Predicts; measures nothing. docs/explanation/planner.md says how well.",
    )
    number = {"type": int, "metavar": "N"}
    plan.add_argument("--model", required=True, metavar="NAME|DIR|config.json")
    plan.add_argument("--gpus", required=True, help="all of them, rollouts included", **number)
    plan.add_argument("--gpu", required=True, metavar="NAME", help="h800, h100, h200, a800 or b200")
    plan.add_argument("--prompts", required=True, help="of a step", **number)
    plan.add_argument("--k", required=True, help="responses to a prompt", **number)
    plan.add_argument("--response-length", required=True, metavar="MEAN[,p95=TOKENS][,max=TOKENS]")
    plan.add_argument("--prompt-tokens", default=256, help="of a prompt, on average (default: 256)", **number)
    plan.add_argument(
        "--recipe",
        default="gvpo",
        metavar="NAME",
        help="the method: its scoring passes, its critic (default: gvpo)",
    )
    plan.add_argument(
        "--mini-batches", default=1, help="a step's batch, an optimizer update each (default: 1)", **number
    )
    plan.add_argument("--batch-epochs", default=1, help="passes of updates over them (default: 1)", **number)
    plan.add_argument("--async-steps", default=1, help="at most so many batches ahead (default: 1)", **number)
    plan.add_argument("--fp8", action="store_true", help="layers train in FP8")
    plan.add_argument(
        "--offload",
        default=0.0,
        type=float,
        metavar="FRACTION",
        help="of the optimizer's states, in host memory and updated there (default: 0)",
    )
    plan.add_argument("--top", default=5, help="layouts to show (default: 5)", **number)
    plan.add_argument("--write", metavar="FILE.yaml", help="write the best one as a configuration overlay")
    plan.add_argument("--json", action="store_true")


def run_slurm(options: argparse.Namespace, config: Config) -> int:
    """0: written, shown or submitted; 1: Slurm does not take it. Raises ConfigError."""
    from megatron_gvpo.cluster import slurm
    from megatron_gvpo.cluster.job import Job, check
    from megatron_gvpo.config.schema import ConfigError

    if options.nproc:
        raise ConfigError(
            f"--nproc {options.nproc}: a job has --nodes times --ranks-per-node processes; leave it out"
        )
    job = Job(
        nodes=options.nodes,
        rollout_nodes=options.rollout_nodes,
        ranks_per_node=options.ranks_per_node,
        gpus=not options.no_gpus,
        sbatch=tuple(options.sbatch),
        save_before=options.save_before,
        container=options.container,
        rollout_container=options.rollout_container,
        mounts=tuple(options.mount),
        how=options.how,
    )
    check(config, job)
    script = slurm.render(config, options.config, job)
    if unseen := slurm.unseen(config, options.config, job):
        print(
            f"note: containers see {os.getcwd()} and what --mount names, and these are elsewhere: "
            f"{', '.join(unseen)}",
            file=sys.stderr,
        )
    if options.dry_run:
        print(script, end="")
        return 0
    file = slurm.write(config, script)
    if not config.checkpoint.every:
        print("note: checkpoint.every=0, so a failed node would cost all steps so far", file=sys.stderr)
    if not options.submit:
        print(f"{file}\nsubmit it from here: sbatch {shlex.quote(str(file))}")
        return 0
    try:
        number = slurm.submit(file)
    except slurm.SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"job {number}; its output: {config.output_dir}/slurm/{number}.out")
    if reason := slurm.never_starts(number):
        print(f"error: the job waits, and will not start: {reason} (scancel {number})", file=sys.stderr)
        return 1
    return 0


def add_checkup(doctor: argparse.ArgumentParser) -> None:
    """Add the options of `doctor --cluster`."""
    doctor.add_argument(
        "--cluster",
        action="store_true",
        help="compare the ranks of an allocation with each other (under torchrun)",
    )
    doctor.add_argument(
        "--directory", default=".", metavar="DIR", help="on the shared file system (default: .)"
    )
    doctor.add_argument("--url", action="append", default=[], help="of a rollout server; repeatable")
    doctor.add_argument("--gpu", metavar="NAME", help="compare links with what this GPU's description says")


def run_checkup(options: argparse.Namespace) -> int:
    """0: no rank differs; 1: one does, a link is slow, or ranks cannot meet; 2: wrong input."""
    from megatron_gvpo.cluster.planner import workload
    from megatron_gvpo.config.schema import ConfigError

    try:
        gpu = workload.gpu(options.gpu) if options.gpu else None
        _check_checkup(options)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    from megatron_gvpo.cluster import checkup

    return checkup.main(options.directory, options.url, gpu)


def _check_checkup(options: argparse.Namespace) -> None:
    from megatron_gvpo.config.schema import ConfigError

    if options.json:
        raise ConfigError("--json: `doctor --cluster` has its lines only; leave it out")
    for url in options.url:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: expected http://HOST:PORT, the address of a rollout server")
    if missing := [name for name in TORCHRUN if not os.environ.get(name, "").strip()]:
        raise ConfigError(
            "doctor --cluster compares ranks: start it with `torchrun ... -m megatron_gvpo doctor "
            f"--cluster`, on a Slurm cluster with one torchrun a node (not set here: {', '.join(missing)})"
        )


def misplaced(options: argparse.Namespace) -> str | None:
    """What is said of options of `doctor --cluster` without --cluster."""
    given = {"--directory": options.directory != ".", "--url": options.url, "--gpu": options.gpu}
    names = [name for name, value in given.items() if value]
    return f"{', '.join(names)}: for doctor --cluster only" if names else None
