"""Reads a model's sizes from its Hugging Face config.json: exact parameter counts, flops and cache sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_gvpo.config.checks.supported_models import check_family, experts
from megatron_gvpo.config.schema import ConfigError, read_json_object, read_model_config


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


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
    qk_norm: bool = False
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # total width of the experts that every token goes through
    latent: Latent | None = None
    positions: int | None = None  # longest sequence in tokens; None: the model has no limit
    window: bool = False  # sliding-window attention

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocab * self.hidden

    @property
    def attention(self) -> int:
        """Attention parameters of one layer that tensor parallelism splits."""
        if (m := self.latent) is not None:
            q, out = self.heads * (m.nope_dim + m.rope_dim), self.heads * m.v_dim
            up = m.q_rank * q + m.kv_rank * self.heads * (m.nope_dim + m.v_dim)
            return up + out * self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)

    @property
    def replicated(self) -> int:
        """Parameters of one layer that tensor parallelism does not split: norms, latent down-projections."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if (m := self.latent) is not None:
            norms += self.hidden * (m.q_rank + m.kv_rank + m.rope_dim) + m.q_rank + m.kv_rank
        return norms

    @property
    def mlp(self) -> int:
        """Parameters of the gated MLP of one dense layer."""
        return 3 * self.hidden * self.ffn

    @property
    def shared(self) -> int:
        """Parameters of the shared experts of one mixture-of-experts layer."""
        return 3 * self.hidden * self.shared_ffn

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def router(self) -> int:
        """Router parameters of one mixture-of-experts layer; every rank holds them all."""
        return self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        routed = self.moe_layers * (self.experts * self.expert + self.shared + self.router)
        layers = self.layers * (self.attention + self.replicated) + (self.layers - self.moe_layers) * self.mlp
        return layers + routed + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of all layers that one token is multiplied with."""
        chosen = self.moe_layers * (self.experts_per_token * self.expert + self.shared + self.router)
        return (
            self.layers * (self.attention + self.replicated)
            + (self.layers - self.moe_layers) * self.mlp
            + chosen
        )

    @property
    def cache_per_token(self) -> int:
        """Elements of KV cache (of MLA: latent cache) that a rollout engine keeps for one token."""
        if (m := self.latent) is not None:
            return self.layers * (m.kv_rank + m.rope_dim)
        return self.layers * 2 * self.kv_heads * self.head_dim

    def layer_flops(self, tokens: float, context: float) -> float:
        """Operations of the forward pass of `tokens` tokens through all layers.

        `context`: tokens that each of them attends to, on average.
        """
        width = self.heads * (
            (self.latent.nope_dim + self.latent.rope_dim + self.latent.v_dim) / 2
            if self.latent
            else self.head_dim
        )
        return tokens * (2 * self.active_layer_parameters + 4 * self.layers * width * context)

    def head_flops(self, tokens: float) -> float:
        """Operations of the forward pass of `tokens` tokens through the head."""
        return 2 * tokens * self.embedding


def load(name: str) -> Architecture:
    """Loads the architecture from a config.json (its directory or the file), or by the name of a known model.

    Raises ConfigError, which lists the known models, if `name` is none of these.
    """
    path = Path(name)
    if path.is_dir():
        return from_config(read_model_config(name, key="--model"), f"--model {name}")
    if path.is_file():
        return from_config(read_json_object(path), f"--model {name}")
    known = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    if name not in known:
        raise ConfigError(
            f"--model {name}: expected a directory with a config.json, a config.json, or one of the known "
            f"models: {', '.join(known)}"
        )
    return from_config(known[name], f"--model {name}")


def from_config(config: dict[str, Any], where: str) -> Architecture:
    """Builds the architecture from the keys of a Hugging Face config.json.

    Raises ConfigError, which begins with `where`, if the trainer does not support the model, or if a size is
    missing, below 1 or not a whole number.
    """
    sizes = _Sizes(config, where)
    architecture = check_family(config, where)
    layers, hidden, heads = sizes["num_hidden_layers"], sizes["hidden_size"], sizes["num_attention_heads"]
    mixtures = experts(config)
    expert_ffn = sizes["moe_intermediate_size"] if mixtures else 0
    latent = None
    if config.get("kv_lora_rank"):
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = Latent(*(sizes[key] for key in ranks))
    return Architecture(
        layers=layers,
        hidden=hidden,
        vocab=sizes["vocab_size"],
        heads=heads,
        kv_heads=sizes.get("num_key_value_heads", heads),
        head_dim=sizes.get("head_dim", hidden // heads),
        ffn=sizes["intermediate_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        moe_layers=layers - sizes.get("first_k_dense_replace", 0) if mixtures else 0,
        experts=mixtures,
        experts_per_token=sizes["num_experts_per_tok"] if mixtures else 0,
        expert_ffn=expert_ffn,
        shared_ffn=sizes.get("n_shared_experts", 0) * expert_ffn,
        latent=latent,
        positions=sizes.get("max_position_embeddings", 0) or None,
        window=bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True)),
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
