"""The earlier run in an output directory: continued, refused or replaced, and never mixed with another."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.jsonl import read_metrics

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config


# Files and directories that a run writes. The directory may also hold files that are not the run's (the
# quickstart keeps its data there), so only these are removed.
OWN = (
    "checkpoints",
    "hf",
    "hf.partial",
    "hf_best",
    "hf_best.partial",
    "exports",
    "metrics.jsonl",
    "summary.json",
    "curve.png",
    "rollouts",
    "tensorboard",
    "profile",
    "wandb_run_id",
    "mlflow_run_id",
    "mlflow.db",
    "mlruns",
    "swanlab",
    "swanlab_run_id",
    "config.yaml",
    "run.json",
)
# Files that other commands write about a run: they go with it, and alone they are no run.
_ABOUT = ("report.html",)
# The first line of config.yaml, which distinguishes it from a user's own file.
HEADER = "# The configuration of the run in this directory, as merged. Written by megatron-gvpo.\n"
EXPORT = "export.json"  # in an export, with the step of its weights
# Those of them that a run writes after its last checkpoint only.
_LAST = ("hf", "summary.json", "curve.png")

# How a run treats an earlier one: `refuse` refuses to start; `resume` continues it and refuses to start where
# there is no checkpoint; `auto` continues it, and starts if there is none; `overwrite` replaces it.
Earlier = Literal["refuse", "resume", "auto", "overwrite"]


def earlier_of(resume: bool | Literal["auto"], overwrite: bool) -> Earlier:
    """The treatment that the arguments of `Trainer`, or the options of `train`, ask for."""
    if overwrite:
        return "overwrite"
    return "auto" if resume == "auto" else "resume" if resume else "refuse"


def check_earlier_run(config: Config, earlier: Earlier) -> None:
    """Raises ConfigError if a run may not start, or has nothing to continue. It changes nothing."""
    directory = Path(config.output_dir)
    if earlier == "refuse":
        _refuse(directory)
    if earlier in ("resume", "auto") and newest_step(directory) is not None:
        _check_metrics(directory / "metrics.jsonl")
    elif earlier in ("resume", "auto"):
        place, there = directory / "checkpoints", _there(directory)
        if _has_lost_checkpoints(config, there):
            raise ConfigError(
                f"output_dir={directory} holds an earlier run whose checkpoints are gone: there is none in "
                f"{place}. Put them back, replace the run with --overwrite, or give another output_dir "
                f"(there is {', '.join(there)})"
            )
        if earlier == "resume":
            raise ConfigError(
                f"output_dir={directory}: there is no checkpoint in {place} to continue from: start a run "
                "without --resume, or give --resume=auto, which continues a run where there is one"
            )


def checkpoint_steps(directory: Path) -> list[int]:
    """The steps of the complete checkpoints of the run in `directory`, damaged or not, in rising order."""
    found = [
        path.stem.removeprefix("step_")
        for path in (directory / "checkpoints").glob("step_*")
        if path.suffix in ("", ".replaced") and (path / "state.json").is_file()
    ]
    return sorted({int(step) for step in found if step.isdecimal()})


def newest_step(directory: Path) -> int | None:
    """The step of the newest complete checkpoint of the run in `directory`, damaged or not; else None."""
    return max(checkpoint_steps(directory), default=None)


def exported_step(directory: Path) -> int | None:
    """The step of a run's weights in a Hugging Face directory that it has written; None for any other."""
    step = _content(directory / EXPORT).get("step")
    return step if type(step) is int else None


def _is_unreported(directory: Path, step: int) -> bool:
    """True if the engine failed after the step's updates: its evaluation and its record are missing."""
    return "unreported" in _content(directory / "checkpoints" / f"step_{step:08d}" / "state.json")


def _content(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where the file is missing, damaged or something else."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(file.read_text()), dict):
            return found
    return {}


def check_step(output_dir: str, step: int) -> None:
    """Raises ConfigError, which lists the steps, for a --step of which there is no checkpoint."""
    there = checkpoint_steps(Path(output_dir))
    if step not in there:
        raise ConfigError(
            f"--step {step}: {Path(output_dir) / 'checkpoints'} has no complete checkpoint of this step (it "
            f"has: {', '.join(map(str, there)) or 'none'})"
        )


def finished(config: Config) -> str | None:
    """A sentence for the user if the run in the output directory is finished, else None."""
    directory, steps = Path(config.output_dir), config.train.steps
    newest = newest_step(directory)
    if newest is None or newest < steps:
        return None
    if config.checkpoint.export_hf and exported_step(directory / "hf") != newest:
        return None  # none, or one of fewer steps: the run was ended before it
    if _is_unreported(directory, newest):
        return None
    return (
        f"output_dir={directory}: this run is finished, nothing is left to do: its newest checkpoint is of "
        f"step {newest}, and train.steps={steps}. To train on, give more steps, such as "
        f"train.steps={2 * newest}"
    )


def remove_earlier_run(output_dir: str) -> None:
    """Removes the files of an earlier run, and nothing else."""
    for path in (Path(output_dir) / name for name in (*OWN, *_ABOUT)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _check_metrics(file: Path) -> None:
    """Raises ConfigError for metrics that cannot be continued. A last line that was cut off is normal."""
    try:
        if file.exists():
            read_metrics(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{error}: the metrics of the run are damaged; mend the line, or move the file away to go on "
            "without the records so far"
        ) from None


def _refuse(directory: Path) -> None:
    if found := _there(directory):
        raise ConfigError(
            f"output_dir={directory} holds an earlier run: continue it with --resume, replace it with "
            f"--overwrite, or give another output_dir (there is {', '.join(found)})"
        )


def _has_lost_checkpoints(config: Config, there: list[str]) -> bool:
    """True if a run without checkpoints has had some: it cannot be started again without losing something.

    A run makes the directory `checkpoints` before it writes anything else.
    """
    if not there:
        return False
    if "checkpoints" not in there or set(there) & {*_LAST}:
        return True
    every, metrics = config.checkpoint.every, Path(config.output_dir) / "metrics.jsonl"
    if not every or not metrics.is_file():
        return False
    with metrics.open(
        "rb"
    ) as lines:  # one line for step 0, of an evaluation or empty, and one for every step
        return sum(1 for _ in lines) > every + 1


def _there(directory: Path) -> list[str]:
    return [name for name in OWN if os.path.lexists(directory / name)]


def check_empty(directory: Path, name: str) -> None:
    """Raises ConfigError, which begins with `name`, if `directory` is not empty, or cannot be a directory."""
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"{name}: {there} is no directory")
    if there == directory and any(directory.iterdir()):
        raise ConfigError(f"{name}: this directory is not empty")
