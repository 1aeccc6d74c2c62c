"""Collectives of gloo with pieces of different sizes, which NCCL takes and tensor-parallel experts need."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# An emulated GPU puts the functions below in their places.
_all_gather, _reduce_scatter = dist.all_gather, dist.reduce_scatter


def all_gather(pieces: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Like dist.all_gather. Pieces of different sizes have arrived when it returns, and it returns None."""
    if len({piece.shape for piece in pieces}) == 1:
        return _all_gather(pieces, tensor, group, async_op)
    ranks = dist.get_process_group_ranks(group)
    pieces[dist.get_rank(group)].copy_(tensor)
    for source, piece in zip(ranks, pieces, strict=True):
        dist.broadcast(piece, source, group)
    return None


def reduce_scatter(
    output: Tensor,
    pieces: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Like dist.reduce_scatter. Pieces of different sizes are summed when it returns, and it returns None."""
    if len({piece.shape for piece in pieces}) == 1:
        return _reduce_scatter(output, pieces, op, group, async_op)
    for number, piece in enumerate(pieces):
        total = piece.contiguous().clone()
        dist.all_reduce(total, op, group)
        if number == dist.get_rank(group):
            output.copy_(total)
    return None
