"""`megatron-gvpo sky`: the SkyPilot task that trains a configuration."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from megatron_gvpo.cli import configured, job_options


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sky",
        help="write a task that trains, for SkyPilot",
        description="Write OUTPUT_DIR/sky/task.yaml: the SkyPilot task that trains this configuration.",
    )
    job_options.add_arguments(parser)
    job_options.add_pod_arguments(
        parser,
        mount="a volume of SkyPilot and where the nodes see it; repeatable",
        secret="a variable, whose value `sky jobs launch --secret NAME` takes from yours; repeatable",
        names=("VOLUME=DIR", "NAME"),
    )
    job_options.add_save_before(
        parser, "seconds that SkyPilot waits for the run to save before it takes the nodes (default: 600)"
    )
    parser.add_argument("--container", metavar="IMAGE", help="image of all nodes (required)")
    parser.add_argument("--gpu", metavar="KIND", help="the nodes' GPUs, as SkyPilot calls them, such as H100")
    parser.add_argument("--dry-run", action="store_true", help="print the task and write nothing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: written or shown. Raises ConfigError."""
    from megatron_gvpo.cluster import sky

    config = configured.load(options)
    job = job_options.pod_job(options, config, container=options.container)
    sky.check_sky(config, options.config, job, options.gpu, shown=options.dry_run)
    text = sky.render(config, options.config, job, options.gpu)
    job_options.note(config, job)
    if options.dry_run:
        print(text, end="")
        return 0
    file = sky.write(config, text)
    job_options.note_no_checkpoints(config)
    print(f"{file}\nstart it: sky jobs launch {shlex.quote(str(file))}")
    return 0
