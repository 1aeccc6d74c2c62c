"""Checks a run's output directory and removes an earlier run's files, so that two runs are never mixed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gvpo.config.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import Config

# Files and directories that a run writes. The directory may also hold files that are not the run's (the
# quickstart keeps its data there), so only these are removed.
OWN = (
    "checkpoints",
    "hf",
    "hf.partial",
    "metrics.jsonl",
    "summary.json",
    "curve.png",
    "samples.jsonl",
    "tensorboard",
    "profile",
    "wandb_run_id",
)


def check_output_dir(config: Config) -> None:
    """Raises ConfigError if a run cannot write to its output directory, or would replace its own inputs."""
    directory = Path(config.output_dir)
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        raise ConfigError(f"output_dir={directory}: {there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={directory}: nothing can be written in {there}: permission denied")
    read = {"model.path": config.model.path, "data.train.path": config.data.train.path}
    if config.data.eval is not None:
        read["data.eval.path"] = config.data.eval.path
    for key, path in read.items():
        for own in (directory / name for name in OWN):
            if Path(path).expanduser().resolve().is_relative_to(own.resolve()):
                raise ConfigError(
                    f"{key}={path} is in {own}, which a run in output_dir={directory} replaces: give another "
                    "output_dir"
                )


def refuse_earlier_run(output_dir: str) -> None:
    """Raises ConfigError if the directory holds files of an earlier run, which this run would replace."""
    if found := [name for name in OWN if os.path.lexists(Path(output_dir) / name)]:
        raise ConfigError(
            f"output_dir={output_dir} holds an earlier run: continue it with --resume, replace it with "
            f"--overwrite, or give another output_dir (there is {', '.join(found)})"
        )


def check_empty(directory: Path, name: str) -> None:
    """Raises ConfigError, which begins with `name`, if `directory` exists and is not empty."""
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{name}: this directory is not empty")


def remove_earlier_run(output_dir: str) -> None:
    """Removes the files of an earlier run, and nothing else."""
    for path in (Path(output_dir) / name for name in OWN):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
