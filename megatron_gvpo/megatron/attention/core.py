"""Puts this package's core attention into Megatron's layers, and defines its inputs.

Transformer Engine's attention over packs can neither attend to two sequences at once nor return softmax
statistics. With shared prompts, GPU runs therefore have `SharedPromptAttention` in its place. CPU runs always
have a core attention of their own (`megatron/cpu/packed_attention.py`).

megatron-core rotates queries and keys by their position in a sequence, and a response's positions begin after
its prompt's. So the core attention rotates them, by the positions of the pack; `defer_rotary` removes the
rotation from the model's own path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_gvpo.megatron.attention.merged import PackPart, Sequences, merged_attention
from megatron_gvpo.megatron.attention.rotary import angles


@dataclass
class OwnPackedSeqParams(PackedSeqParams):
    """PackedSeqParams with the inputs of this package's core attention, computed once a micro-batch."""

    sequences: Sequences | None = None
    freqs_t: Tensor | None = None  # megatron-core's rotary frequencies of every token's position [t, 1, 1, d]
    rotary_scale: float = 1.0  # multiplies rotated queries and keys (YaRN)
    angles_t: tuple[Tensor, Tensor] | None = None  # on CPU, cosine and sine of the frequencies (rotary.py)
    # The frequencies and the scale for latent attention, which rotates before the core attention.
    latent_rotation: tuple[Tensor, float] | None = None


class _NoRotary(torch.nn.Module):
    """Returns no frequencies, so that megatron-core's attention does not rotate queries and keys."""

    def __init__(self, nothing: Any) -> None:
        super().__init__()
        self._nothing = nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._nothing

    @staticmethod
    def get_rotary_seq_len(*args: Any, **kwargs: Any) -> int:
        return 0


class PackRotary(torch.nn.Module):
    """Replaces a model's rotary module in three axes, because the core attention rotates instead.

    megatron-core (0.19.2) waits for the GPU for every sequence of a pack, in every layer, although these
    frequencies are those of the pack's tokens. `pack` is the micro-batch that the model computes.
    """

    def __init__(self, rotary: Any, interleaved: bool, on_cpu: bool) -> None:
        super().__init__()
        self._rotary, self._interleaved, self._on_cpu = rotary, interleaved, on_cpu
        self.pack: OwnPackedSeqParams | None = None

    def forward(self, *args: Any, **kwargs: Any) -> None:
        assert self.pack is not None
        self.pack.freqs_t = self._rotary(*args, **kwargs)
        if self._on_cpu:
            self.pack.angles_t = angles(self.pack.freqs_t, self._interleaved)


def has_plain_rotary(model: Any) -> bool:
    """Return True if one table of angles rotates all layers' queries and keys of a GPTModel.

    Latent attention has a rotation of its own, Gemma 3 has two tables, and some layers of K-EXAONE do not
    rotate: megatron-core itself rotates for these models.
    """
    if model.config.multi_latent_attention or model.config.no_rope_freq:
        return False
    return type(getattr(model, "rotary_pos_emb", None)) in (RotaryEmbedding, YarnRotaryEmbedding)


def attends_to_all_before(config: Any) -> bool:
    """Return True if every layer's attention is a plain softmax over the token and all tokens before it."""
    variant = config.window_size is not None or config.experimental_attention_variant is not None
    return not variant and config.softmax_type == "vanilla"


def defer_rotary(model: Any) -> Any:
    """Remove the rotary module from a GPTModel and return it; the caller puts its frequencies into packs."""
    rotary = model.rotary_pos_emb
    model.rotary_pos_emb = _NoRotary((None, 1.0) if isinstance(rotary, YarnRotaryEmbedding) else None)
    return rotary


def frequencies(rotary: Any, positions: int, position_t: Tensor) -> tuple[Tensor, float]:
    """Return the frequencies [t, 1, 1, d] of tokens at `position_t`, and the scale of rotated vectors.

    `positions`: 1 + the largest position.
    """
    table = rotary(positions, packed_seq=True)
    table, scale = table if isinstance(table, tuple) else (table, 1.0)
    return table[position_t], scale


def _rotated(x_tnd: Tensor, pack: OwnPackedSeqParams, config: Any) -> Tensor:
    """Rotate queries or keys [t, n, d] of a pack by the positions of its tokens, all at once."""
    assert pack.freqs_t is not None
    rotated: Tensor = apply_rotary_pos_emb(x_tnd[:, None], pack.freqs_t, config, mscale=pack.rotary_scale)
    return rotated[:, 0]


class SharedPromptAttention(MegatronModule):
    """Attention with the interface of megatron-core's core attention, for `thd` packs, without dropout.

    query [t, n, d], key and value [t, n_kv, d] of this rank -> [t, n * d].
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: OwnPackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        pack = packed_seq_params
        assert pack is not None and pack.sequences is not None
        query, key = (_rotated(x, pack, self.config) for x in (query, key))
        return merged_attention(query, key, value, pack.sequences, FlashAttention(), self.scale).flatten(1)


def rotating_attention() -> type[Any]:
    """Return Transformer Engine's core attention with a rotation of its own before it.

    megatron-core's rotation of packs with YaRN (GPT-OSS) waits for the GPU twice in every layer, to read the
    lengths of sequences, and then goes through them one by one; its fused kernel forgets the scale.
    """
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class RotatingAttention(TEDotProductAttention):
        def forward(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            pack = kwargs["packed_seq_params"]
            query, key = (_rotated(x, pack, self.config) for x in (query, key))
            out: Tensor = super().forward(query, key, *args, **kwargs)
            return out

    # Megatron-Bridge decides by the name of a module's class how its weights are split over ranks. Each rank
    # has the sinks of its own heads: "column".
    AutoMapping.register_module_type(RotatingAttention.__name__, "column")
    return RotatingAttention


def with_core_attention(spec_of: Callable[..., Any], core_attention: type[Any]) -> Callable[..., Any]:
    """Wrap `spec_of`, which returns the spec of a layer or of a stage's layers, to change core attention."""

    def changed(config: Any, vp_stage: int | None = None) -> Any:
        stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(spec_of).parameters else {}
        spec = spec_of(config, **stage)
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = core_attention
        return spec

    return changed


def for_packs(spec_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `spec_of` to have Transformer Engine's core attention in place of megatron-core's own.

    Megatron-Bridge (0.6.2) takes megatron-core's for EXAONE 4.0, which refuses packs.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return with_core_attention(spec_of, TEDotProductAttention)


# transformers (5.19) gives the norms inside latent attention this epsilon, its default, in DeepSeek-V2,
# DeepSeek-V3 and GLM-4.7-Flash, whatever rms_norm_eps of config.json is.
_EPSILON = 1e-6
# With Transformer Engine the norm is part of the linear layer behind it.
_NORMS = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")


def correct_norms(chunks: Iterable[Any]) -> None:
    """Give norms the epsilon of transformers where the libraries give them another one.

    megatron-core (0.19.2) gives those inside latent attention (DeepSeek's MLA) rms_norm_eps. Megatron-Bridge
    (0.6.2) gives those behind attention and MLP (Gemma 3, EXAONE 4.0) 1e-5 on GPUs, whatever rms_norm_eps is.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MultiLatentAttention):
                for part in (getattr(module, name, None) for name in _NORMS):
                    if part is not None and hasattr(part, "eps"):
                        part.eps = _EPSILON
            elif (norm := getattr(module, "post_layernorm", None)) is not None and hasattr(norm, "eps"):
                norm.eps = module.config.layernorm_epsilon


_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class FlashAttention:
    """FlashAttention-2 as a `PartialAttention`, by the kernels that PyTorch brings for GPUs.

    PyTorch's own context parallelism also passes merged outputs and statistics to this backward kernel. The
    kernels take bf16 and fp16, and head dimensions that are multiples of 8 up to 256. The backward kernel is
    deterministic under `torch.use_deterministic_algorithms`.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PackPart,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _forward(query, key, value, *_spans(part), 0.0, part.causal, False, scale=part.scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        part: PackPart,
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # dropout's seed; dropout is 0
        # The kernel reads `lse` without its strides.
        results = (grad, query, key, value, out, lse.contiguous())
        dq, dk, dv = _backward(*results, *_spans(part), 0.0, part.causal, seed, seed, scale=part.scale)
        return dq, dk, dv


def _spans(part: PackPart) -> tuple[Tensor, Tensor, int, int]:
    return part.rows.ends, part.columns.ends, part.rows.longest, part.columns.longest
