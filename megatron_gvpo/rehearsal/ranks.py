"""Chooses the ranks to rehearse: one of every kind that holds or does something else."""

from __future__ import annotations

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.parallel import ParallelConfig


def chosen(ranks: str | None, rank: int | None, parallel: ParallelConfig, world: int) -> list[int]:
    """The ranks that the options name. Raises ConfigError for a rank that does not exist."""
    if ranks is not None:
        if rank is not None:
            raise ConfigError(f"--rank {rank} and --ranks {ranks}: give one of them")
        return all_kinds(parallel, world)
    if not 0 <= (rank or 0) < world:
        raise ConfigError(f"--rank {rank}: --world {world} has the ranks 0 to {world - 1}")
    return [rank or 0]


def all_kinds(parallel: ParallelConfig, world: int) -> list[int]:
    """The first, the fullest middle and the last pipeline stage; of each, the first and the last rank.

    Megatron numbers pipeline stages last, so a stage's ranks follow each other. Its first and last ranks
    differ in their tensor-parallel shard, their experts, and their part of the optimizer.
    """
    each, last = world // parallel.pp, parallel.pp - 1
    stages = [0, last]
    if parallel.pp > 2:
        sizes = parallel.stage_layers or (1,) * parallel.pp
        layers = [sum(sizes[stage :: parallel.pp]) for stage in range(parallel.pp)]
        stages.append(max(range(1, last), key=layers.__getitem__))
    return sorted({rank for stage in stages for rank in (stage * each, (stage + 1) * each - 1)})
