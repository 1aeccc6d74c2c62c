"""Client of vLLM servers (OpenAI and RL interfaces of 0.32.0)."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

import numpy as np

from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.huggingface.adapter_layers import served_rank
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.image_families import takes_images
from megatron_gvpo.servers.cpu_engines import DELTA_NETS
from megatron_gvpo.servers.http import Http, ServerRefused
from megatron_gvpo.servers.request_images import CacheNames, RequestImage, with_one_placeholder
from megatron_gvpo.servers.server import (
    PLAIN,
    PLUGINS,
    Completion,
    Drafts,
    Launch,
    MemoryPart,
    ServerInfo,
    answer_of,
    check_prompt,
    drop_cache,
    finish,
    log_probs,
    meeting_of_ranks,
    named_adapter,
    refuse_http_processes,
)
from megatron_gvpo.servers.speculation import eagle_kind
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig, SamplingConfig
from megatron_gvpo.settings.servers import EngineServers, SpeculationConfig
from megatron_gvpo.supports import Support

# Not `vllm serve`, which needs a distribution called vllm: the CPU build's has another name.
SERVER = "vllm.entrypoints.openai.api_server"
MODEL = "policy"  # the served model's name in the server's own messages
LOOKUP = (2, 4)  # shortest and longest suffix that n-gram drafting looks up in the text so far
DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")  # vLLM's counters of the fields of Drafts
GENERATE = "/inference/v1/generate"  # takes images with token ids, and returns supports
# top-k that leaves all tokens. A server that returns supports refuses -1, which means the same.
EVERY_TOKEN = 2**31 - 1
MOST_STOP_STRINGS = 4  # of a request; a server whose VLLM_MAX_STOP_STRINGS is higher takes more


def base_command(
    servers: EngineServers, path: str, dtype: str, port: int, trusts_code: bool, module: str = SERVER
) -> list[str]:
    """The command that starts a server of the checkpoint at `path`."""
    command = [servers.python, "-m", module, "--model", path, "--host", servers.host, "--port", str(port)]
    command += ["--dtype", dtype, "--tensor-parallel-size", str(servers.tp)]
    if trusts_code:
        command += ["--trust-remote-code"]
    if servers.context_length:
        command += ["--max-model-len", str(servers.context_length)]
    return command


def finished_launch(
    command: list[str],
    environment: dict[str, str],
    servers: EngineServers,
    api_key: str | None,
    on_gpu: bool,
    model: ModelCard,
) -> Launch:
    """The launch with the options of every vLLM server. `model`: its card."""
    environment |= {"PYTHONPATH": str(PLUGINS), "VLLM_NO_USAGE_STATS": "1"}
    if api_key:
        environment["VLLM_API_KEY"] = api_key
        # vLLM itself asks for the key under /v1 and the like, and not on the paths that load weights.
        command += ["--middleware", "megatron_gvpo_guard.Guard"]
    if not on_gpu:
        command += ["--enforce-eager"]
        # A seeded request whose prompt is computed in parts ends the engine, which then sets back the offset
        # of its random state: the states of CPUs have no offset.
        command += ["--no-enable-chunked-prefill"]
        if set(model.architectures) & set(DELTA_NETS):
            # Its cache of recurrent states computes prompts in parts.
            command += ["--no-enable-prefix-caching"]
        if model.is_mla:
            # The compiled kernel of plain rotary embeddings treats all heads of latent attention as one.
            command += ["--compilation-config", '{"custom_ops": ["-rotary_embedding"]}']
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default each rank requires a NUMA node
        environment["NUMBA_NUM_THREADS"] = "1"  # more threads would make n-gram drafts wait at every step
        # by default the first request starts dozens of threads
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # A server of one rank computes in its engine's process, as on a GPU: a worker would import all again.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return Launch([*command, *servers.args], environment, key=api_key or "")


def truncation(sampling: SamplingConfig) -> dict[str, float]:
    """The parameters of a request that truncate the distribution, or leave it as it is."""
    return {"top_p": sampling.top_p, "top_k": sampling.top_k or EVERY_TOKEN, "min_p": sampling.min_p}


def _completion(answer: Any, wants_routing: bool = False) -> Completion:
    """The response in an answer. Raises errors of `answer_of` for one that lacks something."""
    choice = answer["choices"][0]
    logprobs = choice["logprobs"] or {"token_logprobs": []}
    if "content" in logprobs:  # an answer of GENERATE
        logprobs = {"token_logprobs": [entry["logprob"] for entry in logprobs["content"] or []]}
    experts = choice.get("routed_experts") if wants_routing else None
    members = choice.get("sampling_mask")
    return Completion(
        token_ids=choice["token_ids"] or [],
        logprobs=logprobs["token_logprobs"],
        finish_reason=finish(choice["finish_reason"]),
        experts=None if experts is None else np.load(io.BytesIO(base64.b64decode(experts))),
        cached=_cached(answer),
        stop_string=_stop_string(choice),
        support=None if members is None else Support.of(members),
    )


class VLLM:
    """One vLLM server."""

    tested: ClassVar[Sequence[str]] = (REFERENCE["vllm"],)

    def __init__(self, http: Http, keeps_weights: bool = False) -> None:
        self.http, self._keeps_weights = http, keeps_weights
        self._adapter: str | None = None
        self._names = CacheNames()
        # Pending requests, by their images' names.
        self._brought: dict[tuple[str, ...], asyncio.Future[Any]] = {}

    @property
    def url(self) -> str:
        return self.http.url

    @staticmethod
    def launch(
        model: ModelConfig,
        rollout: RolloutConfig,
        cards: ModelCards,
        port: int,
        api_key: str | None,
        on_gpu: bool,
    ) -> Launch:
        servers = rollout.servers
        refuse_http_processes(servers, "--api-server-count", "rollout.servers")
        module = "megatron_gvpo_follower" if servers.node else SERVER
        path, dtype, trusts_code = cards.served_path, model.dtype, model.trust_remote_code
        command = base_command(servers, path, dtype, port, trusts_code, module)
        command += ["--served-model-name", MODEL]
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        if servers.nodes > 1:
            address, port_of_ranks = meeting_of_ranks(servers)
            command += ["--nnodes", str(servers.nodes), "--node-rank", str(servers.node)]
            command += ["--master-addr", address, "--master-port", str(port_of_ranks)]
            command += ["--headless"] if servers.node else []
            environment["VLLM_HOST_IP"] = str(socket.getaddrinfo(servers.host, None)[0][4][0])
        # Log-probs at the sampling temperature, which training compares with its own.
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--weight-transfer-config", '{"backend": "megatron_gvpo"}']
        command += ["--middleware", "megatron_gvpo_watch.Watch"]
        command += ["--enable-prompt-tokens-details"]  # reports prompt tokens that the prefix cache had
        if servers.colocated and on_gpu:
            # vLLM's default share, 0.92, is refused where less is free: trainer processes keep some GiB.
            command += ["--enable-sleep-mode", "--gpu-memory-utilization", "0.85"]
        options, variables = _features(model, rollout, cards, on_gpu)
        return finished_launch(
            command + options, environment | variables, servers, api_key, on_gpu, cards.served
        )

    async def check_health(self, timeout: float) -> None:
        await self.http.get("/health", timeout=timeout)

    async def info(self, timeout: float) -> ServerInfo:
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

    def use_adapter(self, name: str) -> None:
        self._adapter = name

    async def sample(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        seed: int,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        timeout: float,
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        how: dict[str, Any] = {
            **PLAIN,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            **truncation(sampling),
            "seed": seed,
            "stop_token_ids": list(stop_ids),
            "stop": list(sampling.stop[:MOST_STOP_STRINGS]),  # the pool ends responses at the others
            "logprobs": 0,  # returns log-probs of the sampled tokens only
            "skip_special_tokens": False,
        }
        if images:
            return await self._see(token_ids, how, images, timeout)
        if sampling.wants_support:
            return await self._sample_with_support(token_ids, how, sampling.wants_routing, timeout)
        body = {"prompt": list(token_ids), "return_token_ids": True, **how}
        answer = await self._complete(body, timeout)
        with answer_of(self, "/v1/completions"):
            return _completion(answer, sampling.wants_routing)

    async def _see(
        self,
        token_ids: Sequence[int],
        sampling_params: dict[str, Any],
        images: Sequence[RequestImage],
        timeout: float,
    ) -> Completion:
        """Sample a response to a prompt with images, which /v1/completions does not take.

        The first sample of a prompt brings its images, in a request of one token; the others name them.
        """
        names = tuple(map(self._names.of, images))
        urls = [image.url for image in images]

        def ask(sources: Sequence[str | None], **changes: Any) -> Coroutine[Any, Any, Any]:
            parts = [{"type": "image_url", "url": u, "uuid": n} for u, n in zip(sources, names, strict=True)]
            body = {
                "model": self._adapter,
                "token_ids": with_one_placeholder(token_ids, images),
                "content_parts": parts,
                "sampling_params": sampling_params | changes,
                "return_token_ids": True,
            }
            return self.http.post(GENERATE, body, timeout=timeout)

        with named_adapter(self, self._adapter):
            if names not in self._brought:
                self._brought[names] = asyncio.ensure_future(ask(urls, max_tokens=1))
            try:
                await asyncio.shield(self._brought[names])
                answer = await ask([None] * len(urls))
            except BaseException as error:
                self._brought.pop(names, None)  # the next request sends the images again
                if not isinstance(error, ServerRefused) or "Cache miss" not in str(error):
                    raise
                answer = await ask(urls)
        with answer_of(self, GENERATE):
            check_prompt(self, token_ids, answer["prompt_token_ids"], images)
            return _completion(answer)

    async def _sample_with_support(
        self, token_ids: Sequence[int], sampling_params: dict[str, Any], wants_routing: bool, timeout: float
    ) -> Completion:
        """Sample a response with its supports, which /v1/completions does not return."""
        body = {
            "model": self._adapter,
            "token_ids": list(token_ids),
            "sampling_params": sampling_params,
            "return_token_ids": True,
        }
        with named_adapter(self, self._adapter):
            answer = await self.http.post(GENERATE, body, timeout=timeout)
        with answer_of(self, GENERATE):
            return _completion(answer, wants_routing)

    async def score(self, token_ids: Sequence[int], timeout: float, first: int = 1) -> list[float]:
        # Without PLAIN, a top_k from generation_config.json ends servers of vLLM 0.32 that speculate.
        how = {**PLAIN, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 0}
        how["top_k"] = EVERY_TOKEN
        body = {"prompt": list(token_ids), **how}
        answer = await self._complete(body, timeout)
        with answer_of(self, "/v1/completions"):
            entries = answer["choices"][0]["prompt_logprobs"][first:]
            pairs = zip(entries, token_ids[first:], strict=True)
            return log_probs(entry[str(token)]["logprob"] for entry, token in pairs)

    async def speculates(self, timeout: float) -> bool:
        return bool(await self._counters(timeout))

    async def drafts(self, timeout: float) -> Drafts:
        counters = await self._counters(timeout)
        with answer_of(self, "/metrics"):
            return Drafts(*(counters.get(name, 0) for name in DRAFTS))

    async def _counters(self, timeout: float) -> dict[str, int]:
        """Counters of speculative decoding, summed over the server's engines; empty without it."""
        text = await self.http.get("/metrics", timeout=timeout)
        counters = dict[str, int]()
        with answer_of(self, "/metrics"):
            for name, value in re.findall(r"^vllm:spec_decode_num_(\w+?)_total(?:{.*})? (\S+)$", text, re.M):
                counters[name] = counters.get(name, 0) + int(float(value))
        return counters

    async def _complete(self, body: dict[str, Any], timeout: float) -> Any:
        with named_adapter(self, self._adapter):
            model = {} if self._adapter is None else {"model": self._adapter}
            return await self.http.post("/v1/completions", model | body, timeout=timeout)

    async def abort(self, timeout: float) -> None:
        await self.http.post("/abort_requests", {"request_ids": []}, timeout=timeout)

    async def pause(self, timeout: float) -> None:
        await self.http.post("/pause", params={"mode": "abort"}, timeout=timeout)

    async def resume(self, timeout: float) -> None:
        await self.http.post("/resume", timeout=timeout)

    async def flush_cache(self, timeout: float) -> None:
        self._names.renew()
        self._brought.clear()
        await drop_cache(f"{self.url}/reset_prefix_cache", lambda: self._reset_prefix_cache(timeout), timeout)

    async def _reset_prefix_cache(self, timeout: float) -> bool:
        """False while vLLM still holds aborted requests, and therefore the whole cache."""
        answer = await self.http.post("/reset_prefix_cache", timeout=timeout)
        with answer_of(self, "/reset_prefix_cache"):
            return bool(answer["success"])

    async def weight_version(self, timeout: float) -> str:
        info = await self.http.get("/weight_info", timeout=timeout)
        with answer_of(self, "/weight_info"):
            return str(info["weight_version"])

    async def offload_memory(self, timeout: float) -> None:
        level = "1" if self._keeps_weights else "2"
        await self.http.post("/sleep", timeout=timeout, params={"level": level, "mode": "abort"})

    async def onload_memory(self, part: MemoryPart, timeout: float) -> None:
        tag = {"weights": "weights", "cache": "kv_cache"}[part]
        await self.http.post("/wake_up", timeout=timeout, params={"tags": tag})


def _cached(answer: Any) -> int | None:
    """Prompt tokens that the prefix cache had; None if the server was not started to report them."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    return None if details is None else details["cached_tokens"]


def _stop_string(choice: Any) -> str | None:
    """The string that ended a response; vLLM names tokens in the same field."""
    reason = choice.get("stop_reason")
    return reason if isinstance(reason, str) else None


def _features(
    model: ModelConfig, rollout: RolloutConfig, cards: ModelCards, on_gpu: bool
) -> tuple[list[str], dict[str, str]]:
    """Options and environment variables for features that the run needs besides sampling."""
    options: list[str] = []
    variables: dict[str, str] = {}
    traits = rollout.weights.traits
    if on_gpu and traits.sends_changes and cards.policy.experts:
        # Other kernels rearrange the experts' weights after loading, and patches name elements in the loaded
        # order.
        options += ["--moe-backend", "triton"]
    if traits.sends_adapter:
        options += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(served_rank(model))]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if takes_images(cards.served) or rollout.wants_support:
        options += ["--enable-scale-out"]  # provides the path GENERATE
    if rollout.wants_support:
        options += ["--return-sampling-mask"]
    if rollout.router_replay:
        options += ["--enable-return-routed-experts"]
    if rollout.router_replay or rollout.wants_support:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the older runner returns neither
    if rollout.speculation is not None:
        options += ["--speculative-config", json.dumps(_speculation(rollout.speculation, cards))]
    return options, variables


def _speculation(chosen: SpeculationConfig, cards: ModelCards) -> dict[str, Any]:
    """The value of --speculative-config. A token is accepted by vLLM's standard rejection sampling."""
    options: dict[str, Any] = {"num_speculative_tokens": chosen.tokens}
    if chosen.method == "draft":
        return options | {"method": "draft_model", "model": chosen.model}
    if chosen.method == "eagle":
        return options | {"method": eagle_kind(cards.draft), "model": chosen.model}
    if chosen.method == "ngram":
        options |= dict(zip(("prompt_lookup_min", "prompt_lookup_max"), LOOKUP, strict=True))
    return options | {"method": chosen.method}
