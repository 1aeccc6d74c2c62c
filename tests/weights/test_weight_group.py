"""The process group of weight broadcasts, on a stand-in for NCCL, which would need a GPU."""

from __future__ import annotations

import asyncio
import os
import threading
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.servers.fake_servers import itself

from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.server import ServerInfo
from megatron_gvpo.weights.broadcast import Broadcast
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.group import Rendezvous
from megatron_gvpo.weights.transport import PushFailed

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
PATIENCE = 10.0  # seconds until a broadcast that nobody else joins fails


class LikeNccl:
    """Stands for torch's ProcessGroupNCCL, which connects the ranks (ncclCommInitRank) at its first use.

    The call that begins that broadcast returns when all ranks have begun theirs.
    """

    class Options:
        _timeout = timedelta(0)

    made: ClassVar[list[LikeNccl]] = []

    def __init__(self, store: Any, rank: int, world: int, options: Options) -> None:
        self.options, self.others, self.aborted = options, threading.Event(), False
        self.error_handling = os.environ.get(ERROR_HANDLING)
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Done:
        if not self.others.wait(PATIENCE):
            raise RuntimeError("the other ranks did not come")
        return Done()

    def abort(self) -> None:
        self.aborted = True


class Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


class Server:
    """Stands for a server that begins its broadcast when asked to, or refuses."""

    url = "http://server"

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses

    def group_prefixes(self, rendezvous: Rendezvous) -> list[str]:
        return []

    async def info(self, timeout: float) -> ServerInfo:
        return ServerInfo("1", "model", 0, 1)

    async def begin_update(self, timeout: float) -> None: ...

    async def join(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None: ...

    async def leave(self, rendezvous: Rendezvous, timeout: float) -> None: ...

    async def receive(self, specs: list[TensorSpec], rendezvous: Rendezvous, timeout: float) -> None:
        if self.refuses:
            raise ServerRefused("no such group", 400)
        LikeNccl.made[-1].others.set()


@pytest.fixture(autouse=True)
def like_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LikeNccl)


def send(server: Server) -> int:
    async def push() -> int:
        transport = Broadcast(itself, "127.0.0.1", "nccl", PATIENCE)
        await transport.begin([ServerHandle(server)], 1)  # type: ignore[arg-type]
        return await transport.send(
            Bucket([TensorSpec("w", "uint8", (4,))], torch.zeros(4, dtype=torch.uint8))
        )

    return asyncio.run(push())


def test_a_server_hears_of_the_first_broadcast_while_its_ranks_are_being_connected():
    assert send(Server()) == 4


def test_a_server_that_refuses_is_heard_while_its_ranks_are_being_connected():
    with pytest.raises(PushFailed, match=r"^no such group$"):
        send(Server(refuses=True))
    group = LikeNccl.made[-1]
    assert group.aborted and not group.others.is_set()


def test_the_watchdog_that_would_end_the_process_waits_longer_than_the_push():
    send(Server())
    assert LikeNccl.made[-1].options._timeout > timedelta(seconds=PATIENCE)


@pytest.mark.parametrize("before", ["1", None])
def test_a_server_that_died_in_a_broadcast_does_not_end_the_trainer(
    before: str | None, monkeypatch: pytest.MonkeyPatch
):
    """By default torch ends the process after a failed operation. A group reads the setting once."""
    if before is None:
        monkeypatch.delenv(ERROR_HANDLING, raising=False)
    else:
        monkeypatch.setenv(ERROR_HANDLING, before)
    send(Server())
    assert LikeNccl.made[-1].error_handling == "0" and os.environ.get(ERROR_HANDLING) == before
