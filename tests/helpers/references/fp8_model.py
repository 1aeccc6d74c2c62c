"""Qwen3 and Qwen3-MoE over packs of sequences, with matrix products in FP8, written out for autograd.

An emulation that is independent of Transformer Engine, megatron-core and megatron_gvpo/emulation/: FP8 is
fp8_quantized.py, and without FP8 the model equals that of `transformers` (a test).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.references.fp8_quantized import quantizers

EXPERT_ROWS = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}  # an expert's rows are a multiple of it
Weights = dict[str, Tensor]
Rounding = Callable[[Tensor, Tensor | None, float], Tensor]


class NoCounterpartError(AssertionError):
    """No pair of the other computation has the operands' shapes: its experts have other tokens."""


@dataclass
class Operands:
    """The two operands of each product in FP8, in the order of the products: forward, then backward.

    One operand that rounds to the other side changes all that follows it, by up to as much as FP8 itself
    does. So a reference that another computation is compared with takes the side of that computation's
    operands, `computed`, where their exact values are within `tolerance` of a middle (`Quantized`). Pipeline
    schedules have an order of their own: each product takes the nearest pair out of `computed`, which several
    micro-batches may share.
    """

    recipe: str
    computed: list[tuple[Tensor, Tensor]] | None = None
    tolerance: float = 0.0  # of a block's largest value
    ranks: int = 1  # `computed` has gradients of as many times the loss
    quantized: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # what the products have read

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        inputs, weights, _ = quantizers(self.recipe)
        left, right = self._pair(inputs.along_rows, x, weights.along_rows, weight)
        return left @ right.T

    def of_x(self, grad: Tensor, weight: Tensor) -> Tensor:
        _, weights, gradients = quantizers(self.recipe)
        left, right = self._pair(gradients.along_rows, grad, weights.along_columns, weight, self.ranks)
        return left @ right

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        inputs, _, gradients = quantizers(self.recipe)
        left, right = self._pair(gradients.along_columns, grad, inputs.along_columns, x, self.ranks)
        return left.T @ right

    def _pair(
        self, of_left: Rounding, left: Tensor, of_right: Rounding, right: Tensor, ranks: int = 1
    ) -> tuple[Tensor, Tensor]:
        computed = (None, None) if self.computed is None else self._nearest(left, right, ranks)
        pair = (
            of_left(left, computed[0], self.tolerance),
            of_right(right, computed[1], self.tolerance),
        )
        self.quantized.append(pair)
        return pair

    def _nearest(self, left: Tensor, right: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """Remove from `computed` the pair that is nearest to these operands, and return it."""
        assert self.computed is not None

        def distance(number: int) -> float:
            assert self.computed is not None
            pair = self.computed[number]
            if (pair[0].shape, pair[1].shape) != (left.shape, right.shape):
                return math.inf
            return _distance(pair[0] / ranks, left) + _distance(pair[1], right)

        distances = [distance(number) for number in range(len(self.computed))]
        nearest = min(range(len(distances)), key=distances.__getitem__, default=None)
        if nearest is None or distances[nearest] == math.inf:
            raise NoCounterpartError("a product has no counterpart")
        computed = self.computed.pop(nearest)
        return computed[0] / ranks, computed[1]


def _distance(computed: Tensor, exact: Tensor) -> float:
    """The size of the difference, as a part of that of `exact`; finite, whatever a fault has computed."""
    size = exact.detach().double().norm().clamp(min=1e-30)
    distance = (computed.double() - exact.detach().double()).norm() / size
    return float(distance.nan_to_num(nan=1e30, posinf=1e30))


class _Product(torch.autograd.Function):
    """x W^T; each of its three products reads operands that were quantized along its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operands: Operands) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.operands = operands
        return operands.forward(x, weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_x = ctx.operands.of_x(grads[0], weight)
        return of_x.to(x.dtype), ctx.operands.of_weight(grads[0], x).to(weight.dtype), None


class PackedModel:
    """The model over a pack of sequences, alone or divided over context- and tensor-parallel ranks.

    Megatron's layers have q, k and v in one weight, and gate and up: these share scales, and their gradients.
    A rank has some heads, and some columns of the MLP: it quantizes its own parts of the weights, and of what
    its heads and columns compute; what all ranks read is quantized as a whole. A context-parallel rank has
    some tokens, and quantizes what is computed of these.

    An expert reads its tokens of all ranks together, with rows of zeros up to a size that FP8's kernels take.
    """

    def __init__(
        self,
        config: Any,
        weights: Weights,
        operands: Sequence[Sequence[Operands]] = (),
        routes: list[Tensor] | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """`config`: a Qwen3Config, or a Qwen3MoeConfig; `weights`: by their names in files.

        `operands`: for each part of the tokens, the operands of its tensor-parallel ranks, of which experts
        use the first; empty: no FP8.

        `routes`: of another computation, whether each token of a part went to each expert, in any order. A
        token goes there, too, where its own experts' scores are higher by at most `tolerance` times the
        largest.
        """
        self.config, self.weights, self.operands = config, weights, operands
        self.ranks = len(operands[0]) if operands else 1
        self.routes, self.tolerance = routes, tolerance

    def logits(self, token_t: Tensor, lengths: list[int], packs: Sequence[int] = ()) -> Tensor:
        """[t, v] of sequences with these `lengths`.

        `packs`: the numbers of tokens of several ranks' packs, one behind the other, which are the parts;
        without, the parts are those of context-parallel ranks.
        """
        if packs:
            self.parts = list(torch.arange(len(token_t)).split(list(packs)))
        else:
            self.parts = [_tokens_of(part, len(self.operands), lengths) for part in range(len(self.operands))]
        position_t = torch.cat([torch.arange(length) for length in lengths])
        sequence_t = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        is_before_tt = torch.arange(len(token_t))[:, None] >= torch.arange(len(token_t))
        is_seen_tt = (sequence_t[:, None] == sequence_t) & is_before_tt
        x = self.weights["model.embed_tokens.weight"][token_t]
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            normed = self._norm(x, f"{name}.input_layernorm")
            x = x + self._sum(
                self._heads(normed, name, rank, position_t, is_seen_tt) for rank in self._each()
            )
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            if f"{name}.mlp.gate.weight" in self.weights:
                x = x + self._experts(normed, name)
            else:
                x = x + self._sum(self._mlp(normed, name, rank) for rank in self._each())
        return self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T

    def _each(self) -> range:
        return range(self.ranks)

    def _sum(self, parts: Iterator[Tensor]) -> Tensor:
        return torch.stack(list(parts)).sum(0)

    def _heads(self, normed: Tensor, name: str, rank: int, position_t: Tensor, is_seen_tt: Tensor) -> Tensor:
        """The part of the attention's output that a rank's heads compute."""
        width = self.config.head_dim
        q, k, v = self._qkv(normed, name, rank)
        q, k, v = (part.unflatten(1, (-1, width)).transpose(0, 1) for part in (q, k, v))
        q = self._rotated(self._norm(q, f"{name}.self_attn.q_norm"), position_t)
        k = self._rotated(self._norm(k, f"{name}.self_attn.k_norm"), position_t)
        k, v = (part.repeat_interleave(len(q) // len(k), 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) / math.sqrt(width)).masked_fill(~is_seen_tt, -math.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        weight = self.weights[f"{name}.self_attn.o_proj.weight"]
        return self._product(out, weight.chunk(self.ranks, 1)[rank], rank)

    def _mlp(self, normed: Tensor, name: str, rank: int) -> Tensor:
        """The part of the MLP's output that a rank's columns compute."""
        gate, up = (self.weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        columns = [part.chunk(self.ranks)[rank] for part in (gate, up)]
        gate, up = self._product(normed, torch.cat(columns), rank).chunk(2, 1)
        down = self.weights[f"{name}.mlp.down_proj.weight"]
        return self._product(F.silu(gate) * up, down.chunk(self.ranks, 1)[rank], rank)

    def _experts(self, normed: Tensor, name: str) -> Tensor:
        """A token's experts count by the softmax of their scores; the router is not in FP8."""
        scores = normed @ self.weights[f"{name}.mlp.gate.weight"].T
        is_chosen = self._chosen(scores.detach().double())
        share = scores.masked_fill(~is_chosen, -math.inf).softmax(-1)
        out = torch.zeros_like(normed)
        for expert, token_s in enumerate(is_chosen_t.nonzero()[:, 0] for is_chosen_t in is_chosen.T):
            if len(token_s):
                shared = share[token_s, expert, None]
                out = out.index_add(
                    0, token_s, self._expert(normed[token_s], shared, f"{name}.mlp.experts.{expert}")
                )
        return out

    def _expert(self, x: Tensor, share: Tensor, name: str) -> Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        multiple = EXPERT_ROWS[self.operands[0][0].recipe] if self.operands else 1
        padding = (0, 0, 0, -len(x) % multiple)
        gate, up = self._by_expert(F.pad(x, padding), torch.cat([gate, up])).chunk(2, 1)
        return self._by_expert(F.silu(gate) * up * F.pad(share, padding), down)[: len(x)]

    def _by_expert(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.operands:
            return x @ weight.T
        out: Tensor = _Product.apply(x, weight, self.operands[0][0])  # type: ignore[no-untyped-call]
        return out

    def _chosen(self, scores: Tensor) -> Tensor:
        """[t, experts]: True for a token's experts."""
        best = scores.topk(self.config.num_experts_per_tok).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
        if self.routes is None:
            return is_chosen
        for part_t in self.parts:
            own = is_chosen[part_t]
            differences = [
                (route != own).sum().item() if route.shape == own.shape else math.inf for route in self.routes
            ]
            other = self.routes.pop(min(range(len(differences)), key=differences.__getitem__))
            part = scores[part_t]
            lost = (part * own).sum(1) - (part * other).sum(1)
            is_near = lost <= self.tolerance * part.abs().amax(1)
            is_chosen[part_t] = torch.where(is_near[:, None], other, own)
        return is_chosen

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

    def _qkv(self, x: Tensor, name: str, rank: int) -> list[Tensor]:
        """A rank's queries, keys and values.

        One product computes them in Megatron's order: the queries that share a key, the key, the value; then
        the same of the next key.
        """
        groups = self.config.num_key_value_heads
        weights = [self.weights[f"{name}.self_attn.{part}_proj.weight"] for part in "qkv"]
        parts = [weight.unflatten(0, (groups, -1)).chunk(self.ranks)[rank] for weight in weights]
        together = self._product(x, torch.cat(parts, 1).flatten(0, 1), rank)
        together = together.unflatten(1, (groups // self.ranks, -1))
        return [part.flatten(1) for part in together.split([part.shape[1] for part in parts], 2)]

    def _product(self, x: Tensor, weight: Tensor, rank: int) -> Tensor:
        if not self.operands:
            return x @ weight.T
        products: list[Tensor] = [
            _Product.apply(x[part_t], weight, operands[rank])  # type: ignore[no-untyped-call]
            for part_t, operands in zip(self.parts, self.operands, strict=True)
        ]
        return torch.cat(products)[torch.cat(self.parts).argsort()]


def _tokens_of(rank: int, ranks: int, lengths: list[int]) -> Tensor:
    """The tokens of a context-parallel rank: of each sequence in 2 `ranks` chunks, one from either end."""
    indices, begin = [], 0
    for length in lengths:
        chunks = torch.arange(begin, begin + length).tensor_split(2 * ranks)
        indices += [chunks[rank], chunks[-1 - rank]]
        begin += length
    return torch.cat(indices)
