"""Reads a model's sizes from its Hugging Face config.json: exact parameter counts, flops and cache sizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.huggingface.architectures import check_family
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.image_families import takes_images
from megatron_gvpo.settings.adapter import possible_targets

# Sizes of attention that is not plain: latent attention and gated delta nets.


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net in place of attention (Qwen3-Next; arXiv 2412.06464)."""

    layers: int  # layers with delta attention; the others have softmax attention
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution spans

    @property
    def _widths(self) -> tuple[int, int]:
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    def split(self, hidden: int) -> int:
        """Parameters of one layer that tensor parallelism splits."""
        keys, values = self._widths
        projections = hidden * (2 * keys + 2 * values + 2 * self.value_heads) + values * hidden
        return projections + (2 * keys + values) * self.kernel + 2 * self.value_heads

    @property
    def replicated(self) -> int:
        """Parameters of one layer that tensor parallelism does not split, besides its norms of the input."""
        return self.value_dim

    @property
    def state(self) -> int:
        """Elements that a rollout engine keeps for one sequence and layer, however long."""
        keys, values = self._widths
        return self.value_heads * self.key_dim * self.value_dim + (2 * keys + values) * self.kernel


# Sizes of a model's vision tower: exact parameter counts, and the operations of encoding images.


@dataclass(frozen=True)
class VisionTower:
    """The vision tower of Qwen2.5-VL or Qwen3-VL. By default (`model.train_vision`) it is not trained."""

    parameters: int
    split: bool  # tensor parallelism splits the tower
    block_parameters: int  # parameters in all layers that multiply each patch
    merger_parameters: int  # parameters that multiply each merged token
    width: int  # summed over the layers whose attention spans a whole image
    deep: int  # features for the first layers of the language model
    merge: int  # patches merged into one token
    depth: int
    hidden: int
    ffn: int  # MLP width

    def flops(self, tokens: float, patches_of_an_image: float) -> float:
        """Operations of the forward pass for images of `tokens` tokens together."""
        patches = tokens * self.merge
        attention = 4 * self.width * patches_of_an_image
        return patches * (2 * self.block_parameters + attention) + 2 * tokens * self.merger_parameters


def vision_tower(config: Mapping[str, Any], architecture: str, size: Callable[[str], int]) -> VisionTower:
    """The vision tower that a `vision_config` in config.json describes; `size` reads a whole number of it."""
    hidden, width, depth, merge = (
        size(key) for key in ("hidden_size", "intermediate_size", "depth", "spatial_merge_size")
    )
    out, merge = size("out_hidden_size"), merge**2
    channels = config.get("in_channels", config.get("in_chans", 3))
    patch = channels * config.get("temporal_patch_size", 2) * size("patch_size") ** 2 * hidden
    attention = 4 * hidden**2 + 4 * hidden
    joined = hidden * merge
    merger = joined**2 + joined + joined * out + out
    if architecture == "Qwen2_5_VLForConditionalGeneration":
        mlp = 3 * hidden * width + 2 * width + hidden
        block, full_blocks = attention + mlp + 2 * hidden, len(config.get("fullatt_block_indexes") or ())
        total = patch + depth * block + hidden + merger
        sizes = depth, hidden, width
        return VisionTower(
            total, False, depth * block + patch, merger, full_blocks * hidden, 0, merge, *sizes
        )
    deep = len(config.get("deepstack_visual_indexes") or ())
    block = attention + 2 * hidden * width + width + hidden + 4 * hidden
    total = patch + hidden + size("num_position_embeddings") * hidden + depth * block
    total += merger + 2 * hidden + deep * (merger + 2 * joined)
    mergers = (1 + deep) * merger
    sizes = depth, hidden, width
    return VisionTower(total, True, depth * block + patch, mergers, depth * hidden, deep, merge, *sizes)


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only model. The properties count parameters (elements, not bytes)."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # MLP width of a dense layer
    tied: bool  # the head shares the embedding's weights
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False  # the norm of queries and keys is over all heads together
    gate: bool = False  # queries come with a gate of the same size
    sinks: bool = False  # each head has a learned score
    norms: int = 2  # norms over the hidden size in each layer
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # total width of the experts that every token goes through
    shared_gate: bool = False
    expert_bias: bool = False  # experts and router have biases
    delta_net: DeltaNet | None = None
    latent: Latent | None = None
    positions: int | None = None  # longest sequence in tokens; None: the model has no limit
    window: bool = False  # sliding-window attention
    adapted: tuple[str, ...] = ()  # Hugging Face's names of the layers that can have adapters
    vision: VisionTower | None = None  # set for a model that takes images
    trains_vision: bool = False  # model.train_vision
    adapter_rank: int = 0  # rank of trained adapters; 0: the weights themselves train

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocab * self.hidden

    @property
    def attention(self) -> float:
        """Attention parameters of one layer that tensor parallelism splits; the mean of unlike layers."""
        full = self._full_attention
        if (d := self.delta_net) is None:
            return full
        return (d.layers * d.split(self.hidden) + (self.layers - d.layers) * full) / self.layers

    @property
    def _full_attention(self) -> int:
        if (m := self.latent) is not None:
            q, out = self.heads * (m.nope_dim + m.rope_dim), self.heads * m.v_dim
            up = m.q_rank * q + m.kv_rank * self.heads * (m.nope_dim + m.v_dim)
            return up + out * self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (q + 2 * kv if self.qkv_bias else 0) + self.heads * self.sinks
        return self.hidden * ((2 + self.gate) * q + 2 * kv) + biases

    @property
    def replicated(self) -> float:
        """Parameters of one layer that tensor parallelism does not split: norms, latent down-projections."""
        full = self._full_replicated
        if (d := self.delta_net) is None:
            return full
        linear = self.norms * self.hidden + d.replicated
        return (d.layers * linear + (self.layers - d.layers) * full) / self.layers

    @property
    def _full_replicated(self) -> int:
        norms = self.norms * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.wide_qk_norm:
            norms += (self.heads + self.kv_heads) * self.head_dim
        if (m := self.latent) is not None:
            norms += self.hidden * (m.q_rank + m.kv_rank + m.rope_dim) + m.q_rank + m.kv_rank
        return norms + self.hidden * self.out_bias

    @property
    def mlp(self) -> int:
        """Parameters of the gated MLP of one dense layer."""
        return 3 * self.hidden * self.ffn

    @property
    def shared(self) -> int:
        """Parameters of the shared experts of one mixture-of-experts layer."""
        return 3 * self.hidden * self.shared_ffn + self.hidden * self.shared_gate

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        biases = 2 * self.expert_ffn + self.hidden if self.expert_bias else 0
        return 3 * self.hidden * self.expert_ffn + biases

    @property
    def router(self) -> int:
        """Router parameters of one mixture-of-experts layer; every rank holds them all."""
        return self.hidden * self.experts + self.experts * self.expert_bias

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        routed = self.moe_layers * (self.experts * self.expert + self.shared + self.router)
        layers = round(self.layers * (self.attention + self.replicated))
        layers += (self.layers - self.moe_layers) * self.mlp
        tower = self.vision.parameters if self.vision else 0
        return tower + layers + routed + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def attention_adapters(self) -> float:
        """Parameters of the adapters of one layer's attention: rank x (columns + rows) of each linear.

        The result is the mean of unlike layers; a gated delta net has no adapters.
        """
        if (m := self.latent) is not None:
            q, up = m.nope_dim + m.rope_dim, m.nope_dim + m.v_dim
            sizes = [self.hidden + m.q_rank, m.q_rank + self.heads * q]
            sizes += [self.hidden + m.kv_rank + m.rope_dim, m.kv_rank + self.heads * up]
            sizes.append(self.heads * m.v_dim + self.hidden)
            return self.adapter_rank * sum(sizes)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"q_proj": (1 + self.gate) * q, "k_proj": kv, "v_proj": kv, "o_proj": q}
        full = self.adapter_rank * sum(self.hidden + widths[name] for name in widths if name in self.adapted)
        return full * (1 - (self.delta_net.layers if self.delta_net else 0) / self.layers)

    def mlp_adapters(self, width: int) -> int:
        """Parameters of the adapters of one gated MLP of this width."""
        matrices = sum(name in self.adapted for name in ("gate_proj", "up_proj", "down_proj"))
        return self.adapter_rank * matrices * (self.hidden + width)

    @property
    def adapters(self) -> float:
        """Parameters of all adapters, with `model.adapter.targets=all`."""
        dense = (self.layers - self.moe_layers) * self.mlp_adapters(self.ffn)
        routed = self.moe_layers * self.experts * self.mlp_adapters(self.expert_ffn)
        return self.layers * self.attention_adapters + dense + routed

    def divisible(self, tp: int, cp: int = 1) -> bool:
        """Returns True if tensor and context parallelism can divide the heads, and the first the MLP.

        A norm over all heads stays on one rank (`checks.layout`).
        """
        sizes = [self.heads, self.ffn] + ([] if self.latent else [self.kv_heads])
        net = self.delta_net
        divided = [] if net is None else [net.key_heads, net.value_heads]  # into whole heads, by both
        if self.wide_qk_norm and tp > 1:
            return False
        return not any(size % tp for size in sizes) and not any(size % (tp * cp) for size in divided)

    @property
    def active_layer_parameters(self) -> float:
        """Parameters of all layers that one token is multiplied with."""
        chosen = self.moe_layers * (self.experts_per_token * self.expert + self.shared + self.router)
        return (
            self.layers * (self.attention + self.replicated)
            + (self.layers - self.moe_layers) * self.mlp
            + chosen
        )

    def cache_per_token(self, tp: int) -> int:
        """Elements of KV cache (of MLA: latent cache) for one token on all `tp` GPUs of a rollout engine.

        Each GPU has all latents, or at least one whole head of keys and values, in vLLM as in SGLang.
        """
        if (m := self.latent) is not None:
            return tp * self.layers * (m.kv_rank + m.rope_dim)
        return self._attending_layers * 2 * max(self.kv_heads, tp) * self.head_dim

    @property
    def _attending_layers(self) -> int:
        """Layers in which a token attends to all tokens before it."""
        return self.layers - (self.delta_net.layers if self.delta_net else 0)

    def layer_flops(self, tokens: float, context: float) -> float:
        """Operations of the forward pass of `tokens` tokens through all layers.

        `context`: tokens that each of them attends to, on average.
        """
        width = self.heads * (
            (self.latent.nope_dim + self.latent.rope_dim + self.latent.v_dim) / 2
            if self.latent
            else self.head_dim
        )
        return tokens * (2 * self.active_layer_parameters + 4 * self._attending_layers * width * context)

    def head_flops(self, tokens: float) -> float:
        """Operations of the forward pass of `tokens` tokens through the head."""
        return 2 * tokens * self.embedding


def load(name: str, option: str = "--model") -> Architecture:
    """Loads the architecture from a config.json (its directory or the file), or by the name of a known model.

    Raises ConfigError, which names `option` and lists the known models, if `name` is none of these.
    """
    path = Path(name)
    if path.is_dir():
        return from_config(ModelCard.read(name, key=option), f"{option} {name}")
    if path.is_file():
        return from_config(read_json_object(path), f"{option} {name}")
    known = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    if name not in known:
        raise ConfigError(
            f"{option} {name}: expected a directory with a config.json, a config.json, or one of the known "
            f"models: {', '.join(known)}"
        )
    return from_config(known[name], f"{option} {name}")


def from_config(values: Mapping[str, Any], where: str) -> Architecture:
    """Builds the architecture from the keys of a Hugging Face config.json.

    Raises ConfigError, which begins with `where`, if the trainer does not support the model, or if a size is
    missing, below 1 or not a whole number.
    """
    config = ModelCard(values)
    sizes = _Sizes(config, where)
    architecture = check_family(config, where)
    layers, hidden, heads = sizes["num_hidden_layers"], sizes["hidden_size"], sizes["num_attention_heads"]
    mixtures = config.experts
    expert_ffn = sizes.get("moe_intermediate_size", 0) if mixtures else 0
    # Some config.json use this key for the experts' width if every layer is a mixture.
    if mixtures and not expert_ffn:
        expert_ffn = sizes["intermediate_size"]
    latent = None
    if config.is_mla:
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = Latent(*(sizes[key] for key in ranks))
    shared = sizes.get("n_shared_experts", 0) or sizes.get("num_shared_experts", 0)
    return Architecture(
        layers=layers,
        hidden=hidden,
        vocab=sizes["vocab_size"],
        heads=heads,
        kv_heads=sizes.get("num_key_value_heads", heads),
        head_dim=sizes.get("head_dim", hidden // heads),
        ffn=sizes.get("intermediate_size", 0) or expert_ffn,
        tied=bool(config.get("tie_word_embeddings", architecture in _TIED)),
        moe_layers=layers - config.dense_layers if mixtures else 0,
        experts=mixtures,
        experts_per_token=sizes["num_experts_per_tok"] if mixtures else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared * expert_ffn or sizes.get("shared_expert_intermediate_size", 0),
        latent=latent,
        delta_net=_delta_net(config, sizes),
        adapted=possible_targets(architecture),
        positions=sizes.get("max_position_embeddings", 0) or None,
        window=config.window is not None,
        vision=_vision(config, architecture, where),
        **_fields_of_family(architecture, config),
    )


def _fields_of_family(architecture: str, config: ModelCard) -> dict[str, Any]:
    """The fields of an Architecture that a family always has, or for which it has keys of its own."""
    if architecture == "Glm4MoeForCausalLM":
        return {
            "qkv_bias": bool(config.get("attention_bias")),
            "qk_norm": bool(config.get("use_qk_norm")),
        }
    return _OF_FAMILY.get(architecture, {})


def _vision(config: dict[str, Any], architecture: str, where: str) -> VisionTower | None:
    if not takes_images(config):
        return None
    tower = config.get("vision_config")
    if not isinstance(tower, dict):
        raise ConfigError(f"{where}: no vision_config in config.json")
    return vision_tower(tower, architecture, _Sizes(tower, f"{where}, vision_config").__getitem__)


# Facts about a family that its config.json does not have.
_GATED = {"qk_norm": True, "gate": True}
_TIED = ("GemmaForCausalLM", "Gemma3ForCausalLM")  # tied even if config.json is silent
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "Exaone4ForCausalLM": {"qk_norm": True},
    "ExaoneMoeForCausalLM": {"qk_norm": True},
    "Gemma3ForCausalLM": {"qk_norm": True, "norms": 4},
    "GptOssForCausalLM": {"qkv_bias": True, "out_bias": True, "sinks": True, "expert_bias": True},
    "HYV3ForCausalLM": {"qk_norm": True},
    "MiniMaxM2ForCausalLM": {"wide_qk_norm": True},
    "OlmoeForCausalLM": {"wide_qk_norm": True},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen2_5_VLForConditionalGeneration": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3VLForConditionalGeneration": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True},
    "Qwen3NextForCausalLM": {**_GATED, "shared_gate": True},
    "Qwen3_5ForCausalLM": _GATED,
    "Qwen3_5MoeForCausalLM": {**_GATED, "shared_gate": True},
}


def _delta_net(config: dict[str, Any], sizes: _Sizes) -> DeltaNet | None:
    """Returns the gated delta net of all layers but every `full_attention_interval`th; None without one."""
    if not config.get("linear_num_value_heads"):
        return None
    layers = sizes["num_hidden_layers"]
    return DeltaNet(
        layers=layers - layers // sizes.get("full_attention_interval", 4),
        key_heads=sizes["linear_num_key_heads"],
        value_heads=sizes["linear_num_value_heads"],
        key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"],
        kernel=sizes["linear_conv_kernel_dim"],
    )


class _Sizes:
    """Reads whole numbers from a config.json and raises ConfigError for anything else."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def __getitem__(self, key: str) -> int:
        if self._config.get(key) is None:
            raise ConfigError(f"{self._where}: config.json has no {key}")
        if (size := self.get(key, 0)) < 1:
            raise ConfigError(f"{self._where}: {key}={size} in config.json: must be at least 1")
        return size

    def get(self, key: str, default: int) -> int:
        """Returns the number under `key`, or `default` if the key is missing or null."""
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{self._where}: {key}={value!r} in config.json: expected a whole number")
        return value


# A GPU's memory beside tensors. These are assumptions that were not measured.
CONTEXT_BYTES = 2**29  # the CUDA context: kernels' code, stacks, the driver's own; it differs by driver
NCCL_BYTES = 2**30  # communicators' buffers, more with more groups
RUNTIME_BYTES = 4e9  # both, and 2.4e9 for memory that PyTorch reserves and does not allocate (fragmentation)


def engine_room(model: Architecture, tp: int, gpu_gib: float, fp8: bool = False) -> float:
    """Returns the bytes for the cache of a rollout engine on `tp` GPUs; negative if the weights do not fit.

    `fp8`: the engine serves the model in FP8. Colocated servers have the GPU to themselves: the trainer's
    state is in host memory while they generate.
    """
    return tp * (0.85 * gpu_gib * GIB - RUNTIME_BYTES) - served_bytes(model, fp8)


def served_bytes(model: Architecture, fp8: bool) -> float:
    """Returns the bytes of a rollout engine's weights. FP8 leaves embedding and head in bf16."""
    return 2.0 * model.parameters if not fp8 else model.parameters + model.embedding * (2 - model.tied)


GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU and its links, with bandwidths in one direction. `gpus.json` lists the sources."""

    name: str
    memory_gib: float
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    nvlink_gb_per_s: float
    network_gb_per_s: float  # one GPU's network adapter to other nodes
    pcie_gb_per_s: float  # link to the host
    host_gb_per_s: float  # one GPU's share of the host's memory bandwidth
    compute_fraction: float  # fraction of the peak that training reaches if nothing else limits it
    memory_fraction: float  # reachable fraction of the memory bandwidth
    network_fraction: float  # reachable fraction of the network's, NVLink's and PCIe's bandwidth

    def flops(self, fp8: bool) -> float:
        """Returns the reachable operations per second.

        Only the layers' GEMMs run in FP8, so it gains a factor of 1.4 in practice, not 2.
        """
        return self.bf16_tflops * 1e12 * self.compute_fraction * (1.4 if fp8 else 1.0)
