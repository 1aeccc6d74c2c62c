"""Reads a checkpoint's tensors; if one rank cannot, all ranks raise its error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
    verify_checkpoint,
)

from megatron_gvpo.megatron.checkpoint.all_ranks import CheckpointError, run_on_all_ranks, run_on_rank_0
from megatron_gvpo.megatron.checkpoint.tensor_names import check_names


def load_shards(what: str, state: Callable[[], dict[str, Any]], directory: Path) -> dict[str, Any]:
    """Load the sharded state that `state` returns, with the steps of megatron-core's dist_checkpointing.load.

    megatron-core (0.19.2) takes the steps in one call: a rank that fails before the exchange of metadata
    leaves the others in it until the timeout, and only rank 0 validates the metadata, so it fails alone.
    Here, all ranks raise CheckpointError with that rank's error. A collective.
    """
    made: list[dict[str, Any]] = []

    def prepare() -> None:
        verify_checkpoint(str(directory))
        wanted = state()
        prepared, *_ = load_preprocess(wanted)  # copies `wanted`
        sharded, _ = extract_sharded_base(prepared)
        made.extend((wanted, sharded))

    run_on_all_ranks(what, prepare)
    wanted, sharded = made
    _, all_metadata = determine_global_metadata(sharded)
    run_on_all_ranks(what, lambda: validate_sharding_integrity(all_metadata))

    def compare() -> None:  # dist_checkpointing.load ignores tensors that nobody asks for
        stored = {base.key for base in load_sharded_metadata(str(directory)).values()}
        if problem := check_names({base.key for metadata in all_metadata for base in metadata}, stored):
            raise CheckpointError(problem)

    run_on_rank_0(what, compare)
    loaded: list[dict[str, Any]] = []

    def read() -> None:  # without validation, load does not wait for other ranks
        loaded.append(dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False))

    run_on_all_ranks(what, read)
    return loaded[0]
