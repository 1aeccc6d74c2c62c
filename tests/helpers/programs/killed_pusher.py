"""A process that pushes a model's weights to a server, and may kill itself in the middle.

python killed_pusher.py ENGINE URL TRANSPORT MODEL END

END is the moment at which it kills itself: paused, half (after a bucket), sending (while the server waits for
the second bucket), or whole (never).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from helpers.servers.real_servers import receiver
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import Http, open_session
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.weights.broadcast import Broadcast
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.delta import Delta

SILENCE = 4.0  # seconds without a request after which the server takes this process for dead
TRANSPORTS = {"broadcast": Broadcast, "delta": Delta}


async def main(engine: str, url: str, transport: str, model: str, end: str) -> None:
    session = await open_session()
    server = DIALECTS[engine](Http(session, url, silence=SILENCE))
    pushes = TRANSPORTS[transport](partial(receiver, transport=transport), "127.0.0.1", "gloo", 60.0)
    tensors = load_file(Path(model) / "model.safetensors")
    await server.pause(30)
    die(end == "paused")
    await pushes.begin([ServerHandle(server)], 7)
    for bucket in buckets(tensors.items(), DoubleBuffer(1 << 16, torch.device("cpu")), torch.float32):
        await pushes.send(bucket)
        die(end == "half")
        if end == "sending":
            pushes._group.broadcast = Never
    await pushes.end()
    await pushes.close()
    await server.flush_cache(30)
    await server.resume(30)
    await session.close()


class Never:
    """A stand-in for a broadcast that does not begin; it kills the process after two seconds."""

    def __init__(self, wire: torch.Tensor) -> None:
        self._begin = time.monotonic()

    def is_completed(self) -> bool:
        die(time.monotonic() > self._begin + 2)
        return False


def die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
