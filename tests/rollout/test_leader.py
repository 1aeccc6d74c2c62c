"""Commands of rank 0 on every rank, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_gvpo.config.schema import ConfigError
from megatron_gvpo.rollout.leader import Done, Failed, Push, Wait, lead
from megatron_gvpo.rollout.request import RolloutError

COMMANDS = [Wait(), Push(), Wait(), Done([[1, "text", None]]), Done()]
FAILURES = [Failed(ConfigError("a key is wrong")), Failed(RolloutError("no server"))]


def on_two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    left = iter([*COMMANDS, *FAILURES])
    next_command = (lambda: next(left)) if rank == 0 else None
    assert [lead(next_command) for _ in COMMANDS] == COMMANDS
    for failed in FAILURES:
        heard = lead(next_command)
        assert isinstance(heard, Failed) and type(heard.error) is type(failed.error)
        assert str(heard.error) == str(failed.error)
    dist.destroy_process_group()


def test_every_rank_hears_what_rank_0_commands(tmp_path: Path):
    torch.multiprocessing.spawn(on_two_ranks, (str(tmp_path),), nprocs=2)


def test_an_error_is_raised_as_it_was():
    with pytest.raises(ConfigError, match=r"^a key is wrong$"):
        raise lead(lambda: FAILURES[0]).error
