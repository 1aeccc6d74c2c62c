"""`megatron-gvpo k8s`: the JobSet that trains a configuration on Kubernetes."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from megatron_gvpo.cli import configured, job_options


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "k8s",
        help="write a JobSet that trains, for Kubernetes",
        description="Write OUTPUT_DIR/k8s/jobset.yaml: the JobSet that trains this configuration.",
    )
    job_options.add_arguments(parser)
    job_options.add_pod_arguments(
        parser,
        mount="a PersistentVolumeClaim and where the pods see it; repeatable",
        secret="a Secret of the cluster, whose keys become variables; repeatable",
        names=("CLAIM=DIR", "NAME"),
    )
    job_options.add_save_before(
        parser, "seconds from the signal to stop a pod to its end, in which the run saves (default: 600)"
    )
    parser.add_argument("--container", metavar="IMAGE", help="image of the pods (required)")
    parser.add_argument(
        "--rollout-container", metavar="IMAGE", help="image of the servers' pods (default: the same)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the JobSet and write nothing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: written or shown. Raises ConfigError."""
    from megatron_gvpo.cluster import k8s

    config = configured.load(options)
    job = job_options.pod_job(
        options, config, container=options.container, rollout_container=options.rollout_container
    )
    k8s.check_k8s(config, options.config, job, shown=options.dry_run)
    text = k8s.render(config, options.config, job)
    job_options.note(config, job)
    if options.dry_run:
        print(text, end="")
        return 0
    file = k8s.write(config, text)
    job_options.note_no_checkpoints(config)
    print(f"{file}\nstart it: kubectl apply -f {shlex.quote(str(file))}")
    return 0
