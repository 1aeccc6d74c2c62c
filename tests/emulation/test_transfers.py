"""Messages between ranks on emulated GPUs may be waited for twice, as NCCL's may."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import on_null_cuda
from helpers.distributed import launch

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")


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
