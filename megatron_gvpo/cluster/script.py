"""Renders the scripts of jobs from the templates beside this file; writes a job's file to OUTPUT_DIR."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from megatron_gvpo.cluster.job import Job
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.named_file import write_named_file
from megatron_gvpo.settings.config import Config

RANK = ("-m", "megatron_gvpo.cli.rank")  # torchrun runs this module with a command or a program


def command_line() -> str:
    """The command that writes the job, for a comment in the job's file."""
    return shlex.join(["megatron-gvpo", *sys.argv[1:]]).replace("\n", " ")


def render_script(
    template: str, config: Config, arguments: Sequence[str], job: Job, program: str = "train", **more: Any
) -> str:
    """Returns the script of `template`, whose variables are those below and `more`.

    `arguments`: config files and overrides, as `train` takes them. `program`: the `megatron-gvpo` command or
    the FILE.py that every rank runs with them.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_gvpo.cluster", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    servers = config.rollout.servers
    rollout_image = job.rollout_container or job.container
    return environment.get_template(template).render(
        command=command_line(),
        job=job,
        output_dir=shlex.quote(config.output_dir),
        config=shlex.join(arguments),
        program=shlex.join([*RANK, program]),
        split=job.rollout_nodes > 0,
        ordered=config.parallel.tp * config.parallel.cp > 1,  # as in training/environment.py
        served=config.rollout.uses_servers,
        colocated=servers.colocated,
        servers=servers.count,
        over=servers.nodes,
        started=sum(config.started_gpus().values()),
        how=job.how or "''",
        allowed=shlex.join(word for key in job.allow_change for word in ("--allow-change", key)),
        python="python" if job.container else shlex.quote(sys.executable),
        rollout_python="python3" if rollout_image else shlex.quote(sys.executable),
        **more,
    )


def write_job(config: Config, folder: str, name: str, kind: str, begins: str, text: str) -> Path:
    """Writes the job's file, OUTPUT_DIR/folder/name. Raises ConfigError if it cannot be written.

    `kind` and `begins`: as in `write_named_file`; a file that another program wrote stays.
    """
    file = Path(config.output_dir) / folder / name
    option = f"output_dir={config.output_dir}: cannot write {file}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: {error.strerror}") from None
    write_named_file(file, option, kind, begins, text)
    return file


class LineDumper(yaml.SafeDumper):
    """Writes texts of several lines, such as scripts, line by line."""


LineDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
