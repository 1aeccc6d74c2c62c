"""Changes to Megatron-Bridge's vision-language models, and the arguments of their forward pass.

Megatron-Bridge (0.6.2) has three faults here; docs/explanation/audit.md describes them.

- Qwen3-VL's patch mergers have the GELU by tanh, where the model has the exact one.
- Qwen3-VL's vision tower gets wrong gradients under sequence parallelism. Every rank adds the features of its
  own tokens to the first layers' hidden states, and differentiates these alone. A forward hook of the tower
  sums the ranks' gradients.
- Qwen2.5-VL does not pass `output_processor` on to its language model, which ends in the head.

Full recomputation of Qwen2.5-VL includes its tower, if that trains: it is the larger part of the activations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.huggingface.image_families import TOKENS
from megatron_gvpo.megatron.attention.core import PackRotary
from megatron_gvpo.megatron.batch import PackedBatch
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


class VisionInputs:
    """Runs the micro-batches of one model chunk, with the images of their rows."""

    def __init__(self, chunk: Any, hf_config: Any, processor: ImageProcessor, trained: bool) -> None:
        """Change `chunk`, Megatron-Bridge's model before wrapping. `trained`: its vision tower trains."""
        self._first: bool = chunk.pre_process
        self._processor = processor
        self._placeholders = {getattr(hf_config, key) for key in TOKENS}
        self._token_t: Tensor | None = None  # tokens of the micro-batch in the forward pass
        self._head: dict[str, Any] = {}
        language, tower = chunk.language_model, _tower(chunk)
        if tower is not None:
            tower.requires_grad_(trained)
            for module in tower.modules():
                if type(module).__name__ == "Qwen3VLVisionPatchMerger":
                    module.activation_func = torch.nn.functional.gelu
            if trained and chunk.config.recompute_granularity == "full" and type(chunk).__name__ == _QWEN2_5:
                # transformers' own layers: megatron-core's settings do not reach them.
                tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if chunk.config.sequence_parallel and hasattr(chunk, "vision_model"):
                tower.register_forward_hook(_sum_gradients)
        if self._first:
            language.embedding.register_forward_pre_hook(self._with_all_tokens, with_kwargs=True)
        self._drops_head = type(chunk).__name__ == _QWEN2_5
        self._rotary: PackRotary | None = None
        if self._drops_head:
            on_cpu = not torch.cuda.is_available()
            interleaved = chunk.config.rotary_interleaved
            self._rotary = PackRotary(language.rotary_pos_emb, interleaved, on_cpu)
            language.rotary_pos_emb = self._rotary
            plain = language.forward
            language.forward = lambda *args, **kwargs: plain(*args, **kwargs, **self._head)

    def check(self, micro_batches: Sequence[TrainBatch]) -> None:
        """Raise ImageError on all ranks if an image of any rank's micro-batches is missing or has changed.

        A collective before the pass, because an error of one rank in the pass would leave the others in the
        schedule.
        """
        with all_ranks_agree(ImageError):
            for rows in micro_batches if self._first else ():
                for image in (image for row in rows.images or () for image in row):
                    self._processor.check(image)

    def run(self, chunk: Any, batch: PackedBatch, packed: Any, head: dict[str, Any]) -> Any:
        """Return the chunk's output; `head`: the arguments of its last stage. Raises ImageError."""
        of_row = batch.rows.images
        images = [] if of_row is None else [image for i in batch.order for image in of_row[i]]
        pixels = grid = None
        if images:
            grid = on_device(torch.tensor([image.grid for image in images]), batch.token_t.device)
            if self._first:
                pixels = torch.cat([self._processor.pixels(image) for image in images])
                pixels = on_device(pixels, batch.token_t.device)
        self._token_t, self._head = batch.token_t, head
        if self._rotary is not None:
            self._rotary.pack = packed
        try:
            return chunk(
                input_ids=self._without_sampled_placeholders(batch)[None],
                position_ids=None,  # the model makes its own positions, in three axes
                attention_mask=None,
                packed_seq_params=packed,
                pixel_values=pixels,
                image_grid_thw=grid,
                **({} if self._drops_head else head),
            )
        finally:
            self._token_t, self._head = None, {}
            if self._rotary is not None:
                self._rotary.pack = None

    def _without_sampled_placeholders(self, batch: PackedBatch) -> Tensor:
        """Return the pack's tokens, with 0 where a response has a token that stands for an image in prompts.

        A policy may sample such a token. In a response such a token is an ordinary one, as in the engine that
        sampled it; `_with_all_tokens` restores it for the embedding.
        """
        assert batch.rows.turns is None, "conversations have no images"
        sampled: list[int] = []
        begin = 0
        for i, length in zip(batch.order, batch.lengths, strict=False):  # padding at the end has no row
            first = begin + len(batch.rows.prompt_ids[i])
            tokens = batch.rows.response_ids[i][: begin + length - first]
            sampled += [first + k for k, token in enumerate(tokens) if token in self._placeholders]
            begin += length
        if not sampled:
            return batch.token_t
        index_r = on_device(torch.tensor(sampled), batch.token_t.device)
        return batch.token_t.index_fill(0, index_r, 0)

    def _with_all_tokens(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert self._token_t is not None and not args
        return args, {**kwargs, "input_ids": self._token_t[None]}


def _tower(chunk: Any) -> Any:
    """Return the chunk's vision tower; None on a later pipeline stage."""
    return getattr(chunk, "visual", None) or getattr(chunk, "vision_model", None)


def _sum_gradients(_: Any, __: Any, output: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    features, deepstack = output
    return features, [copy_to_tensor_model_parallel_region(x) for x in deepstack]  # backward: all-reduce
