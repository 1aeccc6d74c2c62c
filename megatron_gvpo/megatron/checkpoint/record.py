"""Writes and reads `state.json`, the trainer's own small state in a checkpoint, with a checksum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_gvpo.config.redaction import hide_in
from megatron_gvpo.config.schema import ConfigError, read_json_object
from megatron_gvpo.megatron.checkpoint.all_ranks import CheckpointError, DamagedCheckpointError
from megatron_gvpo.megatron.checkpoint.checksums import checksum

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
