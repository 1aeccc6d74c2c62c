"""`megatron-gvpo doctor`: checks this machine before a run, or with --cluster a complete allocation."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from megatron_gvpo.core.errors import ConfigError

TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun for each rank


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="report what this machine has and what is missing")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="compare the ranks of an allocation with each other (under torchrun)",
    )
    parser.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="with --cluster: a directory on the shared file system (default: .)",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help="with --cluster: the address of a rollout server; repeatable",
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="with --cluster: compare the links with the description of this GPU"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: ready; 1: not ready; 2: wrong input. Raises ConfigError."""
    if options.cluster:
        return _check_cluster(options)
    options_given = {"--directory": options.directory != ".", "--url": options.url, "--gpu": options.gpu}
    if names := [name for name, value in options_given.items() if value]:
        raise ConfigError(f"{', '.join(names)}: for doctor --cluster only")
    from megatron_gvpo.cluster import doctor

    return doctor.main(as_json=options.json)


def _check_cluster(options: argparse.Namespace) -> int:
    """0: no rank differs; 1: one does, a link is slow, or ranks cannot meet; 2: wrong input."""
    from megatron_gvpo.planner import workload

    try:
        gpu = workload.gpu(options.gpu) if options.gpu else None
        _check_options(options)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":  # the same on every rank
            print(f"error: {error}", file=sys.stderr)
        return 2
    from megatron_gvpo.cluster import checkup

    return checkup.main(options.directory, options.url, gpu)


def _check_options(options: argparse.Namespace) -> None:
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
