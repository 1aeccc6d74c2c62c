"""Reads a checkpoint's tensors; if one rank cannot, all ranks raise its error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_gvpo.core.collectives import all_gather_msgpack, first_problem
from megatron_gvpo.core.errors import CheckpointError, DamagedCheckpointError
from megatron_gvpo.huggingface.complete_weights import shown_names
from megatron_gvpo.megatron.checkpoint.storage import FilesReader, SafeLoadPlanner, plain_values

log = logging.getLogger(__name__)

_COMMON = ShardedObject("common_state", None, (1,), (0,)).unique_key  # values that all ranks share


def load_shards(what: str, state: Callable[[], dict[str, Any]], directory: Path) -> dict[str, Any]:
    """Load the sharded state that `state` returns, with the steps of megatron-core's dist_checkpointing.load.

    megatron-core (0.19.2) takes the steps in one call: a rank that fails before the exchange of metadata
    leaves the others in it until the timeout, and only rank 0 validates the metadata, so it fails alone. It
    also unpickles `.metadata` and the entries that are not tensors, which runs whatever they name. Here,
    nothing is run, and all ranks raise that rank's error: CheckpointError, or for damage
    DamagedCheckpointError. A collective.
    """
    made: list[Any] = []

    def prepare() -> None:
        reader = open_checkpoint(directory)
        wanted = state()
        prepared, *_ = load_preprocess(wanted)  # copies `wanted`
        sharded, _ = extract_sharded_base(prepared)
        made.extend((reader, wanted, sharded))

    run_on_all_ranks(what, prepare)
    reader, wanted, sharded = made
    if reader.checksums is None and dist.get_rank() == 0:
        log.warning("%s has no checksums: an earlier version wrote it; damage is not noticed", directory)
    _, all_metadata = determine_global_metadata(sharded)
    run_on_all_ranks(what, lambda: validate_sharding_integrity(all_metadata))

    def compare() -> None:  # torch.distributed.checkpoint ignores tensors that nobody asks for
        stored = reader.metadata.state_dict_metadata.items()
        names = {
            ShardedObject.empty_from_unique_key(name).key if isinstance(entry, BytesStorageMetadata) else name
            for name, entry in stored
        }
        if problem := check_names({base.key for metadata in all_metadata for base in metadata}, names):
            raise CheckpointError(problem)

    run_on_rank_0(what, compare)
    loaded: list[dict[str, Any]] = []
    run_on_all_ranks(what, lambda: loaded.append(read_state(wanted, reader)))
    return loaded[0]


def open_checkpoint(directory: Path) -> FilesReader:
    """Read what a checkpoint directory holds. Raises CheckpointError, DamagedCheckpointError, OSError."""
    file = directory / "metadata.json"
    try:
        backend = json.loads(file.read_text())["sharded_backend"]
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{file} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpointError(f"{file} is damaged: it names no sharded_backend") from None
    if backend != "torch_dist":
        raise DamagedCheckpointError(
            f"{file}: sharded_backend={str(backend)[:40]!r}; this version reads torch_dist"
        )
    if (legacy := directory / "common.pt").exists():
        raise CheckpointError(f"{legacy}: no checkpoint of this program has this file; it was not read")
    return FilesReader(directory)


def read_state(wanted: dict[str, Any], reader: FilesReader) -> dict[str, Any]:
    """Load into the sharded state `wanted`. Waits for no other rank.

    Raises CheckpointError, DamagedCheckpointError, OSError.
    """
    prepared, local, factories = load_preprocess(wanted)
    [state] = plain_values(reader.read_bytes(_COMMON), _COMMON)
    merge(state, local)
    sharded, _ = extract_sharded_base(prepared)
    tensors = [base for base in nested_values(sharded) if isinstance(base, ShardedTensor)]
    by_key, places, names = _replace_state_dict_keys_with_sharded_keys(sharded)
    targets = mcore_to_pyt_state_dict(by_key, True)
    planner = SafeLoadPlanner(
        shapes_validation_sharded_tensors=[base for base in tensors if not base.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={b.key: b for b in tensors if b.allow_shape_mismatch},
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    torch_checkpoint.load(targets, storage_reader=reader, planner=planner, no_dist=True)
    values = {key: _unwrap_pyt_sharded_tensor(value) for key, value in targets.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(values, places, names)
    _restore_dict_types(loaded, sharded)
    merge(state, loaded)
    return dict(apply_factory_merges(state, factories))


# Compares the names of a Megatron checkpoint's tensors with those that a model needs.
#
# dist_checkpointing ignores tensors that nobody asks for. Here, a tensor that is missing or unexpected is an
# error that names it, before any tensor is read.


def check_names(wanted: Collection[str], stored: Collection[str]) -> str | None:
    """Compare the keys that all ranks want with those of a Megatron checkpoint; returns the problem or None.

    If the optimizer is not wanted, the checkpoint may have one.
    """
    weights_only = not any(name.startswith("optimizer.") for name in wanted)

    def compared(names: Collection[str]) -> set[str]:
        return {
            name
            for name in names
            # Left out: FP8 scales, which a layer on a CPU lacks; values that are not tensors; random states,
            # which only the same layout asks for.
            if not name.endswith("_extra_state")
            and name not in ("common_state", "random")
            and not (weights_only and name.startswith("optimizer."))
        }

    ours, theirs = compared(wanted), compared(stored)
    missing, unexpected = ours - theirs, theirs - ours
    if not missing and not unexpected:
        return None
    if weights := {name for name in missing | unexpected if not name.startswith("optimizer.")}:
        missing, unexpected = missing & weights, unexpected & weights  # the cause of the optimizer's, too
    said = []
    if missing:
        said.append(f"it lacks {shown_names(missing)} of the model")
    if unexpected:
        said.append(f"it has {shown_names(unexpected)} that the model does not take")
    return f"{', and '.join(said)}: {_cause(missing, unexpected)}"


def _cause(missing: set[str], unexpected: set[str]) -> str:
    def output_layer(names: set[str]) -> bool:
        return any("output_layer." in name for name in names)

    if output_layer(missing) != output_layer(unexpected):
        checkpoint, model = ("true", "false") if output_layer(missing) else ("false", "true")
        return (
            f"the checkpoint is of a model with tie_word_embeddings={checkpoint}, and this one's config.json "
            f"says {model}"
        )
    if all(name.startswith("optimizer.") for name in missing | unexpected):
        return "model.dtype and the optimizer must be those of the run that wrote it"
    return "the model's config.json must be that of the run that wrote it"


# Runs an action on every rank; if it fails on one, raises on all, so that none waits until the timeout.


def run_on_all_ranks(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on every rank; if it fails on any, raise CheckpointError on all, with that error.

    All ranks raise DamagedCheckpointError if only damage was found.

    `action` must not wait for other ranks after a point where one rank alone may fail. `what` begins the
    message, as in "cannot write FILE"; leave it empty if the error says that itself.
    """
    failed: BaseException | None = None
    try:
        action()
    except CheckpointException as error:  # PyTorch wraps the error of a rank in it
        failed = next(cause for cause, _ in error.failures.values())
    except Exception as error:  # the other ranks must learn of any error
        failed = error
    said = first_problem(None if failed is None else _described(failed), group)
    if said is not None:
        damaged = all(all_gather_msgpack(failed is None or isinstance(failed, DamagedCheckpointError), group))
        raise (DamagedCheckpointError if damaged else CheckpointError)(f"{what}: {said}" if what else said)


def run_on_rank_0(what: str, action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> None:
    """Like `run_on_all_ranks`, but only rank 0 runs `action`; all ranks raise its error."""
    run_on_all_ranks(what, action if dist.get_rank() == 0 else lambda: None, group)


def _described(error: BaseException) -> str:
    """Describe the error's first cause: PyTorch's writer hides a full disk behind an error of its own."""
    if isinstance(error, CheckpointError):
        return str(error)
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"
