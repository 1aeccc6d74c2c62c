"""Qwen3 over a pack of sequences with its matrix products in FP8, written out for autograd.

An emulation that is independent of Transformer Engine, megatron-core and megatron_gvpo/emulation/: FP8 is
fp8_quantized.py, and without FP8 the model equals that of `transformers` (a test).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.references.fp8_quantized import quantizers

Weights = dict[str, Tensor]


class _Product(torch.autograd.Function):
    """x W^T; each of its three products reads operands that were quantized along its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        inputs, weights, _ = quantizers(recipe)
        return (inputs.along_rows(x) @ weights.along_rows(weight).T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        inputs, weights, gradients = quantizers(ctx.recipe)
        of_x = gradients.along_rows(grads[0]) @ weights.along_columns(weight)
        of_weight = gradients.along_columns(grads[0]).T @ inputs.along_columns(x)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class PackedModel:
    """The model over a pack of sequences.

    Megatron's layers have q, k and v in one weight, and gate and up: these share scales, and their gradients.
    """

    def __init__(self, config: Any, weights: Weights, recipe: str | None) -> None:
        """`config`: a Qwen3Config; `weights`: by their names in files; `recipe` None: no FP8."""
        self.config, self.weights, self.recipe = config, weights, recipe

    def logits(self, token_t: Tensor, lengths: list[int]) -> Tensor:
        """[t, v] of a pack of sequences with these `lengths`."""
        position_t = torch.cat([torch.arange(length) for length in lengths])
        sequence_t = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        is_before_tt = torch.arange(len(token_t))[:, None] >= torch.arange(len(token_t))
        is_seen_tt = (sequence_t[:, None] == sequence_t) & is_before_tt
        x = self.weights["model.embed_tokens.weight"][token_t]
        for layer in range(self.config.num_hidden_layers):
            x = x + self._attention(x, f"model.layers.{layer}", position_t, is_seen_tt)
            x = x + self._mlp(x, f"model.layers.{layer}")
        return self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T

    def _attention(self, x: Tensor, name: str, position_t: Tensor, is_seen_tt: Tensor) -> Tensor:
        width = self.config.head_dim
        parts = [f"{name}.self_attn.{part}_proj.weight" for part in "qkv"]
        q, k, v = self._together(self._norm(x, f"{name}.input_layernorm"), parts)
        q, k, v = (part.unflatten(1, (-1, width)).transpose(0, 1) for part in (q, k, v))
        q = self._rotated(self._norm(q, f"{name}.self_attn.q_norm"), position_t)
        k = self._rotated(self._norm(k, f"{name}.self_attn.k_norm"), position_t)
        k, v = (part.repeat_interleave(len(q) // len(k), 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) / math.sqrt(width)).masked_fill(~is_seen_tt, -math.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self._product(out, self.weights[f"{name}.self_attn.o_proj.weight"])

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up = self._together(normed, [f"{name}.mlp.{part}_proj.weight" for part in ("gate", "up")])
        return self._product(F.silu(gate) * up, self.weights[f"{name}.mlp.down_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rotated(self, x: Tensor, position_t: Tensor) -> Tensor:
        width = self.config.head_dim
        theta = self.config.rope_parameters["rope_theta"]
        frequencies = 1 / theta ** (torch.arange(0, width, 2).float() / width)
        angles = (position_t[:, None].float() * frequencies).repeat(1, 2)
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)

    def _together(self, x: Tensor, names: list[str]) -> list[Tensor]:
        """The products with weights that are one in Megatron."""
        parts = [self.weights[name] for name in names]
        return list(self._product(x, torch.cat(parts)).split([len(part) for part in parts], 1))

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.recipe is None:
            return x @ weight.T
        product: Tensor = _Product.apply(x, weight, self.recipe)  # type: ignore[no-untyped-call]
        return product
