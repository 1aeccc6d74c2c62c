"""The model on this rank: its weights, their export, and the waits before weights are read or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_gvpo.huggingface.card import Facts
from megatron_gvpo.huggingface.checked_weights import SafetensorsWriter
from megatron_gvpo.huggingface.complete_weights import MtpHeads
from megatron_gvpo.megatron.adapters.lora import Adapters
from megatron_gvpo.megatron.model.own_weights import OwnWeights, find_own_weights
from megatron_gvpo.megatron.model.routers import RouterHooks
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.vision import VisionInputs
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.types import TrainBatch


@dataclass
class Model:
    """The chunks of the model on this rank (one, without virtual pipeline stages)."""

    chunks: list[Any]
    config: Any  # megatron-core's TransformerConfig
    bridge: Any  # Megatron-Bridge's AutoBridge
    vocab_size: int  # without the padding for tensor parallelism
    facts: Facts  # the values of config.json beside the shapes of weights
    padding: Padding  # the rule by which every pack is padded
    local: bool  # on CPU, with the local layers
    overlaps_param_gather: bool  # after an update, other ranks' shards of the weights are still the old ones
    own_attention: bool  # the layers have this package's core attention
    rotary: list[Any]  # one module a chunk if this package's core attention applies RoPE, else empty
    latent_rotary: Any = None  # a rotary module, if latent attention rotates by a pack's positions
    share_prompts: bool = False  # compute a group's prompt once, where its responses are single ones
    obstacle_to_sharing: str = ""  # the reason for which train.share_prompts=auto does not share prompts
    replay: RouterHooks | None = None  # the hooks for router replay
    adapters: Adapters | None = None  # adapters that train instead of the weights
    vision: VisionInputs | None = None  # None: the model takes no images
    heads: MtpHeads | None = None  # the checkpoint's MTP heads: exported, never computed with
    _own: OwnWeights | None = None
    _background_work: list[Callable[[], None]] = field(default_factory=list)

    def shares_prompts_of(self, rows: TrainBatch) -> bool:
        """Return True if equal prompts of `rows` are computed once; not with turns or replayed experts."""
        return self.share_prompts and rows.turns is None and rows.routing is None

    def add_background_work(self, wait: Callable[[], None]) -> None:
        """Register work that reads the weights in the background; `wait` waits for its end."""
        self._background_work.append(wait)

    def finish_background_work(self) -> None:
        """Call this on every rank before weights or optimizer change.

        It waits for a background save, which reads them, and for parameter gathers that no module has waited
        for, which write them. Raises CheckpointError if the save failed.
        """
        while self._background_work:
            self._background_work.pop()()
        if self.overlaps_param_gather:
            # Megatron would take a gather that is still pending after the change for a gather of the new
            # weights.
            with megatron_device(), torch.no_grad():
                for group in self._bucket_groups():
                    if group.param_gather_handle is not None:
                        # This waits for the pending gather and starts no other.
                        group.start_param_sync(force_sync=True)

    def gather_after_update(self) -> None:
        """Call this before an update that does not follow directly on the backward pass of its gradients.

        With overlap_param_gather, the next forward pass then gathers the new weights. Megatron lets it do so
        by the backward pass alone, and what reads weights between the two, such as a pass or a save, counts
        as that gather. No gather may be pending (`finish_background_work`).
        """
        if self.overlaps_param_gather:
            for chunk in self.chunks:
                chunk.reset_param_sync_dispatch_state()

    def finish_param_gather(self) -> None:
        """Call this on every rank before weights are read other than by a forward pass.

        With overlap_param_gather, an update leaves the gather of the new weights for later. This waits for
        buckets whose gather is pending, which must be of the newest weights (`finish_background_work` leaves
        none pending before an update), and gathers all other buckets.
        """
        if self.overlaps_param_gather:
            with megatron_device(), torch.no_grad():
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)

    def _bucket_groups(self) -> Iterator[Any]:
        """Yield Megatron's bucket groups (buckets that are communicated together) of all chunks."""
        for chunk in self.chunks:
            yield from [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]

    def export(self, on_host: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of every weight in a fixed order, adapters merged.

        `on_host`: on the CPU; otherwise on the model's device. A collective: every rank must iterate to the
        end, and every rank gets every tensor.
        """
        self.finish_param_gather()
        with megatron_device(), torch.no_grad():
            stream = self.bridge.export_hf_weights(
                self.chunks, cpu=on_host, show_progress=False, merge_adapter_weights=False
            )
            if self.adapters is not None:
                stream = self.adapters.merged(stream)
            for name, tensor in stream:
                if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    tensor = tensor[: self.vocab_size]
                yield name, tensor

    def export_adapters(self, on_host: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face PEFT's name, full tensor) of every adapter, like `export`.

        Raises ValueError if the model has none.
        """
        if self.adapters is None:
            raise ValueError("the model has no adapters: model.adapter is not set")
        self.finish_param_gather()
        with megatron_device(), torch.no_grad():
            yield from self.adapters.tensors(on_host)

    def save_adapters(self, directory: Path) -> None:
        """Write the adapters as Hugging Face PEFT does. A collective; rank 0 writes (`Adapters.save`)."""
        assert self.adapters is not None, "the model has no adapters"
        self.finish_param_gather()
        with megatron_device(), torch.no_grad():
            self.adapters.save(directory)

    def own_weights(self) -> OwnWeights:
        """Return this rank's own weights, complete until they next change. A collective."""
        self.finish_param_gather()
        if self._own is None:
            with megatron_device(), torch.no_grad():
                self._own = find_own_weights(self.bridge, self.chunks, self.vocab_size)
        return self._own

    def weights(self) -> Iterator[Tensor]:
        """Yield this rank's parameters."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def trained_weights(self) -> Iterator[Tensor]:
        """Yield those of this rank's parameters that train."""
        return (weight for weight in self.weights() if weight.requires_grad)

    def drop_fp8_copies(self) -> None:
        """Free the FP8 copies of weights that Transformer Engine (2.20.2) keeps between micro-batches.

        Each pass makes the copies again in its first micro-batch.
        """
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            copies = getattr(module, "_fp8_workspaces", None)
            if copies:
                copies.clear()

    def gradient_buffers(self) -> Iterator[Tensor]:
        """Yield the tensors in which Megatron's data parallelism sums this rank's gradients."""
        return (buffer.grad_data for buffer in self.buffers())

    def buffers(self) -> Iterator[Any]:
        """Yield Megatron's buffers of trained weights and their gradients, those of experts last in a chunk.

        Each rank of a buffer's `data_parallel_group` sums, and updates, a shard of each of its buckets.
        """
        for chunk in self.chunks:
            yield from [*chunk.buffers, *chunk.expert_parallel_buffers]

    def save_hf(self, directory: Path, shard_bytes: int = 5 << 30) -> None:
        """Write a Hugging Face checkpoint of the present weights: config.json and safetensors.

        MTP heads are those of the checkpoint that the model came from, unchanged.

        A collective. Rank 0 writes, and holds at most `shard_bytes` and one tensor more. If it cannot write,
        it alone raises an error, after it has taken part in the gather of the last tensor.
        """
        problem: Exception | None = None
        writer = SafetensorsWriter(directory, shard_bytes) if dist.get_rank() == 0 else None
        for name, tensor in self.export():
            if writer is not None and problem is None:
                try:
                    writer.add(name, tensor)
                except Exception as error:  # such as too little memory for a copy
                    problem = error
        if problem is not None:
            raise problem
        if writer is not None:
            for name, tensor in self.heads.tensors() if self.heads else ():
                writer.add(name, tensor)
            writer.close()
            config = copy(self.bridge.hf_pretrained.config)
            vars(config).pop("auto_map", None)  # auto_map names Python files, which are not exported
            config.save_pretrained(directory)


def drop_leftovers(model: Model) -> None:
    """Drop the last micro-batch's routing and its pipeline stage's input, and the rotary frequencies.

    megatron-core (0.19.2) replaces them in the next forward pass, and nothing reads them before. Until then
    their memory would be missing to a rollout engine on the same GPUs, and to the head of the next pass.
    The input of a stage comes with its gradient. Rotary classes cache up to 32 tables of frequencies, one for
    each length of a micro-batch's longest sequence, also those of earlier models.
    """
    if model.replay is not None:
        model.replay.begin(training=False)
    for chunk in model.chunks:
        get_attr_wrapped_model(chunk, "set_input_tensor")([None])
    for module in (*model.rotary, *(module for chunk in model.chunks for module in chunk.modules())):
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            _drop_routing(dispatcher)
        clear = getattr(module.forward, "cache_clear", None)
        if clear is not None:
            clear()


def _drop_routing(dispatcher: Any) -> None:
    """Drop the tensors that a dispatcher of tokens to experts keeps of a forward pass. Megatron lists them.

    The router's probabilities are part of the layer's graph. With full recompute it is built in the backward
    pass, and they would keep the layer's input and its gradient.
    """
    for name in dispatcher.cudagraph_attrs:
        path, _, attribute = name.rpartition(".")
        owner = attrgetter(path)(dispatcher) if path else dispatcher
        setattr(owner, attribute, None)
