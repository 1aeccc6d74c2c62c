"""The dialect of vLLM servers (OpenAI and RL interfaces of 0.32.0) with the project's receiver plugin."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_gvpo.config.schema import Config, SamplingConfig
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

MODEL = "policy"  # the name that requests give


class VLLM:
    """One vLLM server."""

    tested: ClassVar[Sequence[str]] = (REFERENCE["vllm"],)

    def __init__(self, http: Http) -> None:
        self._http = http

    @property
    def url(self) -> str:
        return self._http.url

    @staticmethod
    def group_prefixes(meeting: Rendezvous) -> list[str]:
        """None: our plugin joins with the bare store."""
        return []

    @staticmethod
    def launch(config: Config, port: int, api_key: str | None, on_gpu: bool) -> Launch:
        servers = config.rollout.servers
        # Not `vllm serve`: it asks for a distribution of the name vllm, and the CPU build has another one.
        command = [servers.python, "-m", "vllm.entrypoints.openai.api_server", "--model", config.served_path]
        command += ["--served-model-name", MODEL, "--host", servers.host, "--port", str(port)]
        command += ["--dtype", config.model.dtype, "--tensor-parallel-size", str(servers.tp)]
        # Log-probs at the sampling temperature, as training takes them.
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--weight-transfer-config", '{"backend": "megatron_gvpo"}']
        if servers.context_length:
            command += ["--max-model-len", str(servers.context_length)]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(PLUGINS)}
        if api_key:
            environment["VLLM_API_KEY"] = api_key
        if servers.colocated and on_gpu:
            command += ["--enable-sleep-mode"]
        if config.rollout.router_replay:
            command += ["--enable-return-routed-experts"]
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the older one does not tell
        if not on_gpu:
            command += ["--enforce-eager"]
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else a NUMA node for each rank
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else its first request starts dozens
        return Launch([*command, *servers.args], environment)

    async def healthy(self, timeout: float) -> bool:
        await self._http.get("/health", timeout=timeout)
        return True

    async def facts(self, timeout: float) -> ServerInfo:
        version = await self._http.get("/version", timeout=timeout)
        models = await self._http.get("/v1/models", timeout=timeout)
        world = await self._http.get("/get_world_size", timeout=timeout)
        served = models["data"][0]
        return ServerInfo(
            version=version["version"],
            model_path=served["root"],
            context_length=served["max_model_len"],
            processes=world["world_size"],
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
        body = {
            "model": MODEL,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "stop_token_ids": list(stop_ids),
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = await self._http.post("/v1/completions", body, timeout=timeout)
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        experts = choice.get("routed_experts") if sampling.wants_routing else None
        return Sample(
            token_ids=choice["token_ids"] or [],
            logprobs=logprobs,
            finish_reason=finish(choice["finish_reason"]),
            experts=None if experts is None else np.load(io.BytesIO(base64.b64decode(experts))),
        )

    async def score(self, token_ids: Sequence[int], timeout: float) -> list[float]:
        body = {
            "model": MODEL,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = await self._http.post("/v1/completions", body, timeout=timeout)
        given = answer["choices"][0]["prompt_logprobs"][1:]
        pairs = zip(given, token_ids[1:], strict=True)
        return [entry[str(token)]["logprob"] for entry, token in pairs]

    async def abort(self, timeout: float) -> None:
        await self._http.post("/abort_requests", {"request_ids": []}, timeout=timeout)

    async def pause(self, timeout: float) -> None:
        await self._http.post("/pause", params={"mode": "abort"}, timeout=timeout)

    async def resume(self, timeout: float) -> None:
        await self._http.post("/resume", timeout=timeout)

    async def flush_cache(self, timeout: float) -> None:
        await self._http.post("/reset_prefix_cache", timeout=timeout)

    async def weight_version(self, timeout: float) -> str:
        info = await self._http.get("/weight_info", timeout=timeout)
        return str(info["weight_version"])

    async def join(self, meeting: Rendezvous, rank_offset: int, timeout: float) -> None:
        info = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": rank_offset,
            "world_size": meeting.world_size,
            "backend": meeting.backend,
            "timeout": timeout,
        }
        await self._http.post("/init_weight_transfer_engine", {"init_info": info}, timeout=timeout)

    async def leave(self, meeting: Rendezvous, timeout: float) -> None:
        await self._http.post("/shutdown_weight_transfer_engine", timeout=timeout)

    async def begin_update(self, timeout: float) -> None:
        try:
            await self._http.post("/start_weight_update", timeout=timeout)
        except ServerRefused as error:
            if "already active" not in str(error):
                raise
            # Of a push that failed half-way: what it left is overwritten now.
            await self._http.post("/finish_weight_update", timeout=timeout)
            await self._http.post("/start_weight_update", timeout=timeout)

    async def receive(self, specs: Sequence[TensorSpec], meeting: Rendezvous, timeout: float) -> None:
        await self._http.post("/update_weights", {"update_info": _listed(specs)}, timeout=timeout)

    async def join_for_patches(self, meeting: Rendezvous, rank_offset: int, timeout: float) -> None:
        await self.join(meeting, rank_offset, timeout)

    async def leave_patches(self, meeting: Rendezvous, timeout: float) -> None:
        await self.leave(meeting, timeout)

    async def receive_patches(
        self, patches: Sequence[Patch], size: int, meeting: Rendezvous, timeout: float
    ) -> None:
        info = _listed([p.spec for p in patches]) | {"counts": [p.count for p in patches], "size": size}
        await self._http.post("/update_weights", {"update_info": info}, timeout=timeout)

    async def check_patches(self, timeout: float) -> None:
        """Nothing: the plugin does so at the end of the update."""

    async def end_update(self, version: str, timeout: float) -> None:
        await self._http.post("/finish_weight_update", {"weight_version": version}, timeout=timeout)

    async def tell_gpus(self, file: Path, timeout: float) -> None:
        await self._http.post(
            "/update_weights", {"update_info": _listed([]) | {"tell": str(file)}}, timeout=timeout
        )

    async def receive_shared(self, specs: Sequence[TensorSpec], place: SharedPlace, timeout: float) -> None:
        info = _listed(specs) | ({"file": str(place)} if isinstance(place, Path) else {"handles": place})
        await self._http.post("/update_weights", {"update_info": info}, timeout=timeout)

    async def release_memory(self, timeout: float) -> None:
        await self._http.post("/sleep", timeout=timeout, params={"level": "2", "mode": "abort"})

    async def reclaim_memory(self, part: MemoryPart, timeout: float) -> None:
        tag = {"weights": "weights", "cache": "kv_cache"}[part]
        await self._http.post("/wake_up", timeout=timeout, params={"tags": tag})

    async def load_directory(self, directory: Path, version: str, timeout: float) -> None:
        await self.begin_update(timeout)
        info = {"names": [], "dtypes": [], "shapes": [], "directory": str(directory)}
        await self._http.post("/update_weights", {"update_info": info}, timeout=timeout)
        await self.end_update(version, timeout)


def _listed(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }
