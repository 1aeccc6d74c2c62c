"""Reading a checkpoint's tensors, so that all ranks hear of what one cannot read."""

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
from megatron_gvpo.megatron.checkpoint.complete_weights import check_names


def load_shards(what: str, state: Callable[[], dict[str, Any]], directory: Path) -> dict[str, Any]:
    """What megatron-core's dist_checkpointing.load reads for what `state` makes, step by step.

    In one call (0.19.2), a rank that fails before the exchange in the middle leaves the others in it until
    the timeout, and rank 0, which alone validates what was exchanged, fails alone. A collective; raises
    CheckpointError on all ranks, with that rank's error.
    """
    made: list[dict[str, Any]] = []

    def ask() -> None:
        verify_checkpoint(str(directory))
        wanted = state()
        prepared, *_ = load_preprocess(wanted)  # a copy
        sharded, _ = extract_sharded_base(prepared)
        made.extend((wanted, sharded))

    run_on_all_ranks(what, ask)
    wanted, sharded = made
    _, of_all = determine_global_metadata(sharded)
    run_on_all_ranks(what, lambda: validate_sharding_integrity(of_all))

    def compare() -> None:  # reading ignores what the checkpoint has and nobody asks for
        stored = {base.key for base in load_sharded_metadata(str(directory)).values()}
        if problem := check_names({base.key for of_rank in of_all for base in of_rank}, stored):
            raise CheckpointError(problem)

    run_on_rank_0(what, compare)
    loaded: list[dict[str, Any]] = []

    def read() -> None:  # without the validation it waits for no other rank
        loaded.append(dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False))

    run_on_all_ranks(what, read)
    return loaded[0]
