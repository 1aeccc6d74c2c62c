"""The earlier run in an output directory: continued, refused or replaced, and never mixed with another."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import read_metrics
from megatron_gvpo.runs.written import (
    CONFIG,
    EXPORT,
    RUN,
    foreign_files,
    json_object,
    names_written_by,
    present_names,
    recorded_names,
    remove_written,
    step_name,
)

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config


# Files that a run writes after its last checkpoint only.
_LAST = ("hf", "summary.json", "curve.png")

# How a run treats an earlier one: `refuse` refuses to start; `resume` continues it and refuses to start where
# there is no checkpoint; `auto` continues it, and starts if there is none; `overwrite` replaces it.
Earlier = Literal["refuse", "resume", "auto", "overwrite"]
_SHOWN = 8  # ranges of steps in a warning
_SAFE = "nothing was changed; move these files elsewhere, or give another output_dir"


def earlier_of(resume: bool | Literal["auto"], overwrite: bool) -> Earlier:
    """Return how the arguments of `Trainer`, or the options of `train`, want an earlier run treated."""
    if overwrite:
        return "overwrite"
    if resume == "auto":
        return "auto"
    return "resume" if resume else "refuse"


def check_earlier_run(config: Config, earlier: Earlier) -> None:
    """Raises ConfigError if a run may not start, or has nothing to continue. The check changes nothing."""
    directory = Path(config.output_dir)
    try:
        if earlier in ("resume", "auto") and newest_step(directory) is not None:
            _check_continued(config, directory)
        else:
            _check_new(config, directory, earlier)
    except OSError as error:
        raise ConfigError(f"output_dir={directory}: {error.filename or ''}: {error.strerror}") from None


def _check_continued(config: Config, directory: Path) -> None:
    """Raises ConfigError for damaged metrics, and for files at the paths that the run will write."""
    _check_name(directory)
    _check_metrics(directory)
    if not (recorded := recorded_names(directory) - {CONFIG}):
        return  # an earlier version wrote this run without a record
    if foreign := foreign_files(directory, names_written_by(config) - recorded):
        raise ConfigError(
            f"output_dir={directory}: with these settings the run would also write to what it has not "
            f"written so far ({foreign}): {_SAFE}"
        )


def _check_new(config: Config, directory: Path, earlier: Earlier) -> None:
    """Raises ConfigError if a run may not start, or would remove files that no run has written."""
    _check_not_inside_run(directory)
    names, foreign = present_names(directory), foreign_files(directory)
    listed = ", ".join(names)
    if earlier == "refuse" and names:
        if not foreign:
            raise ConfigError(
                f"output_dir={directory} holds an earlier run: continue it with --resume, replace it with "
                f"--overwrite, or give another output_dir (there is {listed})"
            )
        if newest_step(directory) is not None:
            raise ConfigError(
                f"output_dir={directory} holds an earlier run, and files that are not recorded as its own "
                f"({foreign}): continue it with --resume, or give another output_dir"
            )
    if foreign and earlier != "resume":
        raise ConfigError(_would_lose(directory, foreign))
    if earlier in ("resume", "auto") and _has_lost_checkpoints(config, names):
        replace = "" if foreign else "replace the run with --overwrite, "
        raise ConfigError(
            f"output_dir={directory} holds an earlier run whose checkpoints are gone: there is none in "
            f"{directory / 'checkpoints'}. Put them back, {replace}or give another output_dir (there is "
            f"{listed})"
        )
    if earlier == "resume":
        raise ConfigError(
            f"output_dir={directory}: there is no checkpoint in {directory / 'checkpoints'} to continue "
            "from: start a run without --resume, or give --resume=auto, which continues a run where there "
            "is one"
        )


def _check_not_inside_run(directory: Path) -> None:
    """Raises ConfigError for a directory inside one that another run writes, such as its checkpoints."""
    target = Path(os.path.abspath(directory))
    for other in target.parents:
        if (folder := target.relative_to(other).parts[0]) in recorded_names(other):
            raise ConfigError(
                f"output_dir={directory}: the run in {other} writes to {other / folder}: give an output_dir "
                "that is not in there"
            )


def _would_lose(directory: Path, foreign: str) -> str:
    return (
        f"output_dir={directory} holds files that a run would replace, and no run there has recorded them as "
        f"its own ({foreign}): {_SAFE}"
    )


def metrics_problems(file: Path, step: int) -> list[str]:
    """Warnings where the metrics of a resumed run lack or repeat a step up to `step`.

    Raises OSError, and ValueError for damaged metrics.
    """
    counts = Counter(record["step"] for record in (read_metrics(file) if file.exists() else ()))
    missing = [each for each in range(step + 1) if each not in counts]
    repeated = [each for each in sorted(counts) if counts[each] > 1 and each <= step]
    problems = []
    if missing:
        problems.append(
            f"{file} has no record of {_ranges(missing)}: curves, the report and the summary will lack "
            "them, as nothing computes them again. If you have a copy of the file, stop now, put it back "
            "and resume again"
        )
    if repeated:
        problems.append(f"{file} had several records of {_ranges(repeated)}: the last of each stays")
    return problems


def _ranges(steps: list[int]) -> str:
    """Rising steps as a text, such as `steps 0-3, 7`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:_SHOWN]]
    name = "step" if len(steps) == 1 else "steps"
    return f"{name} {', '.join(shown)}{', ...' if len(runs) > _SHOWN else ''}"


def _check_name(directory: Path) -> None:
    """Raises ConfigError if the newest checkpoint is a copy, or was renamed: its state.json has another step.

    A state.json that cannot be read is damage, for which an older checkpoint is loaded.
    """
    newest = newest_step(directory)
    assert newest is not None, "only a run with a checkpoint is continued"
    name = step_name(newest)
    for checkpoint in (directory / "checkpoints" / name, directory / "checkpoints" / f"{name}.replaced"):
        step = json_object(checkpoint / "state.json").get("step")
        if type(step) is int and step >= 0 and checkpoint.stem != step_name(step):
            raise ConfigError(
                f"{checkpoint} is not the checkpoint of the step in its name: its state.json is of step "
                f"{step}; rename it to {step_name(step)}, or move it elsewhere if it is a copy"
            )


def checkpoint_steps(directory: Path) -> list[int]:
    """The steps of the complete checkpoints of the run in `directory`, damaged or not, in rising order."""
    steps = [
        path.stem.removeprefix("step_")
        for path in (directory / "checkpoints").glob("step_*")
        if path.suffix in ("", ".replaced") and (path / "state.json").is_file()
    ]
    return sorted({int(step) for step in steps if step.isdecimal()})


def newest_step(directory: Path) -> int | None:
    """The step of the newest complete checkpoint of the run in `directory`, damaged or not; else None."""
    return max(checkpoint_steps(directory), default=None)


def exported_step(directory: Path) -> int | None:
    """The step of a run's weights in a Hugging Face directory that it has written; None for any other."""
    step = json_object(directory / EXPORT).get("step")
    return step if type(step) is int else None


def best_of_lost_step(directory: Path, step: int, best: int | None) -> str | None:
    """A warning if hf_best is of a step after `step`, from which the run goes on; None if it is not.

    `best`: the best step up to there. The checkpoint of hf_best's step was damaged, or somebody removed it.
    """
    if (later := exported_step(directory / "hf_best")) is None or later <= step:
        return None
    known = "no step up to there has the metric" if best is None else f"the best step up to there is {best}"
    return (
        f"{directory / 'hf_best'} is of step {later}, whose checkpoint is lost, and the run goes on from "
        f"step {step}: {known}; hf_best stays until a later checkpoint is better, so copy it to keep it"
    )


def lacks_summary(directory: Path, step: int) -> bool:
    """True if a run that writes records was ended after `step` before the last of them, summary.json."""
    has_records = (directory / "metrics.jsonl").exists()
    return has_records and json_object(directory / "summary.json").get("steps") != step


def _is_unreported(directory: Path, step: int) -> bool:
    """True if the engine failed after the step's updates: its evaluation and its record are missing."""
    return "unreported" in json_object(directory / "checkpoints" / step_name(step) / "state.json")


def check_step(output_dir: str, step: int) -> None:
    """Raises ConfigError, which lists the steps, for a --step of which there is no checkpoint."""
    steps = checkpoint_steps(Path(output_dir))
    if step not in steps:
        raise ConfigError(
            f"--step {step}: {Path(output_dir) / 'checkpoints'} has no complete checkpoint of this step (it "
            f"has: {', '.join(map(str, steps)) or 'none'})"
        )


def finished_message(config: Config) -> str | None:
    """A sentence for the user if the run in the output directory has finished, else None."""
    directory, steps = Path(config.output_dir), config.train.steps
    newest = newest_step(directory)
    if newest is None or newest < steps:
        return None
    if config.checkpoint.export_hf and exported_step(directory / "hf") != newest:
        return None  # the run ended before that step
    if _is_unreported(directory, newest) or lacks_summary(directory, newest):
        return None
    return (
        f"output_dir={directory}: this run is finished, nothing is left to do: its newest checkpoint is of "
        f"step {newest}, and train.steps={steps}. To train on, give more steps, such as "
        f"train.steps={2 * newest}"
    )


def remove_earlier_run(output_dir: str) -> None:
    """Removes the files of an earlier run, and nothing else.

    Raises ConfigError, and removes nothing, if files that no run has recorded as its own are in the way.
    """
    directory = Path(output_dir)
    if foreign := foreign_files(directory):
        raise ConfigError(_would_lose(directory, foreign))
    remove_written(directory)


def _check_metrics(directory: Path) -> None:
    """Raises ConfigError for metrics that cannot be continued. A last line that was cut off is normal."""
    file = directory / "metrics.jsonl"
    try:
        records = read_metrics(file) if file.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{error}: the metrics of the run are damaged; mend the line, or move the file away to go on "
            "without the records so far"
        ) from None
    of_step = {record["step"]: record for record in records}
    for step in checkpoint_steps(directory):
        if step in of_step and (problem := _other_metrics(directory, step, of_step[step])):
            raise ConfigError(
                f"{file}: its record of step {step} is not that of the checkpoint of this step ({problem}): "
                "the file is of another run, or was changed. Put the run's own back, or move it away to go "
                "on without the records so far"
            )


def _other_metrics(directory: Path, step: int, record: Mapping[str, Any]) -> str:
    """The first metric of a checkpoint that differs from the record of its step, as text; or ""."""
    reported = json_object(directory / "checkpoints" / step_name(step) / "state.json").get("reported")
    for name, value in reported.items() if isinstance(reported, dict) else ():
        is_number = type(value) in (int, float) and math.isfinite(value)
        if is_number and record.get(name) != value:
            return f"{name} is {record.get(name)} in one and {value} in the other"
    return ""


def _has_lost_checkpoints(config: Config, names: list[str]) -> bool:
    """True if a run without checkpoints once had some: starting it again would lose its work.

    A run makes the directory `checkpoints` before it writes anything else.
    """
    if not names:
        return False
    if "checkpoints" not in names or set(names) & {*_LAST}:
        return True
    every, metrics = _recorded_every(config), Path(config.output_dir) / "metrics.jsonl"
    if not every or not metrics.is_file():
        return False
    with metrics.open("rb") as lines:
        # The file has one line for step 0 (an evaluation, or empty), and one for every later step.
        return sum(1 for _ in lines) > every + 1


def _recorded_every(config: Config) -> int:
    """`checkpoint.every` of the run in the output directory, which may be another than the present one."""
    import yaml  # here, because `runs` lists many runs without it

    record = json_object(Path(config.output_dir) / RUN)
    with suppress(KeyError, TypeError, ValueError, yaml.YAMLError):  # an earlier version's, or damaged
        return int(yaml.safe_load(str(record["config"]))["checkpoint"]["every"])
    return config.checkpoint.every


def check_empty(directory: Path, name: str) -> None:
    """Raises ConfigError, which begins with `name`, if `directory` is not empty, or cannot be written."""
    if os.path.islink(directory):
        raise ConfigError(f"{name}: this is a link, to {os.readlink(directory)}: name the directory itself")
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(existing):
        raise ConfigError(f"{name}: {existing} is not a directory")
    try:
        with suppress(FileNotFoundError):
            os.lstat(directory)  # raises for a name that is too long
        if existing == directory and any(directory.iterdir()):
            raise ConfigError(f"{name}: this directory is not empty")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: nothing can be written in {existing}: permission denied, or read-only")


def check_outside(directory: Path, name: str, others: Iterable[Path]) -> None:
    """Raises ConfigError, which begins with `name`, if `directory` is in one of `others`."""
    target = Path(os.path.realpath(directory))
    for other in others:
        if target.is_relative_to(os.path.realpath(other)):
            raise ConfigError(f"{name}: this is in {other}, and would become a part of it: name another one")
