"""Weight receivers of vLLM servers (RL interface of 0.32.0), all through the project's plugin
megatron_gvpo_vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from megatron_gvpo.servers.server import answer_of
from megatron_gvpo.weights.adapter import AdapterReceiver
from megatron_gvpo.weights.broadcast import BroadcastReceiver
from megatron_gvpo.weights.bucket import TensorSpec
from megatron_gvpo.weights.delta import DeltaReceiver, Patch
from megatron_gvpo.weights.disk import DiskReceiver
from megatron_gvpo.weights.group import Rendezvous
from megatron_gvpo.weights.sharded import ShardedReceiver
from megatron_gvpo.weights.shared import SharedLocation, SharedReceiver
from megatron_gvpo.weights.transport import WeightReceiver


class VLLMReceiver(WeightReceiver):
    """Begins and ends an update of one vLLM server, and tells the plugin what to load."""

    begin_path: ClassVar[str] = "/start_weight_update"
    end_path: ClassVar[str] = "/finish_weight_update"
    already_begun: ClassVar[str] = "already active"

    async def end_update(self, version: str, timeout: float) -> None:
        await self._http.post(self.end_path, {"weight_version": version}, timeout=timeout)

    async def update(self, specs: Sequence[TensorSpec], timeout: float, **more: Any) -> None:
        """Send the plugin the tensors' names, dtypes and shapes, and more fields of its `BucketUpdate`."""
        info = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        await self._http.post("/update_weights", {"update_info": info | more}, timeout=timeout)


class VLLMGroupReceiver(VLLMReceiver):
    """Forms a process group with the plugin."""

    async def join(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None:
        info = {
            "master_address": rendezvous.address,
            "master_port": rendezvous.port,
            "rank_offset": rank_offset,
            "world_size": rendezvous.world_size,
            "backend": rendezvous.backend,
            "max_ctas": rendezvous.max_ctas,
            "memory": rendezvous.memory,
            "timeout": timeout,
        }
        await self._http.post("/init_weight_transfer_engine", {"init_info": info}, timeout=timeout)

    async def leave(self, rendezvous: Rendezvous, timeout: float) -> None:
        await self._http.post("/shutdown_weight_transfer_engine", timeout=timeout)


class VLLMBroadcast(VLLMGroupReceiver, BroadcastReceiver):
    """Receives whole tensors, through a process group of the plugin's."""

    async def receive(self, specs: Sequence[TensorSpec], rendezvous: Rendezvous, timeout: float) -> None:
        await self.update(specs, timeout)


class VLLMDelta(VLLMBroadcast, DeltaReceiver):
    """Receives patches, through a process group of the plugin's."""

    async def receive_patches(
        self, patches: Sequence[Patch], size: int, rendezvous: Rendezvous, timeout: float
    ) -> None:
        await self.update([p.spec for p in patches], timeout, counts=[p.count for p in patches], size=size)

    async def check_patches(self, timeout: float) -> None:
        """Nothing to do: the plugin checks at the end of the update."""


class VLLMSharded(VLLMGroupReceiver, ShardedReceiver):
    """Shards, through the same process group."""

    async def read_layout(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None:
        await self.update([], timeout, shards="read_layout")

    async def receive_shards(self, timeout: float) -> None:
        await self.update([], timeout, shards="receive")


class VLLMShared(VLLMReceiver, SharedReceiver):
    """Buckets in memory that the plugin maps."""

    async def tell_gpus(self, file: Path, timeout: float) -> None:
        await self.update([], timeout, tell=str(file))

    async def receive_shared(
        self, specs: Sequence[TensorSpec], location: SharedLocation, timeout: float
    ) -> None:
        memory = {"file": str(location)} if isinstance(location, Path) else {"handles": location}
        await self.update(specs, timeout, **memory)


class VLLMDisk(VLLMReceiver, DiskReceiver):
    """Safetensors files, which the plugin reads."""

    async def load_directory(self, directory: Path, version: str, timeout: float) -> None:
        await self.begin_update(timeout)
        await self.update([], timeout, directory=str(directory))
        await self.end_update(version, timeout)


class VLLMAdapter(VLLMReceiver, AdapterReceiver):
    """Adapters by files, which vLLM reads itself."""

    load_path: ClassVar[str] = "/v1/load_lora_adapter"
    unload_path: ClassVar[str] = "/v1/unload_lora_adapter"

    async def name_version(self, version: str, timeout: float) -> None:
        # An empty update would not do: at the end of an update vLLM removes all adapters from its workers.
        await self._http.post("/update_weight_version", {"new_version": version}, timeout=timeout)

    async def refusal(self, rank: int, layers: Sequence[str], timeout: float) -> str | None:
        info = await self._http.get("/server_info?config_format=json", timeout=timeout)
        with answer_of(self._server, "/server_info"):
            served = info["vllm_config"]["lora_config"]
            if served is None:
                return "it was started without --enable-lora"
            if not info["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]:
                return "it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            if served["max_lora_rank"] < rank:
                return f"--max-lora-rank {served['max_lora_rank']}, and model.adapter.rank={rank}"
            return None


RECEIVERS: dict[str, type[WeightReceiver]] = {
    "broadcast": VLLMBroadcast,
    "sharded": VLLMSharded,
    "colocated": VLLMSharded,
    "delta": VLLMDelta,
    "shared": VLLMShared,
    "disk": VLLMDisk,
    "adapter": VLLMAdapter,
}
