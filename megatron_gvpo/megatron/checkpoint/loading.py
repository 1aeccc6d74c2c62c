"""Reads a checkpoint's tensors; if one rank cannot, all ranks raise its error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
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
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_gvpo.megatron.checkpoint.all_ranks import (
    CheckpointError,
    DamagedCheckpointError,
    run_on_all_ranks,
    run_on_rank_0,
)
from megatron_gvpo.megatron.checkpoint.storage import FilesReader, SafeLoadPlanner, plain_values
from megatron_gvpo.megatron.checkpoint.tensor_names import check_names

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
