"""Receives the plain broadcasts that weight_sync.py compares its transports with.

usage: python plain.py cpu|cuda PORT BUCKET_BYTES
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist


def main(device: str, port: str, bucket: str) -> None:
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=False)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=1, world_size=2)
    buffer = torch.ones(int(bucket), dtype=torch.uint8, device=device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.broadcast(size, 0)
        dist.barrier()
        if not (remaining := int(size)):
            break
        while remaining:
            dist.broadcast(buffer[: min(remaining, len(buffer))], 0)
            remaining -= min(remaining, len(buffer))
        dist.barrier()
    dist.destroy_process_group()


main(*sys.argv[1:])
