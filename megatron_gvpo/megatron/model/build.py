"""Builds a sharded megatron-core GPTModel from a Hugging Face checkpoint, by Megatron-Bridge."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.fp8_utils import is_float8tensor
from torch.nn import Parameter

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.huggingface.card import facts_of
from megatron_gvpo.huggingface.checked_weights import CheckedWeights
from megatron_gvpo.huggingface.complete_weights import MtpHeads, check_weights
from megatron_gvpo.megatron.adapters.lora import make_adapters
from megatron_gvpo.megatron.attention.core import (
    SharedPromptAttention,
    attends_to_all_before,
    correct_norms,
    defer_rotary,
    for_packs,
    has_plain_rotary,
    rotating_attention,
    with_core_attention,
)
from megatron_gvpo.megatron.attention.packed_layers import rotary_of_latent_attention, with_packed_layers
from megatron_gvpo.megatron.frozen import freeze
from megatron_gvpo.megatron.model.megatron_bridge import open_bridge
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.model.routers import RouterHooks, limit_groups, routing_settings
from megatron_gvpo.megatron.model.settings import (
    check_exchange,
    correct_marks,
    ddp_settings,
    fuse_weight_gradients,
    fusions,
    has_yarn,
    model_settings,
    rotary_settings,
)
from megatron_gvpo.megatron.muon import wrap
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.vision import (
    VisionInputs,
    has_vision,
    local_vision,
    rotates_packs,
    vision_settings,
)
from megatron_gvpo.settings.parallel import Padding, ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

log = logging.getLogger(__name__)

# Modules that megatron-core (0.19.2) can recompute only with Transformer Engine.
_NEED_TRANSFORMER_ENGINE = {"layernorm", "mla_up_proj", "moe_act"}


def build(
    model: ModelConfig,
    parallel: ParallelConfig,
    deterministic: bool = False,
    trained: bool = True,
    before_wrapping: Callable[[list[Any]], list[Any]] | None = None,
    replays: bool = False,
    share_prompts: bool | Literal["auto"] = False,
    key: str = "model.path",
    seed: int = 0,
    muon: bool = False,
) -> Model:
    """Build the sharded model with the checkpoint's weights; `trained`: with gradient buffers.

    `before_wrapping` may change the chunks after their weights are loaded, before Megatron wraps them.
    `replays`: the routers follow `TrainBatch.routing`. `share_prompts`: a group's prompt is computed once;
    auto: on a CPU, if the model's attention and the layout allow it. `key`: the user's key or option for the
    directory. `seed`: of new adapters, which exclude `before_wrapping`. `muon`: for an optimizer that needs
    matrices as a whole.

    Raises ConfigError for weights that are not exactly the model's, damaged or not finite, for a model that
    Megatron-Bridge does not know, for settings that Megatron refuses, and for settings that this machine
    cannot run.
    """
    on_cpu = not torch.cuda.is_available()
    # Megatron prints every size, and Megatron-Bridge draws progress bars of its own.
    with megatron_device(), redirect_stdout(io.StringIO()):
        bridge = open_bridge(model, key)
        provider = _provider(bridge, model, key)
        hf_config = bridge.hf_pretrained.config
        heads = _checked_weights(model, key, provider, hf_config, trained)
        image_processor = _image_processor(model.path) if has_vision(hf_config) else None
        _configure(provider, hf_config, model, parallel, deterministic, replays, share_prompts is True)
        _check_machine(model, parallel, on_cpu)
        adapters = make_adapters(model, hf_config, seed, bridge)
        if adapters is not None:
            assert before_wrapping is None, "adapters on a model that is changed otherwise"
            before_wrapping = partial(adapters.apply, trained=trained)
        own_attention = on_cpu or share_prompts is True or _rotates_in_attention(provider, hf_config)
        # a critic trains all of its weights
        frozen = model.freeze if trained and before_wrapping is None else ()
        preparation = _Preparation(
            bridge, model, key, own_attention, image_processor, before_wrapping, frozen
        )
        chunks = _make_chunks(provider, model, parallel, trained, preparation, muon)
    can_share = bool(preparation.rotary) and attends_to_all_before(chunks[0].config)
    obstacle = ""
    if share_prompts == "auto":
        obstacle = _obstacle_to_sharing(on_cpu, can_share, replays, parallel.cp)
    elif share_prompts:
        _check_sharing(can_share, f"{key}={model.path}")
    return Model(
        chunks=chunks,
        config=chunks[0].config,
        bridge=bridge,
        vocab_size=int(hf_config.get_text_config().vocab_size),
        facts=facts_of(hf_config.to_dict()),
        padding=Padding.of(model, parallel),
        local=on_cpu,
        overlaps_param_gather=trained and parallel.overlap_param_gather,
        own_attention=own_attention,
        rotary=preparation.rotary,
        latent_rotary=rotary_of_latent_attention(chunks),
        share_prompts=share_prompts is not False and not obstacle,
        obstacle_to_sharing=obstacle,
        replay=RouterHooks(chunks) if replays else None,
        adapters=adapters,
        vision=preparation.vision[0] if preparation.vision else None,
        heads=heads,
    )


def _check_sharing(can_share: bool, model: str) -> None:
    """Raises ConfigError for train.share_prompts=true where a prompt cannot be shared."""
    if not can_share:
        raise ConfigError(
            f"train.share_prompts=true is not possible here: the attention of {model} is not a "
            "plain softmax over all tokens before, or its positions are not plain rotary ones; leave it out"
        )


def _obstacle_to_sharing(on_cpu: bool, can_share: bool, replays: bool, cp: int) -> str:
    """The reason for which train.share_prompts=auto repeats prompts; empty if it shares them."""
    if not on_cpu:
        return "no GPU has run it yet; train.share_prompts=true tries it"
    if not can_share:
        return "the model's attention is not a plain softmax over all tokens before, with rotary positions"
    if replays:
        return "rollout.router_replay=true: responses may have routed the tokens of a prompt differently"
    return f"parallel.cp={cp} cuts every sequence by itself" if cp > 1 else ""


def _checked_weights(model: ModelConfig, key: str, provider: Any, hf_config: Any, trained: bool) -> MtpHeads:
    """The result of `check_weights`, with a warning about extra heads of a model that trains."""
    heads = check_weights(Path(model.path), key, hf_config, provider.share_embeddings_and_output_weights)
    if heads and trained and dist.get_rank() == 0:
        log.warning("%s=%s", key, heads)
    return heads


def _rotates_in_attention(provider: Any, hf_config: Any) -> bool:
    """Return True if a GPU's core attention rotates a pack at once; megatron-core's way waits for the GPU."""
    return has_yarn(provider) or rotates_packs(hf_config)


def _provider(bridge: Any, model: ModelConfig, key: str) -> Any:
    """Return Megatron-Bridge's provider, a TransformerConfig that can build the model."""
    try:
        return bridge.to_megatron_provider(load_weights=False)
    except ValueError as error:  # raised for an activation that Megatron-Bridge does not know, for example
        raise ConfigError(f"{key}={model.path}: Megatron-Bridge refuses config.json: {error}") from None


def _configure(
    provider: Any,
    hf_config: Any,
    model: ModelConfig,
    parallel: ParallelConfig,
    deterministic: bool,
    replays: bool,
    share_prompts: bool,
) -> None:
    """Set the fields that the checkpoint does not decide, and the layers that this machine computes."""
    on_cpu = not torch.cuda.is_available()
    text_config = hf_config.get_text_config()
    settings = {} if on_cpu else fusions(provider)
    settings |= model_settings(model, parallel, on_cpu, deterministic)
    settings |= routing_settings(text_config) | rotary_settings(text_config)
    settings |= vision_settings(hf_config) if has_vision(hf_config) else {}
    for name, value in settings.items():
        setattr(provider, name, value)
    if replays:  # the fused router has no hook for replay
        provider.moe_router_fusion = False
    if on_cpu:
        from megatron_gvpo.megatron.cpu.spec import local_spec

        provider.transformer_layer_spec = local_spec(provider.transformer_layer_spec)
    elif share_prompts or _rotates_in_attention(provider, hf_config):
        core_attention = SharedPromptAttention if share_prompts else rotating_attention()
        provider.transformer_layer_spec = with_core_attention(provider.transformer_layer_spec, core_attention)
    elif text_config.model_type == "exaone4":
        provider.transformer_layer_spec = for_packs(provider.transformer_layer_spec)
    if provider.multi_latent_attention or provider.experimental_attention_variant == "gated_delta_net":
        provider.transformer_layer_spec = with_packed_layers(provider.transformer_layer_spec)
    provider.transformer_layer_spec = limit_groups(text_config, provider.transformer_layer_spec)
    try:
        provider.finalize()
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron refuses the configuration of model and parallel: {error}") from None


@dataclass
class _Preparation:
    """Changes the chunks between their creation and Megatron's wrapping."""

    bridge: Any
    settings: ModelConfig
    key: str  # the user's key for the model's directory
    own_attention: bool  # the layers have this package's core attention
    image_processor: ImageProcessor | None  # None: the model takes no images
    before_wrapping: Callable[[list[Any]], list[Any]] | None
    frozen: tuple[str, ...]  # patterns of names of weights that do not train
    rotary: list[Any] = field(default_factory=list)  # taken out of the chunks; see `Model.rotary`
    vision: list[VisionInputs] = field(default_factory=list)  # one for each chunk

    def __call__(self, chunks: list[Any]) -> list[Any]:
        correct_marks(chunks)
        correct_norms(chunks)
        if self.image_processor is not None:  # the model rotates by the pack's positions itself
            hf_config = self.bridge.hf_pretrained.config
            for chunk in chunks:
                inputs = VisionInputs(chunk, hf_config, self.image_processor, self.settings.train_vision)
                self.vision.append(inputs)
        elif self.own_attention and all(has_plain_rotary(chunk) for chunk in chunks):
            self.rotary.extend(defer_rotary(chunk) for chunk in chunks)
        if self.frozen:
            freeze(chunks, self.frozen)
        if self.before_wrapping is None:
            return chunks
        self.load_weights(chunks)
        return self.before_wrapping(chunks)

    def load_weights(self, chunks: list[Any]) -> None:
        """Load the checkpoint's weights, and compare them with their checksums. Raises ConfigError."""
        checked = CheckedWeights(self.bridge.hf_pretrained.state.source, Path(self.settings.path), self.key)
        with loaded_in_full_precision(chunks):
            self.bridge.load_hf_weights(chunks)
        checked.finish()


def _make_chunks(
    provider: Any,
    model: ModelConfig,
    parallel: ParallelConfig,
    trained: bool,
    preparation: _Preparation,
    muon: bool,
) -> list[Any]:
    """Return the chunks with the checkpoint's weights, wrapped for data parallelism if they are trained."""
    on_cpu = not torch.cuda.is_available()
    with ExitStack() as stand_ins:
        if on_cpu:
            from megatron_gvpo.megatron.cpu.device import attention_flags_kept

            stand_ins.enter_context(attention_flags_kept())
        if on_cpu and preparation.image_processor is not None:
            stand_ins.enter_context(local_vision(type(preparation.bridge._model_bridge), provider))
        chunks: list[Any] = provider.provide_distributed_model(
            ddp_config=ddp_settings(model, parallel),
            wrap_with_ddp=trained and not muon,
            bf16=model.dtype == "bfloat16",
            fp16=False,
            use_cpu_initialization=on_cpu,
            pre_wrap_hook=preparation,
        )
        if trained and muon:
            chunks = wrap(chunks, ddp_settings(model, parallel))
    if preparation.before_wrapping is None:
        preparation.load_weights(chunks)
    if trained:
        fuse_weight_gradients(chunks)
        no_sync = [chunk.no_sync for chunk in chunks]
        provider.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
        chunks[0].config.finalize_model_grads_func = finalize_model_grads
    return chunks


def _image_processor(path: str) -> ImageProcessor:
    """Raise ConfigError if the directory has no image processor that can be read."""
    try:
        return ImageProcessor(path)
    except ImageError as error:
        raise ConfigError(str(error)) from None


def _check_machine(model: ModelConfig, parallel: ParallelConfig, on_cpu: bool) -> None:
    """Raise ConfigError for settings that cannot run here."""
    if on_cpu:
        _refuse_on_cpu(model, parallel)
    else:
        _refuse_on_gpu(parallel)
    check_exchange(model, parallel, on_cpu)


def _refuse_on_gpu(parallel: ParallelConfig) -> None:
    """Raise ConfigError for settings that Transformer Engine cannot run in this environment."""
    if parallel.offload_modules and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1":
        raise ConfigError(
            f"parallel.offload_modules={list(parallel.offload_modules)}: Transformer Engine would also move "
            "weights, unless NVTE_CPU_OFFLOAD_V1=1 is in the environment when it is imported: set the "
            "variable before Python starts, as the command megatron-gvpo does"
        )


def _refuse_on_cpu(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for settings that need a GPU, after Megatron has accepted them."""
    if model.fp8 is not None:
        raise ConfigError(
            f"model.fp8.recipe={model.fp8.recipe}: FP8 needs a GPU with Transformer Engine, and there is "
            "none here; Megatron accepts the configuration"
        )
    for name in ("offload_layers", "offload_modules"):
        if value := parallel.model_dump(mode="json")[name]:
            raise ConfigError(
                f"parallel.{name}={value}: Transformer Engine moves activations from a GPU to the host, and "
                "there is no GPU here; Megatron accepts the configuration"
            )
    if refused := sorted(_NEED_TRANSFORMER_ENGINE & set(parallel.recompute_modules)):
        raise ConfigError(
            f"parallel.recompute_modules={refused}: Megatron recomputes these only with Transformer Engine, "
            "on a GPU, and there is none here; Megatron accepts the configuration"
        )


# Weights that are kept in FP8 (`model.fp8.weights`): plain tensors replace them where values must be exact.


@contextmanager
def plain_weights(chunks: list[Any]) -> Iterator[list[tuple[Parameter, Parameter]]]:
    """Context in which the modules have a plain parameter of zeros in place of each one in FP8.

    It yields pairs (plain parameter, FP8 parameter). The plain parameters have the attributes of those in
    FP8, such as `main_grad`.
    """
    in_fp8 = [
        (module, name, weight)
        for chunk in chunks
        for module in chunk.modules()
        for name, weight in module.named_parameters(recurse=False)
        if is_float8tensor(weight)
    ]
    pairs = []
    for module, name, weight in in_fp8:
        plain = Parameter(torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device))
        vars(plain).update({key: value for key, value in vars(weight).items() if not key.startswith("_")})
        pairs.append((weight, plain))
        module._parameters[name] = plain
    try:
        yield pairs
    finally:
        for module, name, weight in in_fp8:
            module._parameters[name] = weight


@contextmanager
def loaded_in_full_precision(chunks: list[Any]) -> Iterator[None]:
    """Context in which weights are loaded: the model keeps them in FP8, and the optimizer gets them exactly.

    Megatron's optimizer copies such weights from the random values with which Transformer Engine initialized
    them. Without this context the first update would make these random numbers the weights.
    """
    with plain_weights(chunks) as pairs:
        yield
    with torch.no_grad():
        for weight, plain in pairs:
            weight.copy_(plain)
            if hasattr(weight, "get_high_precision_init_val"):
                weight.get_high_precision_init_val().copy_(plain)
