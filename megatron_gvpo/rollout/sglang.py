"""The dialect of SGLang servers (its native HTTP interface, read from 0.5.23)."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_gvpo.config.schema import Config, ConfigError, SamplingConfig
from megatron_gvpo.rollout.http import Http, ServerRefused
from megatron_gvpo.rollout.server import (
    PLUGINS,
    Launch,
    MemoryPart,
    Patch,
    Rendezvous,
    Sample,
    ServerInfo,
    SharedPlace,
    TensorSpec,
    finish,
)
from megatron_gvpo.versions import REFERENCE

RECEIVER = "megatron_gvpo_sglang.receive"


class SGLang:
    """One SGLang server."""

    tested: ClassVar[Sequence[str]] = (REFERENCE["sglang"],)

    def __init__(self, http: Http) -> None:
        self._http = http

    @property
    def url(self) -> str:
        return self._http.url

    @staticmethod
    def group_prefixes(meeting: Rendezvous) -> list[str]:
        """SGLang's own group name, then what torch puts before the keys of a new group on its backend."""
        device = "cuda" if meeting.backend == "nccl" else "cpu"
        return [meeting.name, f"{meeting.name}/", f"{device}/"]

    @staticmethod
    def launch(config: Config, port: int, api_key: str | None, on_gpu: bool) -> Launch:
        servers = config.rollout.servers
        command = [servers.python, "-m", "sglang.launch_server", "--model-path", config.served_path]
        command += ["--host", servers.host, "--port", str(port), "--dtype", config.model.dtype]
        command += ["--tp-size", str(servers.tp), "--skip-server-warmup"]
        command += ["--custom-weight-loader", RECEIVER]
        if servers.context_length:
            command += ["--context-length", str(servers.context_length)]
        if servers.colocated and on_gpu:
            command += ["--enable-memory-saver"]
        if config.rollout.router_replay:
            command += ["--enable-return-routed-experts"]
        environment = {"PYTHONPATH": str(PLUGINS)}
        if not on_gpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            if servers.tp > 1:  # else it wants a NUMA node for each rank
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * servers.tp)
            command += ["--device", "cpu", "--attention-backend", "torch_native"]
            command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule"]
            command += ["--sleep-on-idle"]  # else an idle scheduler keeps a core busy
            command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "65536"]
        command += servers.args
        if not api_key:
            return Launch(command, environment)
        if "--config" in servers.args:
            raise ConfigError(
                "rollout.servers.args: SGLang takes one --config, and has the API key from it: give the "
                "options of yours as arguments"
            )
        # A command line is everybody's to read, and SGLang asks no environment variable.
        return Launch([*command, "--config"], environment, json.dumps({"api-key": api_key}))

    async def healthy(self, timeout: float) -> bool:
        await self._http.get("/health", timeout=timeout)
        return True

    async def facts(self, timeout: float) -> ServerInfo:
        info = await self._http.get("/server_info", timeout=timeout)
        return ServerInfo(
            version=info["version"],
            model_path=info["model_path"],
            context_length=info["context_length"] or 0,
            processes=info["tp_size"] * info["pp_size"],
        )

    async def sample(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        seed: int,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        timeout: float,
    ) -> Sample:
        answer = await self._http.post(
            "/generate",
            {
                "input_ids": list(token_ids),
                "sampling_params": {
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "max_new_tokens": max_tokens,
                    "stop_token_ids": list(stop_ids),
                    "sampling_seed": seed % 2**31,  # heeded under --enable-deterministic-inference
                },
                "return_logprob": True,
                "return_routed_experts": sampling.wants_routing,
            },
            timeout=timeout,
        )
        meta = answer["meta_info"]
        experts = meta.get("routed_experts")  # of prompt and response but the last token, in all layers
        return Sample(
            token_ids=answer["output_ids"],
            logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
            finish_reason=finish(meta["finish_reason"]["type"]),
            version=meta["weight_version"],
            experts=None if experts is None else np.frombuffer(base64.b64decode(experts), "<i4"),
        )

    async def score(self, token_ids: Sequence[int], timeout: float) -> list[float]:
        # The last input token's entry is that of token 0 (0.5.23), so one more token is given and left out.
        body: dict[str, Any] = {
            "input_ids": [*token_ids, token_ids[-1]],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._http.post("/generate", body, timeout=timeout)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:-1]]

    async def abort(self, timeout: float) -> None:
        await self._http.post("/abort_request", {"abort_all": True}, timeout=timeout)

    async def pause(self, timeout: float) -> None:
        await self._http.post("/pause_generation", {"mode": "abort"}, timeout=timeout)

    async def resume(self, timeout: float) -> None:
        await self._http.post("/continue_generation", timeout=timeout)

    async def flush_cache(self, timeout: float) -> None:
        await self._http.post("/flush_cache", timeout=timeout)

    async def weight_version(self, timeout: float) -> str:
        info = await self._http.get("/model_info", timeout=timeout)
        return str(info["weight_version"])

    async def join(self, meeting: Rendezvous, rank_offset: int, timeout: float) -> None:
        body = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": rank_offset,
            "world_size": meeting.world_size,
            "group_name": meeting.name,
            "backend": meeting.backend,
        }
        await self._http.post("/init_weights_update_group", body, timeout=timeout)

    async def leave(self, meeting: Rendezvous, timeout: float) -> None:
        body = {"group_name": meeting.name}
        await self._http.post("/destroy_weights_update_group", body, timeout=timeout)

    async def begin_update(self, timeout: float) -> None:
        try:
            await self._http.post("/begin_weight_update", timeout=timeout)
        except ServerRefused as error:
            if "already open" not in str(error):
                raise
            # Of a push that failed half-way: what it left is overwritten now.
            await self._http.post("/end_weight_update", timeout=timeout)
            await self._http.post("/begin_weight_update", timeout=timeout)

    async def receive(self, specs: Sequence[TensorSpec], meeting: Rendezvous, timeout: float) -> None:
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": meeting.name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        await self._http.post("/update_weights_from_distributed", body, timeout=timeout)

    async def join_for_patches(self, meeting: Rendezvous, rank_offset: int, timeout: float) -> None:
        processes = (await self.facts(timeout)).processes
        order = {
            "op": "join",
            "name": meeting.name,
            "address": meeting.address,
            "port": meeting.port,
            "world_size": meeting.world_size,
            "backend": meeting.backend,
            "timeout": timeout,
        }
        await self.begin_update(timeout)  # SGLang takes no custom loader outside an update
        await self._order([order | {"rank": rank_offset + i} for i in range(processes)], timeout)
        await self._http.post("/end_weight_update", timeout=timeout)

    async def leave_patches(self, meeting: Rendezvous, timeout: float) -> None:
        """Nothing: the receiver forgets a group when it joins the next."""

    async def receive_patches(
        self, patches: Sequence[Patch], size: int, meeting: Rendezvous, timeout: float
    ) -> None:
        listed = [[p.spec.name, p.spec.dtype, p.spec.shape, p.count] for p in patches]
        await self._order_all(
            {"op": "apply", "name": meeting.name, "bytes": size, "patches": listed}, timeout
        )

    async def check_patches(self, timeout: float) -> None:
        await self._order_all({"op": "check"}, timeout)

    async def _order_all(self, order: dict[str, Any], timeout: float) -> None:
        """The same order for all ranks."""
        processes = (await self.facts(timeout)).processes
        await self._order([order] * processes, timeout)

    async def _order(self, orders: Sequence[dict[str, Any]], timeout: float) -> None:
        """An order for the receiver plugin in each of the server's ranks."""
        payloads = [base64.b64encode(_as_tensor(json.dumps(order))).decode() for order in orders]
        body = {"serialized_named_tensors": payloads, "load_format": RECEIVER, "flush_cache": False}
        await self._http.post("/update_weights_from_tensor", body, timeout=timeout)

    async def end_update(self, version: str, timeout: float) -> None:
        await self._http.post("/end_weight_update", timeout=timeout)
        await self._name_version(version, timeout)

    async def tell_gpus(self, file: Path, timeout: float) -> None:
        await self._order_all({"op": "tell", "file": str(file)}, timeout)

    async def receive_shared(self, specs: Sequence[TensorSpec], place: SharedPlace, timeout: float) -> None:
        listed = [[spec.name, spec.dtype, spec.shape] for spec in specs]
        order = {"op": "load", "tensors": listed}
        if isinstance(place, Path):
            await self._order_all(order | {"file": str(place)}, timeout)
        else:
            await self._order([order | {"handle": handle} for handle in place], timeout)

    async def release_memory(self, timeout: float) -> None:
        await self._http.post("/release_memory_occupation", timeout=timeout)

    async def reclaim_memory(self, part: MemoryPart, timeout: float) -> None:
        # Nothing runs before the cache is back, so the graphs may come with it.
        tags = {"weights": ["weights"], "cache": ["kv_cache", "cuda_graph"]}[part]
        await self._http.post("/resume_memory_occupation", {"tags": tags}, timeout=timeout)

    async def load_directory(self, directory: Path, version: str, timeout: float) -> None:
        # SGLang keeps the directory as its model path, and reads config.json there only at its start.
        body = {"model_path": str(directory), "flush_cache": False, "keep_pause": True}
        await self._http.post("/update_weights_from_disk", body, timeout=timeout)
        await self._name_version(version, timeout)

    async def _name_version(self, version: str, timeout: float) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._http.post("/update_weight_version", body, timeout=timeout)


def _as_tensor(text: str) -> bytes:
    """A pickle, such as SGLang's safe unpickler takes, of [("order", torch.ByteTensor([byte, ...]))].

    By hand, because torch would pickle a tensor as a handle of this machine's shared memory.
    """
    numbers = pickle.dumps(list(text.encode()), protocol=2)[2:-1]
    name = b"X" + len(b"order").to_bytes(4, "little") + b"order"
    return b"\x80\x02]" + name + b"ctorch\nByteTensor\n" + numbers + b"\x85R\x86a."
