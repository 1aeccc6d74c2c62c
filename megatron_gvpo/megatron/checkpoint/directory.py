"""A checkpoint's directory: its names, `state.json`, and work on it that succeeds on all ranks or on none.

`step_00000042/` is complete. A checkpoint that is being written or replaced, or that is damaged, has another
suffix.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gvpo.core.collectives import all_gather_msgpack, first_problem
from megatron_gvpo.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.core.redaction import hide_in
from megatron_gvpo.huggingface.checksums import FILE as CHECKSUMS
from megatron_gvpo.huggingface.checksums import checksum
from megatron_gvpo.runs.written import json_object, step_name

PARTIAL = ".partial"  # suffix of a checkpoint that is being written
REPLACED = ".replaced"  # suffix of a checkpoint that a new checkpoint of the same step is about to replace
DAMAGED = ".damaged"  # suffix of a damaged checkpoint; an older one was loaded instead of it

RECORD = "state.json"  # the trainer's own small state, with a checksum
_FORMAT = 2  # version of the optimizer's format


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest first."""
    paths = [path for path in root.glob("step_*") if (path / RECORD).is_file()]
    by_step = {path.stem: path for path in paths if path.suffix == REPLACED}
    by_step |= {path.name: path for path in paths if not path.suffix}
    return [by_step[step] for step in sorted(by_step)]


def incomplete_checkpoints(root: Path) -> list[Path]:
    """Return the directories under `root` that have the name of a complete checkpoint but no state.json."""
    named = [path for path in root.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return sorted(path for path in named if not (path / RECORD).is_file())


def check_files(directory: Path) -> None:
    """Raise DamagedCheckpointError for a pipe or a device in a checkpoint: reading one may never end.

    One rank does so for all, because a large run's checkpoint has thousands of files on a shared file system.
    """
    for path in directory.rglob("*"):
        if not (path.is_file() or path.is_dir()):
            raise DamagedCheckpointError(f"{path} is not a file, but a pipe, a device or a broken link")


def record_text(step: int, layout: dict[str, int], state: dict[str, Any]) -> str:
    """Return the content of state.json, without secrets; `state` holds JSON values.

    It includes the responses that a method keeps for later steps, with their errors and conversations.
    """
    record = {"format": _FORMAT, "step": step, "layout": layout, **state}
    # Prompts carry their data record. From Parquet it may have dates, which a run does not read back.
    record = hide_in(json.loads(json.dumps(record, default=str)))
    return json.dumps(record | {"checksum": _checksum(record)})


def bound_text(record: str, directory: Path, run: str | None) -> str:
    """Return the content of state.json, bound to the tensors that lie beside it and to its run.

    `run`: the `id` in run.json, if there is one. Without this bond, a file of another checkpoint would pass,
    because its own checksums are valid.
    """
    values = {key: value for key, value in json.loads(record).items() if key != "checksum"}
    lists = sorted(directory.rglob(CHECKSUMS))
    values |= {"lists": {str(file.relative_to(directory)): checksum(file.read_bytes()) for file in lists}}
    values |= {} if run is None else {"run": run}
    return json.dumps(values | {"checksum": _checksum(values)})


def read_record(directory: Path) -> dict[str, Any]:
    """Read state.json, and compare it with the files beside it and with run.json.

    Raises DamagedCheckpointError for damage, CheckpointError for another version's format or another run.
    """
    file = directory / RECORD
    if not file.exists():
        raise DamagedCheckpointError(f"{file} is missing")
    file.read_bytes()  # an OSError is not damage, so it is raised unchanged
    try:
        state = read_json_object(file)
        saved, actual = state.pop("checksum", None), _checksum(state)
        format_version = state.get("format", 1) if state["layout"] else None
        step = state["step"]
    except (ConfigError, KeyError) as error:
        raise DamagedCheckpointError(
            f"{file} is not the state of a checkpoint of this program: {type(error).__name__}: {error}"
        ) from None
    if saved not in (None, actual):
        raise DamagedCheckpointError(f"{file} is damaged: it is not what was saved (another checksum)")
    if type(step) is not int or step < 0:
        raise DamagedCheckpointError(f"{file} is damaged: step={step!r}")
    if directory.stem != step_name(step):
        raise CheckpointError(
            f"{directory} is not the checkpoint of the step in its name: {file.name} is of step {step}; "
            f"rename it to {step_name(step)}, or move it elsewhere if it is a copy"
        )
    _check_bonds(directory, state)
    if format_version != _FORMAT:
        raise CheckpointError(
            f"{directory} has format {format_version}, and this version reads format {_FORMAT}: continue "
            "with the version that wrote it, or start a new run from its weights (megatron-gvpo convert)"
        )
    return state


def _check_bonds(directory: Path, state: dict[str, Any]) -> None:
    """Raise DamagedCheckpointError for files of another checkpoint, CheckpointError for one of another run.

    Versions before 29 November 2026 wrote neither `lists` nor `run`.
    """
    for name, saved in state.get("lists", {}).items():
        file = directory / name
        if not file.exists():
            raise DamagedCheckpointError(f"{file} is missing")
        if checksum(file.read_bytes()) != saved:
            raise DamagedCheckpointError(
                f"{file} is not the file with which {RECORD} was saved: one of them is of another checkpoint"
            )
    output_dir = directory.parent.parent
    run, own = state.get("run"), json_object(output_dir / "run.json").get("id")
    if run is not None and own is not None and run != own:
        raise CheckpointError(
            f"{directory} is a checkpoint of another run (id {run}; {output_dir / 'run.json'} has {own}): "
            "move it to the output directory of its run, or elsewhere"
        )


def _checksum(state: dict[str, Any]) -> str:
    return checksum(json.dumps(state).encode())


def run_on_all_ranks(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on every rank; if it fails on any, raise CheckpointError on all, with that error.

    If every rank that fails has found damage, all raise DamagedCheckpointError.

    `action` must not wait for other ranks after a point where one rank alone may fail. `what` begins the
    message, as in "cannot write FILE"; leave it empty if the error says that itself.
    """
    failure: BaseException | None = None
    try:
        action()
    except CheckpointException as error:  # PyTorch wraps the error of a rank in it
        failure = next(cause for cause, _ in error.failures.values())
    except Exception as error:  # the other ranks must learn of any error
        failure = error
    problem = first_problem(None if failure is None else _first_cause(failure), group)
    if problem is not None:
        only_damage = failure is None or isinstance(failure, DamagedCheckpointError)
        kind = DamagedCheckpointError if all(all_gather_msgpack(only_damage, group)) else CheckpointError
        raise kind(f"{what}: {problem}" if what else problem)


def run_on_rank_0(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Like `run_on_all_ranks`, but only rank 0 runs `action`; all ranks raise its error."""
    run_on_all_ranks(what, action if dist.get_rank() == 0 else lambda: None, group)


def _first_cause(error: BaseException) -> str:
    """Return the text of the error's first cause.

    PyTorch's writer hides a full disk behind an error of its own.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"
