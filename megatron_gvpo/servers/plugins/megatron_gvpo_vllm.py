"""Runs inside vLLM's workers: loads weights from a torch process group (gloo or NCCL), memory or files.

vLLM finds it as a general plugin because this folder, with its entry points, is on the server's PYTHONPATH.
vLLM's own NCCL backend connects the ranks in its own way and does not run on CPUs. This one uses
torch.distributed, so that the trainer's code is the same for both engines, on CPUs and GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron_gvpo_copies import LoadCopies
from megatron_gvpo_group import join, next_broadcast
from megatron_gvpo_memory import BucketLayout, in_weights, opened, tell_gpus
from megatron_gvpo_mends import add_model_types, bind_stores, mend_temperatures
from megatron_gvpo_patches import apply_patches, check_patched, refuse_rearranged_experts, unpack
from megatron_gvpo_shards import Shards
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "megatron_gvpo"


@dataclass
class RendezvousInit(WeightTransferInitInfo):
    """Where the process group forms; `rank_offset` is the rank of this server's first process in it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str  # "gloo" or "nccl"
    timeout: float  # seconds
    max_ctas: int | None = None  # blocks of an operation of NCCL's; None: its own choice
    # The run's directory of shared memory, if weights come through mailboxes there. Then no worker is in the
    # group.
    memory: str = ""


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):
    """The tensors of one update, their bytes one after another, and where they are.

    They come by broadcast, or are in `file` in shared memory, or in a GPU's memory (one of `handles` for each
    rank), or are all files of `directory`. With `counts` they are `size` bytes of patches, by broadcast (see
    megatron_gvpo_patches). With `tell` there are no tensors: the ranks write which GPUs they see (see
    megatron_gvpo_memory). With `shards` there are no tensors either: "read_layout" makes the ranks read their
    layouts, and "receive" makes them take part in a sharded push (see megatron_gvpo_shards).
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    directory: str | None = None
    file: str | None = None
    handles: list[dict[str, Any]] | None = None
    tell: str | None = None
    shards: str | None = None
    counts: list[int] | None = None
    size: int = 0


class Receiver(WeightTransferEngine):
    """vLLM's weight transfer interface over a process group that the trainer's rank 0 leads."""

    init_info_cls = RendezvousInit
    update_info_cls = BucketUpdate
    supports_draft_weight_update = False
    _group: Any = None
    _reloading = False
    _copies: LoadCopies
    _patched = False
    # On a CPU, a copy of each tensor that was patched. The copy outlives a process group, as the patched
    # weights do.
    _copy: dict[str, torch.Tensor]
    _store: Any = None
    _shards: Shards | None = None
    _joined: RendezvousInit | None = None
    _group_rank = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._copy = {}

    def init_transfer_engine(self, init_info: RendezvousInit) -> None:
        self.shutdown()
        self._group_rank = init_info.rank_offset + self._rank
        self._joined = init_info
        self._store, self._group = join(
            init_info.master_address,
            init_info.master_port,
            self._group_rank,
            init_info.world_size,
            init_info.backend,
            init_info.timeout,
            init_info.max_ctas,
            init_info.memory,
        )

    @property
    def _rank(self) -> int:
        """This worker's number among the server's ranks."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def start_weight_update(self) -> None:
        self._patched = False
        self.finish_weight_update()  # vLLM does not call it for an update in which a bucket failed

    def finish_weight_update(self) -> None:
        if self._patched:
            self._patched = False
            check_patched(self.model)
            derive_again(self.model, self.model_config.dtype)
        if self._reloading:
            self._reloading = False
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                pack_heads_again(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator, which a CPU build does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketUpdate) -> None:
        if update_info.tell is not None:
            tell_gpus(update_info.tell)
            return
        if update_info.shards is not None:
            self._take_shards(is_layout=update_info.shards == "read_layout")
            return
        if update_info.counts is not None:
            self._receive_patches(update_info, update_info.counts)
            return
        self._reload()
        if update_info.directory is not None:
            self._load(_tensors_in(update_info.directory))
            return
        layout = BucketLayout(update_info.names, update_info.dtypes, update_info.shapes)
        # vLLM keeps the tensors of a layer until the whole layer has come. So they are views of a new buffer,
        # never of shared memory, which the next bucket overwrites.
        if update_info.handles is not None:
            flat = opened(update_info.handles[self._rank], layout.nbytes).to(self.device, copy=True)
            torch.accelerator.synchronize()
        elif update_info.file is not None:
            flat = layout.mapped(update_info.file).to(self.device, copy=True)
        else:
            flat = next_broadcast(self._group, layout.nbytes, self.device)
        self._load(layout.views(flat))

    def _take_shards(self, is_layout: bool) -> None:
        self._reload()
        if is_layout:
            assert self._joined is not None, "not joined"
            self._shards = Shards(
                self._group,
                self._store,
                self._group_rank,
                self.device,
                self._joined.memory,
                self._joined.timeout,
            )
            # This reads the layout alone; weights come before the server serves.
            self._shards.read_layout(self._load_all)
            return
        assert self._shards is not None, "its layout was not learned"
        try:
            self._shards.receive(self._load)
        except BaseException:  # other ranks wait for this one, until its connections end
            self.shutdown()
            raise

    def _load_all(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load a whole model. A padded vocabulary, which fills no layer, is copied only at the end."""
        self._load(weights)
        self.finish_weight_update()

    def _receive_patches(self, bucket: BucketUpdate, counts: list[int]) -> None:
        wire = next_broadcast(self._group, bucket.size, self.device)
        parts = zip(bucket.names, bucket.dtypes, bucket.shapes, counts, strict=True)
        patches = [list(part) for part in parts]
        if self.device.type != "cpu":  # in place, outside vLLM's reloading of whole layers
            refuse_rearranged_experts(self.model)
            self._patched = True
            apply_patches(self.model, wire, patches)
            return
        # On a CPU vLLM repacks its parameters, which then have no loader: it gets whole tensors, patched in a
        # copy.
        for name, tensor in unpack(wire, patches):
            old, is_unchanged = self._copy.get(name), tensor.isnan()
            if old is None and is_unchanged.any():
                raise RuntimeError(f"a patch of {name} came before the whole tensor")
            self._copy[name] = tensor.clone() if old is None else tensor.where(~is_unchanged, old)
        self._reload()
        self._load([(name, self._copy[name].clone()) for name in bucket.names])

    def _reload(self) -> None:
        """Begin vLLM's reloading of whole layers, if it has not begun."""
        if not self._reloading:
            if self.device.type == "cpu":
                forget_expert_kernels(self.model)
            name_loaders(self.model)
            initialize_layerwise_reload(self.model)
            self._copies = LoadCopies(self.model)
            self._reloading = True

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights while vLLM reloads."""
        with self._copies:
            self.model.load_weights(weights)

    def shutdown(self) -> None:
        if self._shards is not None:
            self._shards.close()
        self._group = self._store = self._shards = None


def name_loaders(model: torch.nn.Module) -> None:
    """Name the loaders that are partials, such as those of MiniMax-M2's norms.

    vLLM 0.32.0 reads every loader's name when it begins to reload, and a partial has no name.
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def forget_expert_kernels(model: torch.nn.Module) -> None:
    """Make vLLM set up the experts' kernels again when their weights have arrived.

    vLLM 0.32.0 does so only once, and on a CPU it packs the weights there: later weights would be copied
    unpacked over packed ones.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            method.moe_kernel = None


def pack_heads_again(model: torch.nn.Module) -> None:
    """Make vLLM pack the output layers' weights again, because it computes with packed weights on a CPU.

    The weights of a tied output layer arrive under the embeddings' name, so vLLM 0.32.0 would continue with
    the packed copy of the old weights.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def derive_again(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute the forms of weights that attention layers derive and keep.

    Latent attention decodes with two products of `kv_b_proj`, and some kernels read sinks in float32. vLLM
    0.32.0 derives both after it loads a whole model. After patches it would decode with forms of the weights
    with which the server started, and a probe, which is only a prompt, would not show it.
    """
    attention: Iterator[Any] = filter(is_deferred_attention_layer, model.modules())
    for layer in attention:
        layer.process_weights_after_loading(dtype)


def _tensors_in(directory: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in in_weights(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def register() -> None:
    """Called by vLLM in each of its processes."""
    add_model_types()
    bind_stores()
    mend_temperatures()
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Receiver)
