"""Messages between ranks on emulated GPUs: waited for twice, and of several dtypes, as NCCL's may be."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.distributed import launch


def exchange() -> None:
    """Each of two ranks sends its number; called in a rank."""
    rank = dist.get_rank()
    own, other = (torch.full((3,), float(number), device="cuda") for number in (rank, -1))
    operations = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    transfers = dist.batch_isend_irecv(operations)
    for transfer in [*transfers, *transfers]:
        assert transfer.wait()
    assert all(transfer.is_completed() for transfer in transfers)
    assert other.tolist() == [1.0 - rank] * 3


def test_a_transfer_may_be_waited_for_twice() -> None:
    launch("test_transfers:exchange", [2], timeout=100, emulated=True)


def gather() -> None:
    """Both ranks' parts of a tensor of bytes and of one in bf16, in one message; called in a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [
        torch.zeros(world * count, dtype=dtype, device="cuda")
        for count, dtype in ((5, torch.uint8), (3, torch.bfloat16))
    ]
    with dist._coalescing_manager(dist.group.WORLD, tensors[0].device, async_ops=False):
        for tensor in tensors:
            part = tensor.chunk(world)[rank].fill_(100 + rank)
            dist.all_gather_into_tensor(tensor, part)
    assert tensors[0].tolist() == [100] * 5 + [101] * 5
    assert tensors[1].tolist() == [100.0] * 3 + [101.0] * 3


def test_tensors_of_several_dtypes_are_gathered_at_once() -> None:
    """So Megatron gathers weights where some are in FP8."""
    launch("test_transfers:gather", [2], timeout=100, emulated=True)


def gather_and_reduce_unequal_pieces() -> None:
    """Rank 0 has a row and rank 1 has three; called in a rank."""
    rank = dist.get_rank()
    own = torch.full((1 + 2 * rank, 2), float(rank), device="cuda")
    pieces = [torch.empty(1 + 2 * number, 2, device="cuda") for number in (0, 1)]
    dist.all_gather(pieces, own)
    assert [piece.tolist() for piece in pieces] == [[[0.0] * 2], [[1.0] * 2] * 3]
    total = torch.empty_like(own)
    dist.reduce_scatter(total, [piece + rank for piece in pieces])
    assert total.tolist() == [[2.0 * rank + 1] * 2] * (1 + 2 * rank)


def test_pieces_of_different_sizes_are_gathered_and_summed() -> None:
    """So tensor-parallel experts exchange tokens; NCCL takes such pieces, and gloo does not."""
    launch("test_transfers:gather_and_reduce_unequal_pieces", [2], timeout=100, emulated=True)
