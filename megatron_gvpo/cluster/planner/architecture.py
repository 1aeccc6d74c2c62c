"""A model's sizes, read from its Hugging Face config.json: exact parameter counts, flops, cache bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_gvpo.config.schema import ConfigError, read_json_object, read_model_config
from megatron_gvpo.config.supported_models import check_family, experts


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
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of a dense layer
    tied: bool  # the head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # of the experts that every token goes through
    latent: Latent | None = None
    positions: int | None = None  # the longest sequence, where the model has a limit
    window: bool = False  # attention sees a part of the sequence

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention that tensor parallelism splits."""
        if (m := self.latent) is not None:
            q, out = self.heads * (m.nope_dim + m.rope_dim), self.heads * m.v_dim
            up = m.q_rank * q + m.kv_rank * self.heads * (m.nope_dim + m.v_dim)
            return up + out * self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv) + (q + 2 * kv if self.qkv_bias else 0)

    @property
    def replicated(self) -> int:
        """Parameters of a layer that every tensor-parallel rank holds: norms, and latent down-projections."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if (m := self.latent) is not None:
            norms += self.hidden * (m.q_rank + m.kv_rank + m.rope_dim) + m.q_rank + m.kv_rank
        return norms

    @property
    def mlp(self) -> int:
        """Parameters of a dense layer's gated MLP."""
        return 3 * self.hidden * self.ffn

    @property
    def shared(self) -> int:
        """Parameters of a mixture layer's shared expert."""
        return 3 * self.hidden * self.shared_ffn

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def router(self) -> int:
        """Parameters of a mixture layer that every rank holds."""
        return self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """All of them."""
        routed = self.moe_layers * (self.experts * self.expert + self.shared + self.router)
        layers = self.layers * (self.attention + self.replicated) + (self.layers - self.moe_layers) * self.mlp
        return layers + routed + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def active_layer_parameters(self) -> int:
        """Of the layers, those that one token is multiplied with."""
        chosen = self.moe_layers * (self.experts_per_token * self.expert + self.shared + self.router)
        return (
            self.layers * (self.attention + self.replicated)
            + (self.layers - self.moe_layers) * self.mlp
            + chosen
        )

    @property
    def cache_per_token(self) -> int:
        """Elements that a rollout engine keeps for a token."""
        if (m := self.latent) is not None:
            return self.layers * (m.kv_rank + m.rope_dim)
        return self.layers * 2 * self.kv_heads * self.head_dim

    def layer_flops(self, tokens: float, context: float) -> float:
        """Forward through all layers: `tokens` tokens that each see `context` others on average."""
        width = self.heads * (
            (self.latent.nope_dim + self.latent.rope_dim + self.latent.v_dim) / 2
            if self.latent
            else self.head_dim
        )
        return tokens * (2 * self.active_layer_parameters + 4 * self.layers * width * context)

    def head_flops(self, tokens: float) -> float:
        """Forward through the head."""
        return 2 * tokens * self.embedding


def load(name: str) -> Architecture:
    """From a directory or file with a config.json, or the name of a known model.

    Raises ConfigError, which lists the known ones.
    """
    path = Path(name)
    if path.is_dir():
        return from_config(read_model_config(name, key="--model"), f"--model {name}")
    if path.is_file():
        return from_config(read_json_object(path), f"--model {name}")
    known = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    if name not in known:
        raise ConfigError(
            f"--model {name}: neither a directory with a config.json, nor such a file, nor one of the known "
            f"models {', '.join(known)}"
        )
    return from_config(known[name], f"--model {name}")


def from_config(config: dict[str, Any], where: str) -> Architecture:
    """From the keys of a Hugging Face config.json. Raises ConfigError, which begins with `where`, for a model
    that the trainer does not take, and for sizes that are none.
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
    """The whole numbers of a config.json."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def __getitem__(self, key: str) -> int:
        if self._config.get(key) is None:
            raise ConfigError(f"{self._where}: no {key} in config.json")
        if (size := self.get(key, 0)) < 1:
            raise ConfigError(f"{self._where}: {key}={size} in config.json: at least 1")
        return size

    def get(self, key: str, default: int) -> int:
        """`default` where it is missing or null."""
        value = self._config.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{self._where}: {key}={value!r} in config.json: expected a whole number")
        return value
