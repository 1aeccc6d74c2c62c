"""Client of SGLang servers (its native HTTP interface, read from 0.5.23)."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from megatron_gvpo.config.schema import Config, ConfigError, SamplingConfig
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

WEIGHT_LOADER = "megatron_gvpo_sglang.receive"  # a function of the plugin in PLUGINS


class SGLang:
    """One SGLang server."""

    tested: ClassVar[Sequence[str]] = (REFERENCE["sglang"],)

    def __init__(self, http: Http) -> None:
        self.http = http

    @property
    def url(self) -> str:
        return self.http.url

    @staticmethod
    def launch(config: Config, port: int, api_key: str | None, on_gpu: bool) -> Launch:
        servers = config.rollout.servers
        command = [servers.python, "-m", "sglang.launch_server", "--model-path", config.served_path]
        command += ["--host", servers.host, "--port", str(port), "--dtype", config.model.dtype]
        command += ["--tp-size", str(servers.tp), "--skip-server-warmup"]
        command += ["--custom-weight-loader", WEIGHT_LOADER]
        if config.model.trust_remote_code:
            command += ["--trust-remote-code"]
        if servers.context_length:
            command += ["--context-length", str(servers.context_length)]
        if servers.colocated and on_gpu:
            command += ["--enable-memory-saver"]
        if config.rollout.router_replay:
            command += ["--enable-return-routed-experts"]
        environment = {"PYTHONPATH": str(PLUGINS)}
        if not on_gpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            if servers.tp > 1:  # otherwise SGLang wants a NUMA node for each rank
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * servers.tp)
            command += ["--device", "cpu", "--attention-backend", "torch_native"]
            command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule"]
            command += ["--sleep-on-idle"]  # otherwise an idle scheduler keeps a core busy
            command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "65536"]
        command += servers.args
        if not api_key:
            return Launch(command, environment)
        if "--config" in servers.args:
            raise ConfigError(
                "rollout.servers.args: SGLang takes one --config, which passes it the API key: give your "
                "options as arguments"
            )
        # Every user of the machine can read command lines, and SGLang takes no key from the environment.
        return Launch([*command, "--config"], environment, json.dumps({"api-key": api_key}), api_key)

    async def check_health(self, timeout: float) -> None:
        await self.http.get("/health", timeout=timeout)

    async def facts(self, timeout: float) -> ServerInfo:
        info = await self.http.get("/server_info", timeout=timeout)
        with answer_of(self, "/server_info"):
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
        answer = await self.http.post(
            "/generate",
            {
                "input_ids": list(token_ids),
                "sampling_params": {
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "max_new_tokens": max_tokens,
                    "stop_token_ids": list(stop_ids),
                    "sampling_seed": seed % 2**31,  # has an effect with --enable-deterministic-inference
                },
                "return_logprob": True,
                "return_routed_experts": sampling.wants_routing,
            },
            timeout=timeout,
        )
        with answer_of(self, "/generate"):
            meta = answer["meta_info"]
            experts = meta.get("routed_experts")  # of all tokens but the last, in all layers
            return Sample(
                token_ids=answer["output_ids"],
                logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
                finish_reason=finish(meta["finish_reason"]["type"]),
                version=meta["weight_version"],
                experts=None if experts is None else np.frombuffer(base64.b64decode(experts), "<i4"),
            )

    async def score(self, token_ids: Sequence[int], timeout: float) -> list[float]:
        # SGLang 0.5.23 gives the last input token the entry of token 0: one more token is sent, and dropped.
        body: dict[str, Any] = {
            "input_ids": [*token_ids, token_ids[-1]],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self.http.post("/generate", body, timeout=timeout)
        with answer_of(self, "/generate"):
            return numbers(entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:-1])

    async def abort(self, timeout: float) -> None:
        await self.http.post("/abort_request", {"abort_all": True}, timeout=timeout)

    async def pause(self, timeout: float) -> None:
        await self.http.post("/pause_generation", {"mode": "abort"}, timeout=timeout)

    async def resume(self, timeout: float) -> None:
        await self.http.post("/continue_generation", timeout=timeout)

    async def flush_cache(self, timeout: float) -> None:
        await self.http.post("/flush_cache", timeout=timeout)

    async def weight_version(self, timeout: float) -> str:
        info = await self.http.get("/model_info", timeout=timeout)
        with answer_of(self, "/model_info"):
            return str(info["weight_version"])

    async def offload_memory(self, timeout: float) -> None:
        await self.http.post("/release_memory_occupation", timeout=timeout)

    async def onload_memory(self, part: MemoryPart, timeout: float) -> None:
        # Nothing runs before the cache is back, so the CUDA graphs come with it.
        tags = {"weights": ["weights"], "cache": ["kv_cache", "cuda_graph"]}[part]
        await self.http.post("/resume_memory_occupation", {"tags": tags}, timeout=timeout)
