"""Buckets in a GPU's memory, as far as a machine without a GPU can test: handles, choices, the receiver.

benchmarks/device_ipc.py tests the mapping itself, on a GPU.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.servers.fake_servers import itself
from torch import nn
from torch.distributed import HashStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.server import PLUGINS, ServerInfo
from megatron_gvpo.weights import node
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.node import FIELDS, plain, seen_by_all, shared_storage
from megatron_gvpo.weights.relay import ORDERS, Relays
from megatron_gvpo.weights.shared import Shared, SharedLocation
from megatron_gvpo.weights.transport import PushFailed

sys.path.insert(0, str(PLUGINS))

import megatron_gvpo_memory
import megatron_gvpo_sglang

# Values as torch makes them: the handle of an allocation, a file with counters, the handle of an event.
VALUES = [bytes(range(64)), 268435456, 2097152, b"/torch_1234_567_8", 24, bytes(range(64, 128)), True]
UUID = "9d3c1f5a-0000-1111-2222-333344445555"


def test_a_handle_goes_as_json_and_comes_back_bit_for_bit():
    sent = json.loads(json.dumps(plain(UUID, VALUES)))
    assert sent["uuid"] == UUID and {"uuid", *FIELDS} == sent.keys()
    assert megatron_gvpo_memory.arguments(sent) == VALUES


def test_handles_have_the_fields_that_torch_takes():
    """The order is that in which torch itself passes them on."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    parameters = [name for name in names[names.index("storage_device") + 1 :] if name != "requires_grad"]
    assert parameters == [
        "storage_handle",
        "storage_size_bytes",
        "storage_offset_bytes",
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    ]
    assert len(parameters) == len(FIELDS) == len(VALUES)


def test_host_memory_has_no_handle():
    with pytest.raises(ValueError, match="CUDA IPC shares memory of a GPU, and this bucket is on the cpu"):
        shared_storage(torch.zeros(4, dtype=torch.uint8))


def test_a_server_sees_a_gpu_when_all_its_ranks_do():
    assert seen_by_all([[UUID, "other", "b"], ["other", UUID]]) == [UUID, "other"]
    assert seen_by_all([[UUID], ["other"]]) == []
    assert seen_by_all([[UUID]]) == [UUID]
    assert seen_by_all([[], []]) == []


class OnGpus:
    """Stands for a server on a machine with GPUs, and for its receiver of shared buckets."""

    def __init__(self, name: str, *seen_by_ranks: list[str], maps: bool = True) -> None:
        self.url, self._seen, self._maps = f"http://{name}", seen_by_ranks, maps
        self.locations: list[SharedLocation] = []

    async def info(self, timeout: float) -> ServerInfo:
        return ServerInfo("0", "model", 256, len(self._seen))

    async def begin_update(self, timeout: float) -> None:
        self.locations.clear()

    async def tell_gpus(self, file: Path, timeout: float) -> None:
        for rank, seen in enumerate(self._seen):
            Path(f"{file}.{rank}").write_text(json.dumps(seen))

    async def receive_shared(self, specs: object, location: SharedLocation, timeout: float) -> None:
        if not isinstance(location, Path) and not self._maps:
            raise ServerRefused(f"{self.url}: cannot map it", 500)
        self.locations.append(location.read_bytes() if isinstance(location, Path) else location)


def test_each_server_of_a_push_maps_what_it_can_see(monkeypatch: pytest.MonkeyPatch):
    """Every rank of a server that sees the GPU gets a handle. The other servers map the machine's memory, and
    so does, in the next push, a server that failed to map the GPU's."""
    monkeypatch.setattr(node, "gpu_uuid", lambda device: UUID)
    monkeypatch.setattr(node, "shared_storage", lambda flat: plain(UUID, VALUES))
    two, away = OnGpus("two", [UUID, "b"], ["b", UUID]), OnGpus("away", ["c"])
    other = OnGpus("other", [UUID], maps=False)
    memory = node.NodeMemory(f"megatron_gvpo-test-{os.getpid()}", torch.device("cuda", 0))
    transport = Shared(itself, 5.0, memory, Relays(HashStore(), [], 5.0, ORDERS))
    bucket = Bucket([TensorSpec("weight", "uint8", (6,))], torch.arange(6, dtype=torch.uint8))

    async def pushed(*servers: OnGpus) -> None:
        await transport.begin([ServerHandle(server) for server in servers], 1)  # type: ignore[arg-type]
        await transport.send(bucket)

    asyncio.run(pushed(two, away))
    assert two.locations == [[plain(UUID, VALUES)] * 2]
    assert away.locations == [bytes(range(6))]
    assert transport.metrics == {"sync/ipc": 0.5}
    with pytest.raises(PushFailed, match="cannot map it") as failure:
        asyncio.run(pushed(two, other))
    assert [handle.server for handle in failure.value.handles] == [other]
    asyncio.run(pushed(two, other))
    assert two.locations == [[plain(UUID, VALUES)] * 2] and other.locations == [bytes(range(6))]
    asyncio.run(transport.close())


class Model(nn.Module):
    """The part of an engine's model that a receiver uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.bias = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.get_parameter(name).data.copy_(tensor)


def test_a_mapped_bucket_is_loaded_whatever_it_is_mapped_from(tmp_path: Path, monkeypatch):
    """Runs the receiver's code, where a handle opens host memory instead of a GPU's."""
    weight, bias = torch.randn(3, 2), torch.randn(5).bfloat16()
    flat = torch.cat([t.flatten().view(torch.uint8) for t in (weight, bias)])
    monkeypatch.setenv("MEGATRON_GVPO_MEMORY", str(tmp_path))
    directory = tmp_path / node.new_name()
    directory.mkdir(mode=0o700)
    file = directory / "bucket"
    file.write_bytes(flat.numpy().tobytes() + b"the rest of a larger buffer")
    specs = [TensorSpec("weight", "float32", (3, 2)), TensorSpec("bias", "bfloat16", (5,))]
    assert [name for name, _ in Bucket(specs, flat).tensors()] == ["weight", "bias"]

    def opened(handle: dict[str, object], size: int) -> torch.Tensor:
        assert megatron_gvpo_memory.arguments(handle) == VALUES
        return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)

    monkeypatch.setattr(megatron_gvpo_sglang, "opened", opened)
    listed = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]
    for source in ({"file": str(file)}, {"handle": plain(UUID, VALUES)}):
        model, order = Model(), {"op": "load", "tensors": listed, **source}
        text = torch.tensor(list(json.dumps(order).encode()), dtype=torch.uint8)
        megatron_gvpo_sglang.receive(model, [("order", text)])
        assert torch.equal(model.weight, weight) and torch.equal(model.bias, bias)


def test_the_check_for_a_gpu_says_when_there_is_none():
    script = Path(__file__).parents[2] / "benchmarks" / "device_ipc.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if not torch.cuda.is_available():
        assert done.stdout == "no GPU: CUDA IPC maps memory of one\n"
