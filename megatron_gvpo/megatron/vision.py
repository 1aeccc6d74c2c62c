"""Changes to Megatron-Bridge's vision-language models, and the arguments of their forward pass.

Megatron-Bridge (0.6.2) has three faults here; docs/explanation/audit.md describes them.

- Qwen3-VL's patch mergers have the GELU by tanh, where the model has the exact one.
- Qwen3-VL's vision tower gets wrong gradients under sequence parallelism. Every rank adds the features of its
  own tokens to the first layers' hidden states, and differentiates these alone. A forward hook of the tower
  sums the ranks' gradients.
- Qwen2.5-VL does not pass `output_processor` on to its language model, which ends in the head.

Both read tokens and grids on the GPU, for which the host waits at every number that is a size. Their towers
run before them here, and get what `image_tokens.py` computes on the host; a hook of the embedding puts the
features into the pack.

Full recomputation of Qwen2.5-VL includes its tower, if that trains: it is the larger part of the activations.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.megatron.attention.core import PackRotary
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.image_tokens import (
    ImageTokens,
    image_ends,
    qwen2_5_arguments,
    qwen3_interpolation,
)
from megatron_gvpo.megatron.parallel import device
from megatron_gvpo.types import TrainBatch, on_device

_QWEN2_5 = "Qwen25VLModel"  # Megatron-Bridge's class


def has_vision(hf_config: Any) -> bool:
    """Return True for the Hugging Face configuration of a model with a vision tower."""
    return hasattr(hf_config, "vision_config")


def rotates_packs(hf_config: Any) -> bool:
    """Return True for a model whose language model `VisionInputs` gives a `PackRotary` (Qwen2.5-VL)."""
    return bool(hf_config.model_type == "qwen2_5_vl")


def vision_settings(hf_config: Any) -> dict[str, Any]:
    """Return the provider's fields that must differ from Megatron-Bridge's values."""
    rope = hf_config.get_text_config().rope_parameters
    return {
        "mrope_section": list(rope["mrope_section"]),  # Qwen2.5-VL's bridge assumes the value of its 7B model
        "apply_rope_fusion": False,  # the fused kernel knows one axis
    }


def local_vision(model_bridge: type[Any], provider: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the model is built on CPU, from local layers."""
    from megatron_gvpo.megatron.cpu.vision import map_local_norms, qwen3_vl_with_local_layers

    map_local_norms(model_bridge)
    if not hasattr(provider, "deepstack_visual_indexes"):
        return contextlib.nullcontext()
    return qwen3_vl_with_local_layers(provider)


@dataclass(frozen=True)
class _Features:
    """A vision tower's features of a pack, and the tokens of the pack that they stand for."""

    index_m: Tensor  # int64 indices into t
    feature_mh: Tensor
    deep_index: Tensor  # of those in this rank's part of the hidden states of the first layers
    deep: list[Tensor]  # a layer's features each, of these tokens


class VisionInputs:
    """Runs the micro-batches of one model chunk, with the images of their rows."""

    def __init__(self, chunk: Any, hf_config: Any, processor: ImageProcessor, trained: bool) -> None:
        """Change `chunk`, Megatron-Bridge's model before wrapping. `trained`: its vision tower trains."""
        self._processor = processor
        self._placeholder: int = hf_config.image_token_id
        self._merge: int = hf_config.vision_config.spatial_merge_size
        self._is_qwen2_5 = type(chunk).__name__ == _QWEN2_5
        self._divides_tokens: bool = chunk.config.sequence_parallel
        self._features: _Features | None = None  # of the micro-batch in the forward pass
        self._arguments: dict[str, Any] = {}  # of Qwen2.5-VL's language model
        self._rotary: PackRotary | None = None
        language, self._tower = chunk.language_model, _tower(chunk)
        if self._tower is not None:
            self._tower.requires_grad_(trained)
            language.embedding.register_forward_hook(self._with_features)
        if self._is_qwen2_5:
            self._change_qwen2_5(chunk, trained)
        elif self._tower is not None:
            self._change_qwen3(language)

    def _change_qwen2_5(self, chunk: Any, trained: bool) -> None:
        language = chunk.language_model
        if self._tower is not None and trained and chunk.config.recompute_granularity == "full":
            # transformers' own layers: megatron-core's settings do not reach them.
            options = {"use_reentrant": False}
            self._tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        on_cpu = not torch.cuda.is_available()
        self._rotary = PackRotary(language.rotary_pos_emb, chunk.config.rotary_interleaved, on_cpu)
        language.rotary_pos_emb = self._rotary
        plain = language.forward
        language.forward = lambda *args, **kwargs: plain(*args, **{**kwargs, **self._arguments})
        chunk.get_rope_index = lambda *_, **__: (None, None)  # `_arguments` has the positions

    def _change_qwen3(self, language: Any) -> None:
        tower = self._tower
        for module in tower.modules():
            if type(module).__name__ == "Qwen3VLVisionPatchMerger":
                module.activation_func = torch.nn.functional.gelu
        if self._divides_tokens:
            tower.register_forward_hook(_sum_gradients)
        tower.fast_pos_embed_interpolate = partial(_position_embeddings, tower)
        tower.build_packed_seq_params = _pack_of_images
        language.register_forward_pre_hook(self._with_deep_features, with_kwargs=True)
        language.decoder._deepstack_process = _add_features

    def check(self, micro_batches: Sequence[TrainBatch]) -> None:
        """Raise ImageError on all ranks if an image of any rank's micro-batches is missing or has changed.

        A collective before the pass, because an error of one rank in the pass would leave the others in the
        schedule.
        """
        with all_ranks_agree(ImageError):
            for rows in micro_batches if self._tower is not None else ():
                for image in (image for row in rows.images or () for image in row):
                    self._processor.check(image)

    def run(self, chunk: Any, batch: PackedBatch, packed: Any, head: dict[str, Any]) -> Any:
        """Return the chunk's output; `head`: the arguments of its last stage. Raises ImageError."""
        tokens = ImageTokens.of(batch, self._placeholder, self._merge)
        arguments = {
            "packed_seq_params": packed,
            "position_ids": on_device(tokens.position_3t[:, None], batch.token_t.device),
            **head,
        }
        if self._rotary is not None:
            self._rotary.pack, self._arguments = packed, arguments
        try:
            if self._tower is not None and tokens.images:
                self._features = self._compute(tokens, len(batch.token_t))
            return chunk(
                input_ids=batch.token_t[None],
                attention_mask=None,
                # Without a pack Qwen2.5-VL does not cut its tokens into sequences.
                **({} if self._is_qwen2_5 else arguments),
            )
        finally:
            self._features, self._arguments = None, {}
            if self._rotary is not None:
                self._rotary.pack = None

    def _compute(self, tokens: ImageTokens, count: int) -> _Features:
        """Run the tower. `count`: the tokens of the pack."""
        pixels = torch.cat([self._processor.pixels(image) for image in tokens.images])
        pixels, grid_n3 = on_device(pixels, device()), tokens.grid_n3
        if self._is_qwen2_5:
            on_host = qwen2_5_arguments(self._tower, grid_n3)
            # The tower cuts sequences by their lengths in every layer: these stay on the host.
            moved = {k: v if "seqlens" in k else on_device(v, device()) for k, v in on_host.items()}
            output = self._tower(pixels.type(self._tower.dtype), grid_thw=grid_n3, **moved)
            feature_mh, deep = output.pooler_output, []
        else:
            feature_mh, deep = self._tower(hidden_states=pixels, grid_thw=grid_n3)
        begin, end = 0, count
        if self._divides_tokens:
            part = count // parallel_state.get_tensor_model_parallel_world_size()
            begin = part * parallel_state.get_tensor_model_parallel_rank()
            end = begin + part
        first, last = bisect_left(tokens.indices, begin), bisect_left(tokens.indices, end)
        index_m = on_device(torch.tensor(tokens.indices), device())
        return _Features(
            index_m, feature_mh, index_m[first:last] - begin, [layer_mh[first:last] for layer_mh in deep]
        )

    def _with_features(self, _: Any, __: Any, embedded: Tensor) -> Tensor:
        """The embedding's output [t, 1, h] with the features of the micro-batch's images."""
        if self._features is None:
            return embedded
        feature_mh = self._features.feature_mh.to(embedded.dtype)
        return embedded.index_copy(0, self._features.index_m, feature_mh[:, None])

    def _with_deep_features(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self._features is None:
            return args, kwargs
        deep = {
            "visual_pos_masks": self._features.deep_index,
            "deepstack_visual_embeds": self._features.deep,
        }
        return args, {**kwargs, **deep}


def _tower(chunk: Any) -> Any:
    """Return the chunk's vision tower; None on a later pipeline stage."""
    return getattr(chunk, "visual", None) or getattr(chunk, "vision_model", None)


def _position_embeddings(tower: Any, grid_n3: Tensor) -> Tensor:
    """Stands for Qwen3-VL's `fast_pos_embed_interpolate`: the position embeddings of all patches [p, h]."""
    table = tower.pos_embed
    index_p4, weight_p4 = qwen3_interpolation(grid_n3, tower.num_grid_per_side, tower.spatial_merge_size)
    weight_p4 = on_device(weight_p4.to(table.weight.dtype), device())
    parts = table(on_device(index_p4, device())) * weight_p4[..., None]
    return parts[0] + parts[1] + parts[2] + parts[3]


def _pack_of_images(grid_n3: Tensor) -> PackedSeqParams:
    """Stands for Qwen3-VL's `build_packed_seq_params`: its tower attends within each image."""
    ends, longest = image_ends(grid_n3)
    ends = on_device(ends, device())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _add_features(hidden_states: Tensor, index: Tensor, feature_mh: Tensor) -> Tensor:
    """Stands for Qwen3-VL's `_deepstack_process`, with indices in place of a mask: [t, 1, h] -> [t, 1, h]."""
    added = hidden_states.index_select(0, index) + feature_mh[:, None]
    return hidden_states.index_copy(0, index, added)


def _sum_gradients(_: Any, __: Any, output: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    features, deepstack = output
    return features, [copy_to_tensor_model_parallel_region(x) for x in deepstack]  # backward: all-reduce
