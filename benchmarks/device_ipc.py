"""Another process maps a weight bucket in this GPU's memory, with the code of trainer and rollout server.

    python benchmarks/device_ipc.py      # also a part of device_check.py

The other process holds a model's tensors on the same GPU. It gets three buckets through one buffer, as a push
sends them, and returns the checksums of the tensors that it loaded. Without a GPU the check reports that
there is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.weights.bucket import Bucket, DoubleBuffer, buckets
from megatron_gvpo.weights.node import shared_storage

NO_GPU = "no GPU: CUDA IPC maps memory of one"


class Loaded(nn.Module):
    """A stand-in for an engine's model, which keeps a checksum of every tensor that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1, device="cuda"))
        self.sums: dict[str, int] = {}

    def load_weights(self, named: list[tuple[str, Tensor]]) -> None:
        self.sums |= {name: checksum(tensor) for name, tensor in named}


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the tensor's bytes and their places."""
    flat = tensor.contiguous().view(-1).view(torch.uint8).long()
    position = torch.arange(len(flat), device=flat.device) % 8191 + 1
    return int((flat * position).sum())


def check(smoke: bool) -> dict[str, Any]:
    """Check that the other process got all bytes, and measure GB/s, its checksums included."""
    size = 1 << (16 if smoke else 26)  # elements of one tensor
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = {f"t{i}": torch.randn(size, device=device).bfloat16() for i in range(6)}
    free = torch.cuda.memory_allocated()
    child = subprocess.Popen(
        [sys.executable, __file__, "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()  # the child is ready
        halves, begin = DoubleBuffer(8 * size, device), time.perf_counter()
        for bucket in buckets(iter(tensors.items()), halves, torch.bfloat16):
            child.stdin.write(json.dumps(order(bucket)) + "\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline())
        seconds = time.perf_counter() - begin
        halves.rest()
        del bucket
        torch.cuda.ipc_collect()
        leaked = torch.cuda.memory_allocated() - free
        child.stdin.close()
        child.wait(60)
    finally:
        child.kill()
    wanted = {name: checksum(tensor) for name, tensor in tensors.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "right": answer == wanted and leaked == 0 and child.returncode == 0,
        "gb_per_s": total / seconds / 1e9,
        "bytes_held_afterwards": leaked,
    }


def order(bucket: Bucket) -> dict[str, Any]:
    """Return the request that SGLang's receiver sends."""
    listed = [[spec.name, spec.dtype, spec.shape] for spec in bucket.specs]
    return {"op": "load", "tensors": listed, "handle": shared_storage(bucket.flat)}


def child() -> None:
    """Run the server's side: this package's receiver, without SGLang around it."""
    sys.path.insert(0, str(PLUGINS))
    import megatron_gvpo_sglang as receiver

    model = Loaded()
    print("up", flush=True)
    for line in sys.stdin:
        text = torch.tensor(list(line.strip().encode()), dtype=torch.uint8)
        receiver.receive(model, [("order", text)])
        print(json.dumps(model.sums), flush=True)


def main() -> None:
    if "--child" in sys.argv:
        child()
    elif not torch.cuda.is_available():
        print(NO_GPU)
    else:
        result = check(smoke=False)
        print(json.dumps(result, indent=2))
        sys.exit(not result["right"])


if __name__ == "__main__":
    main()
