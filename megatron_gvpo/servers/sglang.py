"""Client of SGLang servers (its native HTTP interface, read from 0.5.23)."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.huggingface.adapter_layers import adapted_layers
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.servers.http import Http, ServerRefused
from megatron_gvpo.servers.request_images import RequestImage, with_one_placeholder
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
    shortened,
)
from megatron_gvpo.servers.speculation import eagle_kind
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig, SamplingConfig
from megatron_gvpo.settings.servers import EngineServers, SpeculationConfig
from megatron_gvpo.supports import Support

WEIGHT_LOADER = "megatron_gvpo_sglang.receive"  # a function of the plugin in PLUGINS
DRAFTS = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")  # the fields of Drafts
TIES = 64  # more members of a support than top_k: SGLang may keep more if tokens are equally likely
RESERVED = 6  # tokens that SGLang leaves free when it says how long an input may be
# SGLang's options that give up the policy's distribution for speed; 1 keeps it.
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
ON_CPU = (
    "on a CPU, SGLang verifies drafted tokens by the likeliest token at any temperature, so its samples "
    "would not be the policy's: use a GPU, or rollout.engine=vllm"
)


def base_command(servers: EngineServers, path: str, dtype: str, port: int, trusts_code: bool) -> list[str]:
    """The command that starts a server of the checkpoint at `path`."""
    command = [servers.python, "-m", "sglang.launch_server", "--model-path", path, "--host", servers.host]
    command += ["--port", str(port), "--dtype", dtype, "--tp-size", str(servers.tp), "--skip-server-warmup"]
    if trusts_code:
        command += ["--trust-remote-code"]
    if servers.context_length:
        command += ["--context-length", str(servers.context_length)]
    return command


def finished_launch(
    command: list[str],
    environment: dict[str, str],
    servers: EngineServers,
    api_key: str | None,
    on_gpu: bool,
    key: str,
) -> Launch:
    """The launch with the options of every SGLang server; `key` is the configuration's, of `servers`."""
    environment["PYTHONPATH"] = str(PLUGINS)
    if not on_gpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if servers.tp > 1:  # otherwise SGLang wants a NUMA node for each rank
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * servers.tp)
            # The ranks may differ in free memory, because other processes of the host take some, too.
            environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule"]
        command += ["--sleep-on-idle"]  # otherwise an idle scheduler keeps a core busy
        command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "65536"]
    refuse_http_processes(servers, "--tokenizer-worker-num", key)
    command += servers.args
    if not api_key:
        return Launch(command, environment)
    if "--config" in servers.args:
        raise ConfigError(
            f"{key}.args: SGLang takes one --config, which passes it the API key: give your options as "
            "arguments"
        )
    # Every user of the machine can read command lines, and SGLang takes no key from the environment.
    return Launch([*command, "--config"], environment, json.dumps({"api-key": api_key}), api_key)


class SGLang:
    """One SGLang server."""

    tested: ClassVar[Sequence[str]] = (REFERENCE["sglang"],)

    def __init__(self, http: Http, keeps_weights: bool = False) -> None:
        self.http = http  # `keeps_weights` is not stored, because only `launch` reads it
        self._adapter: str | None = None
        self._drafts = Drafts()  # summed over responses, because SGLang reports them with each response

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
        command = base_command(servers, cards.served_path, model.dtype, port, model.trust_remote_code)
        command += ["--custom-weight-loader", WEIGHT_LOADER]
        if servers.nodes > 1:
            command += ["--nnodes", str(servers.nodes), "--node-rank", str(servers.node)]
            address, port_of_ranks = meeting_of_ranks(servers)
            address = f"[{address}]" if ":" in address else address
            command += ["--dist-init-addr", f"{address}:{port_of_ranks}"]
        if servers.colocated and on_gpu:
            command += ["--enable-memory-saver"]
        if rollout.router_replay:
            command += ["--enable-return-routed-experts"]
        if rollout.wants_support and rollout.top_k is not None:
            command += ["--sampling-mask-max-tokens", str(rollout.top_k + TIES)]
        if rollout.weights.traits.sends_adapter:
            command += _serving_adapters(model, servers.colocated, cards.policy, on_gpu)
        if rollout.speculation is not None:
            if not on_gpu:
                raise ConfigError(f"rollout.speculation.method={rollout.speculation.method}: {ON_CPU}")
            command += _speculation(rollout.speculation, cards)
            if rollout.speculation.own_weights and servers.colocated:
                # No push restores draft weights after a sleep.
                command += ["--enable-draft-weights-cpu-backup"]
        environment: dict[str, str] = {}
        if model.train_vision:  # the cache of image features would outlive the weights that made them
            environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        return finished_launch(command, environment, servers, api_key, on_gpu, "rollout.servers")

    async def check_health(self, timeout: float) -> None:
        await self.http.get("/health", timeout=timeout)

    async def info(self, timeout: float) -> ServerInfo:
        info = await self.http.get("/server_info", timeout=timeout)
        with answer_of(self, "/server_info"):
            return ServerInfo(
                version=info["version"],
                model_path=info["model_path"],
                # The smaller of the server's context length and its cache's size, which cut a response off
                # without a message.
                context_length=info["max_req_input_len"] + RESERVED,
                processes=info["tp_size"] * info["pp_size"],
                http_processes=info.get("tokenizer_worker_num", 1),
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
        body: dict[str, Any] = {
            "input_ids": with_one_placeholder(token_ids, images),
            "sampling_params": {
                **PLAIN,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "max_new_tokens": max_tokens,
                "stop_token_ids": list(stop_ids),
                "stop": list(sampling.stop),
                "sampling_seed": seed % 2**31,  # takes effect with --enable-deterministic-inference
            },
            "return_logprob": True,
            "return_routed_experts": sampling.wants_routing,
            "return_sampling_mask": sampling.wants_support,
        }
        if images:
            body["image_data"] = [image.url for image in images]
            body["return_prompt_token_ids"] = True
        answer = await self._generate(body, timeout)
        with answer_of(self, "/generate"):
            self._drafts += Drafts(*(answer["meta_info"].get(name, 0) for name in DRAFTS))
            if images:
                check_prompt(self, token_ids, answer.get("prompt_token_ids"), images)
            return _completion(answer, len(token_ids), sampling.wants_support)

    async def score(self, token_ids: Sequence[int], timeout: float, first: int = 1) -> list[float]:
        # SGLang 0.5.23 gives the last input token the entry of token 0, so one more token is sent, and its
        # entry dropped.
        body: dict[str, Any] = {
            "input_ids": [*token_ids, token_ids[-1]],
            "sampling_params": {**PLAIN, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": first - 1,
        }
        answer = await self._generate(body, timeout)
        with answer_of(self, "/generate"):
            entries = answer["meta_info"]["input_token_logprobs"][1:-1]
            pairs = zip(entries, token_ids[first:], strict=True)
            # The vocabulary's last token is shown as 0.
            if any(entry[1] not in (token, 0) for entry, token in pairs):
                raise ValueError("log-probs of other tokens")
            return log_probs(entry[0] for entry in entries)

    async def speculates(self, timeout: float) -> bool:
        info = await self.http.get("/server_info", timeout=timeout)
        with answer_of(self, "/server_info"):
            if info.get("speculative_algorithm") is None:
                return False
            thresholds = {name: info[name] for name in THRESHOLDS}
            if info["device"] == "cpu":
                raise ConfigError(f"rollout server {self.url}: {ON_CPU}")
        if changed := {name: value for name, value in thresholds.items() if value != 1.0}:
            raise ConfigError(
                f"rollout server {self.url} was started with {changed}: below 1 it accepts tokens that the "
                "policy would not have sampled; leave them out"
            )
        return True

    async def drafts(self, timeout: float) -> Drafts:
        return self._drafts

    async def _generate(self, body: dict[str, Any], timeout: float) -> Any:
        with named_adapter(self, self._adapter):
            return await self.http.post("/generate", body | {"lora_path": self._adapter}, timeout=timeout)

    async def abort(self, timeout: float) -> None:
        await self.http.post("/abort_request", {"abort_all": True}, timeout=timeout)

    async def pause(self, timeout: float) -> None:
        await self.http.post("/pause_generation", {"mode": "abort"}, timeout=timeout)

    async def resume(self, timeout: float) -> None:
        await self.http.post("/continue_generation", timeout=timeout)

    async def flush_cache(self, timeout: float) -> None:
        await drop_cache(f"{self.url}/flush_cache", lambda: self._flush_cache(timeout), timeout)

    async def _flush_cache(self, timeout: float) -> bool:
        """False while a request is in the scheduler, such as a health check's."""
        try:
            await self.http.post("/flush_cache", timeout=timeout)
        except ServerRefused as refusal:
            if refusal.status != 400:
                raise
            return False
        return True

    async def weight_version(self, timeout: float) -> str:
        info = await self.http.get("/model_info", timeout=timeout)
        with answer_of(self, "/model_info"):
            return str(info["weight_version"])

    async def offload_memory(self, timeout: float) -> None:
        await self.http.post("/release_memory_occupation", timeout=timeout)

    async def onload_memory(self, part: MemoryPart, timeout: float) -> None:
        # Nothing runs before the cache is back, so the CUDA graphs are restored with it.
        tags = {"weights": ["weights"], "cache": ["kv_cache", "cuda_graph"]}[part]
        await self.http.post("/resume_memory_occupation", {"tags": tags}, timeout=timeout)


def _completion(answer: dict[str, Any], prompt_tokens: int, has_support: bool) -> Completion:
    """The tokens and log-probs of an answer of /generate. Raises ValueError for log-probs of other tokens."""
    meta = answer["meta_info"]
    entries = meta["output_token_logprobs"]
    for index, (entry, token) in enumerate(zip(entries, answer["output_ids"], strict=True)):
        if entry[1] != token:
            other = shortened(entry[1])
            raise ValueError(f"at index {index} the log-prob of token {other}, not of {token}")
    logprobs, members = [entry[0] for entry in entries], None
    if has_support:  # the log-probs of `entries` are over the whole vocabulary
        logprobs = meta.get("output_token_sampling_logprobs", [])
        members = meta.get("output_token_sampling_mask", [])
    matched = meta["finish_reason"].get("matched")  # a stop string or a token
    experts = meta.get("routed_experts")
    return Completion(
        token_ids=answer["output_ids"],
        logprobs=logprobs,
        finish_reason=finish(meta["finish_reason"]["type"]),
        version=meta["weight_version"],
        experts=None if experts is None else _by_token(experts, prompt_tokens + len(entries) - 1),
        cached=meta.get("cached_tokens"),
        support=None if members is None else Support.of(members),
        stop_string=matched if isinstance(matched, str) else None,
    )


def _by_token(experts: str, tokens: int) -> np.ndarray:
    """The experts of all tokens but the last, in all layers: a row a token. A wrong number stays one row."""
    flat = np.frombuffer(base64.b64decode(experts), "<i4")
    return flat if tokens < 1 or flat.size % tokens else flat.reshape(tokens, -1)


def _serving_adapters(model: ModelConfig, colocated: bool, card: ModelCard, on_gpu: bool) -> list[str]:
    """Options of a server that takes adapters, and refuses an adapter with tensors that it would not use."""
    layers, adapter = adapted_layers(model, card), model.adapter
    assert adapter is not None, "checked with the configuration"
    options = ["--enable-lora", "--lora-strict-loading", "--max-lora-rank", str(adapter.rank)]
    options += ["--max-loras-per-batch", "2"]  # the model itself counts as one
    if colocated and on_gpu:
        options += ["--enable-weights-cpu-backup"]
    if not on_gpu:
        options += ["--lora-backend", "torch_native"]  # the others are kernels in Triton
    return [*options, "--lora-target-modules", *layers]


def _speculation(chosen: SpeculationConfig, cards: ModelCards) -> list[str]:
    """Options of a server that decodes speculatively, with one chain of tokens at a time."""
    algorithms = {"ngram": "NGRAM", "draft": "STANDALONE", "mtp": "NEXTN"}
    algorithm = algorithms.get(chosen.method) or eagle_kind(cards.draft).upper()
    options = ["--speculative-algorithm", algorithm]
    # The count includes the last token of the text, with which a chain begins.
    options += ["--speculative-num-draft-tokens", str(chosen.tokens + 1)]
    if chosen.method == "ngram":
        return [*options, "--speculative-ngram-max-bfs-breadth", "1"]
    options += ["--speculative-num-steps", str(chosen.tokens), "--speculative-eagle-topk", "1"]
    return options if chosen.model is None else [*options, "--speculative-draft-model-path", chosen.model]
