"""Finds the newest checkpoint of a run, and an older one if the newest is damaged."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.core.redaction import hide_in
from megatron_gvpo.huggingface.checksums import checksum
from megatron_gvpo.megatron.checkpoint.loading import run_on_all_ranks, run_on_rank_0

# Suffixes of a checkpoint's directory: while it is written, while the next of its step takes its name, and
# when another was loaded because it is damaged.
PARTIAL, REPLACED, DAMAGED = ".partial", ".replaced", ".damaged"

log = logging.getLogger(__name__)


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest first."""
    found = [path for path in root.glob("step_*") if (path / "state.json").is_file()]
    by_step = {path.stem: path for path in found if path.suffix == REPLACED}
    by_step |= {path.name: path for path in found if not path.suffix}
    return [by_step[step] for step in sorted(by_step)]


def newest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root` as rank 0 sees it, on every rank. A collective.

    Rank 0 decides, because a shared file system may show an older state to other nodes for a while. If any
    rank cannot read `root`, every rank raises CheckpointError.
    """
    found: list[Path] = []
    run_on_all_ranks(f"cannot read {root}", lambda: found.extend(complete(root)))
    name = broadcast_msgpack(found[-1].name if found else None)
    return None if name is None else root / name


def load_newest[Loaded](
    root: Path, load: Callable[[Path], Loaded], put_aside: bool = False, step: int | None = None
) -> Loaded | None:
    """Load the newest checkpoint under `root` that is not damaged; returns what `load` returns. A collective.

    `step`: load only the checkpoint of this step.

    `load` is a collective that raises DamagedCheckpointError on every rank, or on none; a later call must
    replace everything that a failed one has loaded. Every damaged checkpoint is named in a warning.
    `put_aside`: rename the damaged ones to step_*.damaged, so that they are not counted as the newest.
    Returns None if there is no checkpoint. Raises CheckpointError if all are damaged, and whatever `load`
    raises besides.
    """
    found: list[Path] = []
    run_on_all_ranks(f"cannot read {root}", lambda: found.extend(complete(root)))
    wanted = [path.name for path in found if step is None or path.stem == f"step_{step:08d}"]
    names = broadcast_msgpack(wanted)
    damaged: list[Path] = []
    problem = ""
    for i, name in reversed(list(enumerate(names))):
        try:
            loaded = load(root / name)
        except DamagedCheckpointError as error:
            damaged.append(root / name)
            problem = problem or str(error)
            if i and dist.get_rank() == 0:
                log.warning("%s; trying %s, the checkpoint before it", error, names[i - 1])
            continue
        if put_aside:
            run_on_rank_0(f"cannot rename damaged checkpoints in {root}", lambda: _put_aside(damaged))
        if damaged and dist.get_rank() == 0:
            log.warning("%s is used; %s newer, and damaged", root / name, _names(damaged))
        return loaded
    if damaged:
        raise CheckpointError(
            f"{problem}; no checkpoint in {root} is whole ({_names(damaged)} damaged): copy one from a "
            "backup, or start the run again with --overwrite"
        )
    return None


def _names(damaged: list[Path]) -> str:
    return f"{', '.join(path.name for path in damaged)} {'is' if len(damaged) == 1 else 'are'}"


def _put_aside(damaged: list[Path]) -> None:
    for path in damaged:
        target = path.with_suffix(DAMAGED)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(path, target)


# Writes and reads `state.json`, the trainer's own small state in a checkpoint, with a checksum.

FILE = "state.json"
_FORMAT = 2  # version of the optimizer's format


def record_text(step: int, layout: dict[str, int], state: dict[str, Any]) -> str:
    """Return the content of state.json, without secrets; `state` holds JSON values.

    The responses that a method keeps for later steps are in it, with their errors and their conversations.
    """
    record = {"format": _FORMAT, "step": step, "layout": layout, **state}
    # Prompts carry their data record. From Parquet it may have dates, which a run does not read back.
    record = hide_in(json.loads(json.dumps(record, default=str)))
    return json.dumps(record | {"checksum": _checksum(record)})


def read_record(directory: Path) -> dict[str, Any]:
    """Read state.json. Raises DamagedCheckpointError, and CheckpointError for another version's format."""
    file = directory / FILE
    if not file.exists():
        raise DamagedCheckpointError(f"{file} is missing")
    file.read_bytes()  # an OSError is no damage: it is raised as it is
    try:
        state = read_json_object(file)
        saved, actual = state.pop("checksum", None), _checksum(state)
        found = state.get("format", 1) if state["layout"] else None
        step = state["step"]
    except (ConfigError, KeyError) as error:
        raise DamagedCheckpointError(
            f"{file} is no state of a checkpoint of this program: {type(error).__name__}: {error}"
        ) from None
    if saved not in (None, actual):
        raise DamagedCheckpointError(f"{file} is damaged: it is not what was saved (another checksum)")
    if type(step) is not int:
        raise DamagedCheckpointError(f"{file} is damaged: step={step!r}")
    if directory.stem != f"step_{step:08d}":
        raise CheckpointError(
            f"{directory} is not the checkpoint of the step in its name: {file.name} is of step {step}; "
            f"rename it to step_{step:08d}, or move it elsewhere if it is a copy"
        )
    if found != _FORMAT:
        raise CheckpointError(
            f"{directory} has format {found}, and this version reads format {_FORMAT}: continue with the "
            "version that wrote it, or start a new run from its weights (megatron-gvpo convert)"
        )
    return state


def _checksum(state: dict[str, Any]) -> str:
    return checksum(json.dumps(state).encode())
