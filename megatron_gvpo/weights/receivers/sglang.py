"""Weight receivers of SGLang servers (its native HTTP interface, read from 0.5.23).

SGLang receives whole tensors itself. Patches and shared memory go through the project's plugin
(megatron_gvpo_sglang), which SGLang calls as a custom weight loader.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from megatron_gvpo.servers.server import answer_of
from megatron_gvpo.servers.sglang import WEIGHT_LOADER
from megatron_gvpo.weights.adapter import AdapterReceiver
from megatron_gvpo.weights.broadcast import BroadcastReceiver
from megatron_gvpo.weights.bucket import TensorSpec
from megatron_gvpo.weights.delta import DeltaReceiver, Patch
from megatron_gvpo.weights.disk import DiskReceiver
from megatron_gvpo.weights.group import Rendezvous
from megatron_gvpo.weights.sharded import ShardedReceiver
from megatron_gvpo.weights.shared import SharedLocation, SharedReceiver
from megatron_gvpo.weights.transport import WeightReceiver

POLICY = {"selector": "target"}  # selects the policy only; otherwise SGLang would also load the draft model


class SGLangReceiver(WeightReceiver):
    """Begins and ends an update of one SGLang server."""

    begin_path: ClassVar[str] = "/begin_weight_update"
    begin_body: ClassVar[dict[str, Any] | None] = POLICY
    end_path: ClassVar[str] = "/end_weight_update"
    already_begun: ClassVar[str] = "already open"

    async def end_update(self, version: str, timeout: float) -> None:
        await self._http.post(self.end_path, timeout=timeout)
        await self.name_version(version, timeout)

    async def name_version(self, version: str, timeout: float) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._http.post("/update_weight_version", body, timeout=timeout)


class SGLangBroadcast(SGLangReceiver, BroadcastReceiver):
    """Whole tensors, through SGLang's own process group."""

    def group_prefixes(self, rendezvous: Rendezvous) -> list[str]:
        """SGLang's own group name, then the prefix that torch gives to a new group on its backend."""
        device = "cuda" if rendezvous.backend == "nccl" else "cpu"
        return [rendezvous.name, f"{rendezvous.name}/", f"{device}/"]

    async def join(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None:
        body = {
            "master_address": rendezvous.address,
            "master_port": rendezvous.port,
            "rank_offset": rank_offset,
            "world_size": rendezvous.world_size,
            "group_name": rendezvous.name,
            "backend": rendezvous.backend,
        }
        await self._http.post("/init_weights_update_group", body, timeout=timeout)

    async def leave(self, rendezvous: Rendezvous, timeout: float) -> None:
        body = {"group_name": rendezvous.name}
        await self._http.post("/destroy_weights_update_group", body, timeout=timeout)

    async def receive(self, specs: Sequence[TensorSpec], rendezvous: Rendezvous, timeout: float) -> None:
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": rendezvous.name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
            **POLICY,
        }
        await self._http.post("/update_weights_from_distributed", body, timeout=timeout)


class PluginReceiver(SGLangReceiver):
    """Sends orders to the project's plugin in the server's ranks."""

    async def order_all(self, order: dict[str, Any], timeout: float) -> None:
        """Send the same order to all ranks."""
        processes = (await self._server.info(timeout)).processes
        await self.order([order] * processes, timeout)

    async def order(self, orders: Sequence[dict[str, Any]], timeout: float) -> None:
        """Send each rank its order."""
        payloads = [base64.b64encode(pickled_tensor(json.dumps(order))).decode() for order in orders]
        body = {"serialized_named_tensors": payloads, "load_format": WEIGHT_LOADER, "flush_cache": False}
        body |= POLICY
        await self._http.post("/update_weights_from_tensor", body, timeout=timeout)


class PluginGroupReceiver(PluginReceiver):
    """Forms a process group with the plugin."""

    async def join(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None:
        processes = (await self._server.info(timeout)).processes
        order = {
            "op": "join",
            "name": rendezvous.name,
            "address": rendezvous.address,
            "port": rendezvous.port,
            "world_size": rendezvous.world_size,
            "backend": rendezvous.backend,
            "max_ctas": rendezvous.max_ctas,
            "memory": rendezvous.memory,
            "timeout": timeout,
        }
        await self.begin_update(timeout)  # SGLang calls a custom loader only inside an update
        await self.order([order | {"rank": rank_offset + i} for i in range(processes)], timeout)
        await self._http.post(self.end_path, timeout=timeout)

    async def leave(self, rendezvous: Rendezvous, timeout: float) -> None:
        """Nothing to do: the plugin forgets a group when it joins the next."""


class SGLangDelta(PluginGroupReceiver, DeltaReceiver):
    """Patches, through a process group of the plugin's."""

    async def receive_patches(
        self, patches: Sequence[Patch], size: int, rendezvous: Rendezvous, timeout: float
    ) -> None:
        listed = [[p.spec.name, p.spec.dtype, p.spec.shape, p.count] for p in patches]
        order = {"op": "apply", "name": rendezvous.name, "bytes": size, "patches": listed}
        await self.order_all(order, timeout)

    async def check_patches(self, timeout: float) -> None:
        await self.order_all({"op": "check"}, timeout)


class SGLangSharded(PluginGroupReceiver, ShardedReceiver):
    """Shards, through a process group of the plugin's."""

    async def read_layout(self, rendezvous: Rendezvous, rank_offset: int, timeout: float) -> None:
        processes = (await self._server.info(timeout)).processes
        order = {"op": "read_layout", "name": rendezvous.name}
        await self.order([order | {"rank": rank_offset + i} for i in range(processes)], timeout)

    async def receive_shards(self, timeout: float) -> None:
        await self.order_all({"op": "shards"}, timeout)

    async def leave(self, rendezvous: Rendezvous, timeout: float) -> None:
        await self.order_all({"op": "leave", "name": rendezvous.name}, timeout)


class SGLangShared(PluginReceiver, SharedReceiver):
    """Buckets in memory that the plugin maps."""

    async def tell_gpus(self, file: Path, timeout: float) -> None:
        await self.order_all({"op": "tell", "file": str(file)}, timeout)

    async def receive_shared(
        self, specs: Sequence[TensorSpec], location: SharedLocation, timeout: float
    ) -> None:
        listed = [[spec.name, spec.dtype, spec.shape] for spec in specs]
        order = {"op": "load", "tensors": listed}
        if isinstance(location, Path):
            await self.order_all(order | {"file": str(location)}, timeout)
        else:
            await self.order([order | {"handle": handle} for handle in location], timeout)


class SGLangDisk(SGLangReceiver, DiskReceiver):
    """Safetensors files, which SGLang reads itself."""

    async def load_directory(self, directory: Path, version: str, timeout: float) -> None:
        # SGLang keeps the directory as its model path, but reads config.json there only when it starts.
        body = {"model_path": str(directory), "flush_cache": False, "keep_pause": True}
        await self._http.post("/update_weights_from_disk", body, timeout=timeout)
        await self.name_version(version, timeout)


class SGLangAdapter(SGLangReceiver, AdapterReceiver):
    """Adapters by files, which SGLang reads itself."""

    load_path: ClassVar[str] = "/load_lora_adapter"
    unload_path: ClassVar[str] = "/unload_lora_adapter"

    async def refusal(self, rank: int, layers: Sequence[str], timeout: float) -> str | None:
        info = await self._http.get("/server_info", timeout=timeout)
        with answer_of(self._server, "/server_info"):
            if not info["enable_lora"]:
                return "it was started without --enable-lora"
            if info["dp_size"] > 1:
                return f"it has {info['dp_size']} data-parallel replicas, with which SGLang loads no adapters"
            if info["max_lora_rank"] < rank:
                return f"--max-lora-rank {info['max_lora_rank']}, and model.adapter.rank={rank}"
            absent = sorted(set(layers) - set(info["lora_target_modules"]))
            return f"its --lora-target-modules lack {', '.join(absent)}" if absent else None


RECEIVERS: dict[str, type[WeightReceiver]] = {
    "broadcast": SGLangBroadcast,
    "sharded": SGLangSharded,
    "colocated": SGLangSharded,
    "delta": SGLangDelta,
    "shared": SGLangShared,
    "disk": SGLangDisk,
    "adapter": SGLangAdapter,
}


def pickled_tensor(text: str) -> bytes:
    """A pickle of [("order", torch.ByteTensor([byte, ...]))], the bytes of `text` in UTF-8.

    /update_weights_from_tensor takes nothing but a pickle, which SGLang's safe unpickler reads. It is written
    by hand because torch would pickle the tensor as a handle of this machine's shared memory, which a server
    on another node cannot open. The project itself never unpickles anything.
    """
    numbers = pickle.dumps(list(text.encode()), protocol=2)[2:-1]
    name = b"X" + len(b"order").to_bytes(4, "little") + b"order"
    return b"\x80\x02]" + name + b"ctorch\nByteTensor\n" + numbers + b"\x85R\x86a."
