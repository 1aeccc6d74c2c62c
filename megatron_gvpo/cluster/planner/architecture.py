"""A model's sizes, read from its Hugging Face config.json: exact parameter counts, flops, cache bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_gvpo.config import ConfigError, read_model_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v3")


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
    shared_gate: bool = False
    latent: Latent | None = None
    positions: int | None = None  # the longest sequence, where the model has a limit

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
        return self.hidden * (self.experts + self.shared_gate) if self.experts else 0

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
        return from_config(read_model_config(name, key="--model"), name)
    if path.is_file():
        try:
            return from_config(json.loads(path.read_text()), name)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--model {name}, line {error.lineno}: not valid JSON ({error.msg})") from None
    known = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    if name not in known:
        raise ConfigError(
            f"--model {name}: neither a directory with a config.json, nor such a file, nor one of the known "
            f"models {', '.join(known)}"
        )
    return from_config(known[name], name)


def from_config(config: Mapping[str, Any], name: str) -> Architecture:
    """From the keys of a Hugging Face config.json. Raises ConfigError for a family that is not known."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{name}: model_type={family!r} is unknown to the planner; {', '.join(FAMILIES)} are"
        )
    try:
        return _from_config(config, family)
    except KeyError as error:
        raise ConfigError(f"{name}: its config.json has no {error.args[0]!r}") from None


def _from_config(config: Mapping[str, Any], family: str) -> Architecture:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    experts = config.get("n_routed_experts") or config.get("num_experts") or 0
    expert_ffn = config["moe_intermediate_size"] if experts else 0
    dense = config.get("first_k_dense_replace", 0)
    if step := config.get("decoder_sparse_step"):
        skipped = config.get("mlp_only_layers") or []
        dense = sum(i in skipped or (i + 1) % step > 0 for i in range(layers))
    latent = None
    if family == "deepseek_v3":
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = Latent(*(config[key] for key in ranks))
    shared_ffn = config.get("shared_expert_intermediate_size") or 0
    return Architecture(
        layers=layers,
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family in ("qwen2", "qwen2_moe"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        moe_layers=layers - dense if experts else 0,
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared_ffn or (config.get("n_shared_experts") or 0) * expert_ffn,
        shared_gate=family == "qwen2_moe",
        latent=latent,
        positions=config.get("max_position_embeddings"),
    )
