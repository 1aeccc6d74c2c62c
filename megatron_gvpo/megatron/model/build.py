"""A megatron-core GPTModel from a Hugging Face checkpoint, and back, by Megatron-Bridge."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_gvpo.config.parallel_layout import Padding
from megatron_gvpo.config.schema import ConfigError, ModelConfig, ParallelConfig
from megatron_gvpo.megatron.checkpoint.complete_weights import check_weights
from megatron_gvpo.megatron.model.fusions import fuse_weight_gradients, fusions
from megatron_gvpo.megatron.model.group_limited_router import limit_groups, routing_settings
from megatron_gvpo.megatron.model.router_replay import Replay
from megatron_gvpo.megatron.model.settings import DTYPES, ddp_settings, model_settings
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.versions import REFERENCE

_TRANSFORMER_ENGINES = {"layernorm", "mla_up_proj", "moe_act"}  # without it, megatron-core 0.19.2 fails


@dataclass
class Model:
    """The chunks of the model on this rank (one, without virtual pipeline stages)."""

    chunks: list[Any]
    config: Any  # megatron-core's TransformerConfig
    bridge: Any
    vocab_size: int  # without the padding that tensor parallelism adds
    padding: Padding  # of every pack
    local: bool  # on CPU, with the local layers
    overlaps_param_gather: bool  # an update leaves other ranks' shards of the weights as they were
    rotary: list[Any]  # one a chunk where the local attention applies RoPE; else empty
    share_prompts: bool = False  # a group's prompt is computed once
    replay: Replay | None = None  # rows may say through which experts they go
    _background_work: list[Callable[[], None]] = field(default_factory=list)

    def add_background_work(self, wait: Callable[[], None]) -> None:
        """Register work that reads the weights in the background; `wait` waits for its end."""
        self._background_work.append(wait)

    def finish_background_work(self) -> None:
        """To be called on every rank before weights or optimizer change: a save may be reading them, and a
        gather that no module has waited for may be writing them.

        Raises CheckpointError where that save failed.
        """
        while self._background_work:
            self._background_work.pop()()
        if self.overlaps_param_gather:
            # A gather that outlived the change would be taken for one of the changed weights.
            with megatron_device(), torch.no_grad():
                for group in self._bucket_groups():
                    if group.param_gather_handle is not None:
                        group.start_param_sync(force_sync=True)  # waits for it, and starts none

    def finish_param_gather(self) -> None:
        """Make this rank's weights the newest: with overlap_param_gather, an update leaves that for later.

        To be called on every rank, before weights are read other than by a forward pass. A bucket whose
        gather is under way is waited for, which suffices: `finish_background_work` lets none outlive an update.
        Every other bucket is gathered.
        """
        if self.overlaps_param_gather:
            with megatron_device(), torch.no_grad():
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)

    def _bucket_groups(self) -> Iterator[Any]:
        """Those of Megatron's buckets that are communicated together, in all chunks."""
        for chunk in self.chunks:
            yield from [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]

    def export(self, on_host: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every weight, in a fixed order, on the CPU or where they are.

        A collective: every rank must iterate it to the end; every rank gets every tensor.
        """
        self.finish_param_gather()
        with megatron_device(), torch.no_grad():
            for name, tensor in self.bridge.export_hf_weights(self.chunks, cpu=on_host, show_progress=False):
                if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    tensor = tensor[: self.vocab_size]
                yield name, tensor

    def weights(self) -> Iterator[Tensor]:
        """This rank's parameters."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def gradient_buffers(self) -> Iterator[Tensor]:
        """What Megatron's data parallelism sums this rank's gradients in."""
        for chunk in self.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield buffer.grad_data

    def save_hf(self, directory: Path, shard_bytes: int = 5 << 30) -> None:
        """Write a Hugging Face checkpoint of the present weights: config.json and safetensors.

        A collective; rank 0 writes, and holds at most `shard_bytes` and one tensor more. Where it cannot
        write, it alone raises, in the end: until then it goes on with the tensors that all ranks gather.
        """
        problem: Exception | None = None
        writer = _SafetensorsWriter(directory, shard_bytes) if dist.get_rank() == 0 else None
        for name, tensor in self.export():
            if writer is not None and problem is None:
                try:
                    writer.add(name, tensor)
                except (OSError, SafetensorError) as error:
                    problem = error
        if problem is not None:
            raise problem
        if writer is not None:
            writer.close()
            self.bridge.hf_pretrained.config.save_pretrained(directory)


class _SafetensorsWriter:
    """Streams tensors into model-*.safetensors with their index, as transformers reads them."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._directory, self._limit = directory, shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._shard and self._bytes + tensor.nbytes > self._limit:
            self._flush()
        self._shard[name] = tensor.clone().contiguous()
        self._bytes += tensor.nbytes

    def close(self) -> None:
        self._flush()
        count = len(self._names)
        if count == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, file in enumerate(files):
            self._path(i).rename(self._directory / file)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: files[i] for i, names in enumerate(self._names) for name in names},
        }
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        save_file(self._shard, self._path(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._shard))
        self._total += self._bytes
        self._shard, self._bytes = {}, 0

    def _path(self, shard: int) -> Path:
        return self._directory / f"shard-{shard}.safetensors"


def build(
    model: ModelConfig,
    parallel: ParallelConfig,
    deterministic: bool = False,
    trained: bool = True,
    before_wrapping: Callable[[list[Any]], list[Any]] | None = None,
    replays: bool = False,
    key: str = "model.path",
) -> Model:
    """Build the sharded model with the checkpoint's weights; `trained`: with room for gradients, too.

    `replays`: its routers heed `TrainBatch.routing`. `before_wrapping` may change the chunks, which have
    their weights, before Megatron wraps them. `key`: where the user gave its directory.

    Raises ConfigError for weights that are not exactly the model's, and for what Megatron-Bridge does not
    know, Megatron refuses, or the machine lacks.
    """
    # Megatron prints every size, and Megatron-Bridge draws progress bars of its own.
    with megatron_device(), contextlib.redirect_stdout(io.StringIO()):
        bridge = _bridge(model)
        provider = bridge.to_megatron_provider(load_weights=False)
        on_cpu = not torch.cuda.is_available()
        hf_config = bridge.hf_pretrained.config
        tied = provider.share_embeddings_and_output_weights
        check_weights(Path(model.path), key, hf_config, tied)
        settings = {} if on_cpu else fusions(provider)
        settings |= model_settings(model, parallel, on_cpu, deterministic) | routing_settings(hf_config)
        for name, value in settings.items():
            setattr(provider, name, value)
        if replays:  # the fused router asks nobody
            provider.moe_router_fusion = False
        if on_cpu:
            from megatron_gvpo.megatron.cpu.spec import local_block_spec

            provider.transformer_layer_spec = local_block_spec
        provider.transformer_layer_spec = limit_groups(hf_config, provider.transformer_layer_spec)
        try:
            provider.finalize()
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"Megatron refuses the configuration of model and parallel: {error}") from None
        if on_cpu:
            _refuse_on_cpu(model, parallel)
        elif parallel.offload_modules and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1":
            raise ConfigError(
                f"parallel.offload_modules={list(parallel.offload_modules)}: Transformer Engine would move "
                "weights, too, unless NVTE_CPU_OFFLOAD_V1=1 is in the environment when it is imported: set "
                "it before Python starts, as the command megatron-gvpo does"
            )
        rotary: list[Any] = []

        def prepare(chunks: list[Any]) -> list[Any]:
            if on_cpu and not provider.multi_latent_attention:  # which rotates a part of each head by itself
                from megatron_gvpo.megatron.cpu.packed_attention import defer_rotary

                rotary.extend(defer_rotary(chunk) for chunk in chunks)
            if before_wrapping is None:
                return chunks
            bridge.load_hf_weights(chunks)
            return before_wrapping(chunks)

        chunks = provider.provide_distributed_model(
            ddp_config=ddp_settings(model, parallel),
            wrap_with_ddp=trained,
            bf16=model.dtype == "bfloat16",
            fp16=False,
            use_cpu_initialization=on_cpu,
            pre_wrap_hook=prepare,
        )
        if before_wrapping is None:
            bridge.load_hf_weights(chunks)
        if trained:
            fuse_weight_gradients(chunks)
            no_sync = [chunk.no_sync for chunk in chunks]
            provider.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        vocab_size = int(hf_config.vocab_size)
    padding = Padding.of(model, parallel)
    late = trained and parallel.overlap_param_gather
    replay = Replay(chunks) if replays else None
    return Model(chunks, chunks[0].config, bridge, vocab_size, padding, on_cpu, late, rotary, replay=replay)


def _refuse_on_cpu(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError for what only a GPU can do, when all that would be done on one has been checked."""
    if model.fp8 is not None:
        raise ConfigError(
            f"model.fp8.recipe={model.fp8.recipe}: FP8 needs a GPU with Transformer Engine, and there is "
            "none here; Megatron accepts the configuration"
        )
    for name in ("offload_layers", "offload_modules"):
        if given := parallel.model_dump(mode="json")[name]:
            raise ConfigError(
                f"parallel.{name}={given}: Transformer Engine moves activations from a GPU to the host, and "
                "there is no GPU here; Megatron accepts the configuration"
            )
    if engines := sorted(_TRANSFORMER_ENGINES & set(parallel.recompute_modules)):
        raise ConfigError(
            f"parallel.recompute_modules={engines}: Megatron recomputes these with Transformer Engine "
            "alone, on a GPU, and there is none here; it accepts the configuration"
        )


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Megatron-Bridge (0.6.2) imports megatron.training, which sends all that is logged from INFO on to what
    stdout is at that moment: nobody would see this program's warnings.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _bridge(model: ModelConfig) -> Any:
    try:
        with _root_logger_kept():
            if torch.cuda.is_available():
                import megatron.bridge as bridge
            else:
                from megatron_gvpo.megatron.cpu.bridge import import_bridge

                bridge = import_bridge()
    except ImportError as error:
        raise ImportError(
            f"Megatron-Bridge cannot be imported ({error}). Install it with "
            f"`pip install --no-deps megatron-bridge=={REFERENCE['megatron-bridge']}`; its declared "
            "dependencies clash with transformers 5, and none of the others is needed"
        ) from error
    os.environ.setdefault("HF_HUB_OFFLINE", "1" if os.path.isdir(model.path) else "0")
    try:
        return bridge.AutoBridge.from_hf_pretrained(model.path, dtype=DTYPES[model.dtype])
    except ValueError as error:
        raise ConfigError(
            f"model.path={model.path}: Megatron-Bridge cannot build this model: {error}"
        ) from None
