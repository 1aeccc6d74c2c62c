"""Commands of rank 0 on every rank, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.servers import leader
from megatron_gvpo.servers.leader import Done, Failed, Push, Wait, lead
from megatron_gvpo.weights.relay import Discover

COMMANDS = [Wait(), Push(), Wait(), Done([[1, "text", None]]), Done()]
FAILURES = [Failed.by(ConfigError("a key is wrong")), Failed.by(RolloutError("no server"))]


def on_two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    remaining = iter([*COMMANDS, *FAILURES])
    next_command = (lambda: next(remaining)) if rank == 0 else None
    for command in (*COMMANDS, *FAILURES):
        assert lead(next_command) == command
    dist.destroy_process_group()


def test_every_rank_hears_what_rank_0_commands(tmp_path: Path):
    torch.multiprocessing.spawn(on_two_ranks, (str(tmp_path),), nprocs=2)


def test_an_error_is_raised_as_it_was():
    with pytest.raises(ConfigError, match=r"^a key is wrong$"):
        raise lead(lambda: FAILURES[0]).error
    assert isinstance(FAILURES[1].error, RolloutError)


@pytest.mark.parametrize("sent", [["wait"], ["Discover"], ["Wait", 1], [], "Wait", {"do": "Wait"}])
def test_a_message_of_another_kind_is_refused(sent: object):
    with pytest.raises((AssertionError, TypeError)):
        leader.COMMANDS.decode(sent)
    with pytest.raises(AssertionError, match=r"Discover\(\) is not one of Wait, Push, Done, Failed"):
        leader.COMMANDS.encode(Discover())
