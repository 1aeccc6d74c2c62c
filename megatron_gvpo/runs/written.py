"""Distinguishes the files that a run wrote in its output directory from all others; only these are removed.

`run.json` lists the names in the directory that the run writes to (`names_written_by`). Inside these
directories, the run's files are recognised by their names; an exported model lists its files in export.json.
The output directory may be one in which the user keeps other work, such as `.`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.named_file import PAGE, begins_with

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config

# The first line of config.yaml, which distinguishes it from a user's own file.
HEADER = "# The configuration of the run in this directory, as merged. Written by megatron-gvpo.\n"
CONFIG, RUN = "config.yaml", "run.json"
EXPORT = "export.json"  # file of an exported model, with the step of its weights and a list of its files

_STEP = r"step_\d{8,}"
_SHARDS = r"((critic|reference)/)?(\.metadata(\.tmp)?|metadata\.json|checksums\.json|__\d+_\d+\.distcp)"
# An exported model without a list: one that is being written, or that an earlier version wrote.
_MODEL = (
    r"(config|generation_config|(video_)?(pre)?processor_config|export)\.json|shard-\d+|"
    r"model(-\d+-of-\d+)?\.safetensors|model-\d+\.safetensors|model\.safetensors\.index\.json|"
    r"tokenizer(_config)?\.json|tokenizer\.model|(special_tokens_map|added_tokens|vocab)\.json|vocab\.txt|"
    r"merges\.txt|chat_template\.jinja|adapter/adapter_(config\.json|model\.safetensors)"
)
# The names in the output directory that runs write to. For a directory, the pattern of the paths of the files
# in it; None for a file. The record of the run comes last: it is removed when everything else is.
OWN: dict[str, str | None] = {
    "checkpoints": rf"{_STEP}(\.partial|\.replaced|\.damaged)?/({_SHARDS}|state\.json)",
    "hf": _MODEL,
    "hf.partial": _MODEL,
    "hf_best": _MODEL,
    "hf_best.partial": _MODEL,
    "exports": rf"{_STEP}(\.partial)?/({_MODEL})",
    "metrics.jsonl": None,
    "summary.json": None,
    "mismatch.json": None,
    "curve.png": None,
    "rollouts": r"(step|eval)_\d+\.parquet(\.tmp)?",
    "steps": r"step_\d+\.safetensors(\.tmp)?",
    "tensorboard": r"events\.out\.tfevents\.[^/]+",
    "profile": r"rank\d+_steps\d+-\d+\.(json\.gz|txt)",
    "services.json": None,
    "wandb_run_id": None,
    "mlflow_run_id": None,
    "mlflow.db": None,
    "mlruns": r"[0-9a-f]{32}/artifacts/.+",
    "swanlab": r"(run-[^/]+/.+|runs\.swanlab[^/]*|\.gitignore)",
    "swanlab_run_id": None,
    CONFIG: None,
    RUN: None,
}
# The command `mismatch` writes the file of this name.
_ALWAYS = ("checkpoints", "metrics.jsonl", "summary.json", "mismatch.json", "curve.png", CONFIG, RUN)
_EXPORTS = ("hf", "hf_best", "exports")
_SHOWN = 3  # files that a message names
# A page that `report` wrote about the run goes with it.
_ABOUT = "report.html"


def names_written_by(config: Config) -> set[str]:
    """The names in the output directory that a run with this configuration writes to."""
    checkpoint, logging = config.checkpoint, config.logging
    exports = {
        "hf": checkpoint.export_hf,
        "hf_best": checkpoint.keep_best is not None,
        "exports": checkpoint.export_every > 0,
    }
    services = (
        logging.wandb_project,
        logging.trackio_project,
        logging.mlflow_experiment,
        logging.swanlab_project,
    )
    has_mlflow_files = not os.environ.get("MLFLOW_TRACKING_URI")
    others = {
        "rollouts": logging.rollouts.every > 0,
        "steps": logging.steps.max_gb > 0,
        "tensorboard": logging.tensorboard,
        "profile": logging.profile_steps is not None,
        "services.json": any(project is not None for project in services),
        "wandb_run_id": logging.wandb_project is not None,
        "mlflow_run_id": logging.mlflow_experiment is not None,
        **dict.fromkeys(("mlflow.db", "mlruns"), logging.mlflow_experiment is not None and has_mlflow_files),
        **dict.fromkeys(("swanlab", "swanlab_run_id"), logging.swanlab_project is not None),
    }
    partial = {f"{name}.partial": wanted for name, wanted in exports.items() if name != "exports"}
    return {*_ALWAYS, *(name for name, wanted in {**exports, **partial, **others}.items() if wanted)}


def step_name(step: int) -> str:
    """The name of a step's checkpoint and of its exported model, such as step_00000020."""
    return f"step_{step:08d}"


def drop_oldest(step_of: Mapping[Path, int], max_gb: float) -> list[Path]:
    """Remove the files of the oldest steps while all together are above the limit; returns the removed.

    `step_of`: each file's step. The files of the newest step stay, however large.
    """
    sizes = {path: path.stat().st_size for path in step_of}
    excess, newest = sum(sizes.values()) - max_gb * 1e9, max(step_of.values())
    removed = []
    for path in sorted(step_of, key=step_of.__getitem__):
        if excess <= 0 or step_of[path] == newest:
            break
        path.unlink(missing_ok=True)
        excess -= sizes[path]
        removed.append(path)
    return removed


def recorded_names(directory: Path) -> set[str]:
    """The names that the run in `directory` writes to by its record; empty if there is no record of a run.

    A record of an earlier version lists none, and stands for all that runs write.
    """
    has_config = begins_with(directory / CONFIG, HEADER)
    record = json_object(directory / RUN)
    if not (isinstance(record.get("files"), dict) and isinstance(record.get("starts"), list)):
        return {CONFIG} if has_config else set()
    listed = record.get("writes")
    recorded = {*map(str, listed)} & {*OWN} if isinstance(listed, list) else {*OWN}
    return recorded if has_config else recorded - {CONFIG}


def present_names(directory: Path) -> list[str]:
    """The existing names in `directory` that a run would write to, whoever made them."""
    return [name for name in OWN if os.path.lexists(directory / name)]


def foreign_files(directory: Path, among: Collection[str] = (*OWN,)) -> str:
    """The first files named in `among` that the run in `directory` has not written, as text; or "".

    A run writes no links; without a record of a run, all files count as foreign. Directories without files
    are not counted. Raises OSError for a directory that cannot be read.
    """
    recorded = recorded_names(directory)
    every = (
        path
        for name in OWN
        if name in among
        for path, is_own in _files(directory, name)
        if name not in recorded or not is_own
    )
    first = [str(path) for path in islice(every, _SHOWN + 1)]
    return ", ".join([*first[:_SHOWN], *(["..."] if len(first) > _SHOWN else [])])


def remove_written(directory: Path) -> None:
    """Remove the files of the run in `directory`, and nothing else.

    If the process is killed meanwhile, no checkpoint looks complete, and a second call removes the rest.
    """
    for name in sorted(recorded_names(directory), key=[*OWN].index):
        own = [path for path, is_own in _files(directory, name) if is_own]
        for path in sorted(own, key=lambda path: (path.name == EXPORT, path.name != "state.json")):
            (directory / path).unlink()
        if OWN[name] is not None:
            _remove_empty(directory / name)
    if begins_with(directory / _ABOUT, PAGE):
        (directory / _ABOUT).unlink()


def keep_foreign(model: Path, new: Path) -> None:
    """Move files that a run did not write, such as a README, from an exported model to its replacement."""
    files = [path for path in model.rglob("*") if path.is_symlink() or not path.is_dir()]
    own = {path for path in files if _is_file(path) and _is_of_model(model, path)}
    for path in files:
        target = new / path.relative_to(model)
        if path not in own and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if the file is missing, damaged or not an object."""
    with suppress(OSError, ValueError, RecursionError):
        if file.is_file() and isinstance(value := json.loads(file.read_text()), dict):
            return value
    return {}


def _files(directory: Path, name: str) -> Iterator[tuple[Path, bool]]:
    """Every file at and below `directory`/`name`: (path from `directory`, True if a run wrote it).

    The names of the files decide, not the record of the run.
    """
    top, pattern = directory / name, OWN[name]
    if not os.path.lexists(top):
        return
    if pattern is None or top.is_symlink() or not top.is_dir():
        yield Path(name), pattern is None and _is_file(top)
        return
    for folder, inner, files in os.walk(top, onerror=_raise):
        links = [each for each in inner if Path(folder, each).is_symlink()]
        for file in sorted([*files, *links]):
            path = Path(folder, file)
            yield path.relative_to(directory), _is_file(path) and _is_written(top, pattern, path)


def _is_written(top: Path, pattern: str, path: Path) -> bool:
    """True if `path`, a file below the directory `top`, has a name that a run gives to its files there."""
    inside = path.relative_to(top)
    if top.name not in _EXPORTS:
        return re.fullmatch(pattern, inside.as_posix()) is not None
    model = top if top.name != "exports" else top / inside.parts[0]
    if model.suffix == ".partial":
        return re.fullmatch(pattern, inside.as_posix()) is not None
    if top.name == "exports" and not (re.fullmatch(_STEP, model.name) and model.is_dir()):
        return False
    # A run writes the whole model aside, with export.json, and then renames it.
    return type(json_object(model / EXPORT).get("step")) is int and _is_of_model(model, path)


def _is_of_model(model: Path, path: Path) -> bool:
    """True if the exported model lists the file, or has no list and a run gives such names to its files."""
    inside, listed = path.relative_to(model).as_posix(), json_object(model / EXPORT).get("files")
    if isinstance(listed, list):
        return inside in {EXPORT, *map(str, listed)}
    return re.fullmatch(_MODEL, inside) is not None


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _remove_empty(top: Path) -> None:
    """Remove the directories without files at and below `top`."""
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):  # the directory is not empty
            os.rmdir(folder)


def _raise(error: OSError) -> None:
    raise error
