"""Client of vLLM servers (OpenAI and RL interfaces of 0.32.0)."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megatron_gvpo.config.checks.supported_models import experts
from megatron_gvpo.config.schema import Config, SamplingConfig, read_model_config
from megatron_gvpo.rollout.http import Http
from megatron_gvpo.rollout.server import (
    PLUGINS,
    Launch,
    MemoryPart,
    Sample,
    ServerInfo,
    answer_of,
    finish,
    numbers,
)
from megatron_gvpo.versions import REFERENCE

MODEL = "policy"  # the served model's name, which requests must give


class VLLM:
    """One vLLM server."""

    tested: ClassVar[Sequence[str]] = (REFERENCE["vllm"],)

    def __init__(self, http: Http) -> None:
        self.http = http

    @property
    def url(self) -> str:
        return self.http.url

    @staticmethod
    def launch(config: Config, port: int, api_key: str | None, on_gpu: bool) -> Launch:
        servers = config.rollout.servers
        # Not `vllm serve`, which needs a distribution called vllm: the CPU build's has another name.
        command = [servers.python, "-m", "vllm.entrypoints.openai.api_server", "--model", config.served_path]
        command += ["--served-model-name", MODEL, "--host", servers.host, "--port", str(port)]
        command += ["--dtype", config.model.dtype, "--tensor-parallel-size", str(servers.tp)]
        # Log-probs at the sampling temperature, which training compares with its own.
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--weight-transfer-config", '{"backend": "megatron_gvpo"}']
        if config.model.trust_remote_code:
            command += ["--trust-remote-code"]
        if servers.context_length:
            command += ["--max-model-len", str(servers.context_length)]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(PLUGINS)}
        if api_key:
            environment["VLLM_API_KEY"] = api_key
            # vLLM itself asks for the key under /v1 and the like, and not on the paths that load weights.
            command += ["--middleware", "megatron_gvpo_guard.Guard"]
        if servers.colocated and on_gpu:
            # vLLM's default share, 0.92, is refused where less is free: trainer processes keep some GiB.
            command += ["--enable-sleep-mode", "--gpu-memory-utilization", "0.85"]
        delta = config.rollout.weights.transport == "delta"
        if on_gpu and delta and experts(read_model_config(config.model.path)):
            # Others rearrange the experts' weights after loading, and patches name elements as they load.
            command += ["--moe-backend", "triton"]
        if config.rollout.router_replay:
            command += ["--enable-return-routed-experts"]
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the older runner does not return experts
        if not on_gpu:
            command += ["--enforce-eager"]
            # A seeded request whose prompt is computed in parts ends the engine: it sets back the offset of
            # its random state, and those of CPUs have none.
            command += ["--no-enable-chunked-prefill"]
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise each rank wants a NUMA node
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # otherwise the first request starts dozens
        return Launch([*command, *servers.args], environment, key=api_key or "")

    async def check_health(self, timeout: float) -> None:
        await self.http.get("/health", timeout=timeout)

    async def facts(self, timeout: float) -> ServerInfo:
        version = await self.http.get("/version", timeout=timeout)
        models = await self.http.get("/v1/models", timeout=timeout)
        world = await self.http.get("/get_world_size", timeout=timeout)
        with answer_of(self, "/v1/models"):
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
            "logprobs": 0,  # only those of the sampled tokens
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = await self.http.post("/v1/completions", body, timeout=timeout)
        with answer_of(self, "/v1/completions"):
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
        answer = await self.http.post("/v1/completions", body, timeout=timeout)
        with answer_of(self, "/v1/completions"):
            given = answer["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(given, token_ids[1:], strict=True)
            return numbers(entry[str(token)]["logprob"] for entry, token in pairs)

    async def abort(self, timeout: float) -> None:
        await self.http.post("/abort_requests", {"request_ids": []}, timeout=timeout)

    async def pause(self, timeout: float) -> None:
        await self.http.post("/pause", params={"mode": "abort"}, timeout=timeout)

    async def resume(self, timeout: float) -> None:
        await self.http.post("/resume", timeout=timeout)

    async def flush_cache(self, timeout: float) -> None:
        await self.http.post("/reset_prefix_cache", timeout=timeout)

    async def weight_version(self, timeout: float) -> str:
        info = await self.http.get("/weight_info", timeout=timeout)
        with answer_of(self, "/weight_info"):
            return str(info["weight_version"])

    async def offload_memory(self, timeout: float) -> None:
        await self.http.post("/sleep", timeout=timeout, params={"level": "2", "mode": "abort"})

    async def onload_memory(self, part: MemoryPart, timeout: float) -> None:
        tag = {"weights": "weights", "cache": "kv_cache"}[part]
        await self.http.post("/wake_up", timeout=timeout, params={"tags": tag})
