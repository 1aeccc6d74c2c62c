"""Translates this package's configuration into megatron-core's settings of model and data parallelism."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_model_config

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import PARTLY_ROTATED
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import FP8Config, ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_settings(
    model: ModelConfig, parallel: ParallelConfig, on_cpu: bool, deterministic: bool
) -> dict[str, Any]:
    """Return the TransformerConfig's fields that the checkpoint's architecture does not decide."""
    settings: dict[str, Any] = {
        "bf16": model.dtype == "bfloat16",
        "fp16": False,
        "params_dtype": DTYPES[model.dtype],
        "attention_dropout": 0.0,  # scoring and training must run the same model
        "hidden_dropout": 0.0,
        "attention_backend": AttnBackend.auto,  # Megatron-Bridge has Gemma's set to flash-attn alone
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        "variable_seq_lengths": True,  # packs differ in length between micro-batches
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "deterministic_mode": deterministic,
        "mtp_num_layers": None,  # layers that predict further tokens are not part of the policy
        # Only the policy's loss trains the router: balancing terms would depend on the layout.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_bias_update_rate": 0.0,
    }
    settings |= _parallel_settings(parallel, DTYPES[model.dtype], on_cpu) | _memory_settings(parallel)
    settings |= exchange_settings(parallel)
    if model.fp8 is not None:
        settings |= _fp8_settings(model.fp8)
    return settings | _CPU_SETTINGS if on_cpu else settings


_CPU_SETTINGS = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
}


def _parallel_settings(parallel: ParallelConfig, dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    """Return the sizes of the parallel groups, and how pipeline stages communicate."""
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "cp_comm_type": parallel.cp_exchange,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_dtype": dtype,
        # As Megatron-LM's own scripts do: a stage keeps no output that it has sent. With virtual stages gloo
        # reads sent tensors later, when the memory could belong to another tensor.
        "deallocate_pipeline_outputs": not (on_cpu and parallel.vpp > 1),
        # Against a fault of old releases of torch, stages would wait for the whole GPU after every message.
        "batch_p2p_sync": False,
    }
    if parallel.vpp > 1:  # with gloo, batched communication gave wrong gradients without an error
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if parallel.stage_layers is not None:
        settings["pipeline_model_parallel_layout"] = stages(parallel.stage_layers)
    return settings


def _memory_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the settings of activations that are recomputed, or moved to the host until the backward."""
    settings: dict[str, Any] = {}
    if parallel.recompute == "full":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if parallel.recompute_layers is None else "block",
            "recompute_num_layers": parallel.recompute_layers or 1,
        }
    elif parallel.recompute == "selective":
        settings |= {
            "recompute_granularity": "selective",
            "recompute_modules": list(parallel.recompute_modules),
        }
        if "shared_experts" in parallel.recompute_modules:
            # megatron-core refuses both together. Megatron-Bridge turns the overlap on in DeepSeek's
            # families.
            settings["moe_shared_expert_overlap"] = False
    if parallel.offload_layers:
        settings |= {
            "cpu_offloading": True,
            "cpu_offloading_num_layers": parallel.offload_layers,
            "cpu_offloading_weights": False,
        }
    if parallel.offload_modules:
        settings |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": list(parallel.offload_modules),
        }
    return settings


def _fp8_settings(fp8: FP8Config) -> dict[str, Any]:
    settings: dict[str, Any] = {
        # With one scale for a tensor, gradients need the range of e5m2. With a scale for each block, e4m3 is
        # enough.
        "fp8": "hybrid" if fp8.recipe == "tensorwise" else "e4m3",
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.weights,
    }
    if fp8.bf16_layers:
        settings |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": fp8.bf16_layers,
            "num_layers_at_end_in_bf16": fp8.bf16_layers,
        }
    return settings


def stages(layers: tuple[int, ...]) -> list[list[str]]:
    """Return megatron-core's pipeline layout for stages with these numbers of layers, first to last."""
    layout = [["decoder"] * count for count in layers]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def ddp_settings(model: ModelConfig, parallel: ParallelConfig) -> DistributedDataParallelConfig:
    """Sum gradients in fp32 and shard them, with the optimizer, over the data-parallel ranks."""
    return DistributedDataParallelConfig(
        fp8_param_gather=model.fp8 is not None and model.fp8.weights,
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )


def rotary_settings(hf_config: Any) -> dict[str, Any]:
    """Return the TransformerConfig's field for the share of a head that is rotated, if only a part is.

    `hf_config`: of the language model. Megatron-Bridge (0.6.2) reads the share at the top of config.json, or
    takes MiniMax-M2's from `rotary_dim`. transformers 5 writes it in `rope_parameters` alone.
    """
    if not set(hf_config.architectures or ()) & set(PARTLY_ROTATED):
        return {}
    return {"rotary_percent": hf_config.rope_parameters.get("partial_rotary_factor", 1.0)}


def fusions(architecture: Any) -> dict[str, Any]:
    """Return the fields that turn on fused GPU kernels, which Megatron-Bridge leaves off for most families.

    `architecture` is Megatron-Bridge's provider.
    """
    settings: dict[str, Any] = {}
    # Without it megatron-core (0.19.2) rotates a pack sequence by sequence, and waits for the GPU to return
    # the lengths twice in every layer, for queries and for keys.
    is_latent = architecture.multi_latent_attention
    plain = architecture.position_embedding_type == "rope" and not is_latent
    if plain or (is_latent and _has_fused_latent_rotation(architecture)):
        settings["apply_rope_fusion"] = True
    if architecture.gated_linear_unit and architecture.activation_func is F.silu:
        settings["bias_activation_fusion"] = True  # also keeps only the activation's input for the backward
    # The two of Transformer Engine's rules that the emulated GPU computes; `build` undoes it for replay, and
    # `routing_settings` for a model whose groups are ranked by another rule.
    if architecture.num_moe_experts and architecture.moe_router_score_function in ("softmax", "sigmoid"):
        settings["moe_router_fusion"] = True
    return settings


def _has_fused_latent_rotation(architecture: Any) -> bool:
    """Return True if megatron-core's fused rotation of latent attention can serve the model.

    The fused operation implements only YaRN. Its blocks are powers of two: other head dimensions do not
    compile, and with another number of heads it would write beyond the last one (megatron-core 0.19.2;
    GLM-4.7-Flash has 20).
    """
    sizes = ("num_attention_heads", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    are_powers = all((size := getattr(architecture, name)) & (size - 1) == 0 for name in sizes)
    return architecture.rope_type == "yarn" and are_powers


def has_yarn(architecture: Any) -> bool:
    """Return True if queries and keys of ordinary attention are rotated and scaled by YaRN (GPT-OSS)."""
    return architecture.position_embedding_type == "yarn" and not architecture.multi_latent_attention


def fuse_weight_gradients(chunks: Iterable[Any]) -> None:
    """Let Transformer Engine's linear layers add their weights' gradients to Megatron's fp32 buffers.

    The matrix product then adds the gradient itself. Otherwise every micro-batch's gradient is rounded to
    bf16, written, and added by another kernel. megatron-core's own switch, gradient_accumulation_fusion, also
    applies to its own linear layers. With it, megatron-core (0.19.2) refuses to build the output layer
    without an extension of Apex, although the fused head computes that layer's gradient.
    """
    for chunk in chunks:
        for module in chunk.modules():
            is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            # Only Transformer Engine's linear layers have it; weights under adapters have no such buffers.
            if is_trained and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def correct_marks(chunks: Iterable[Any]) -> None:
    """Correct marks of megatron-core (0.19.2) on parameters before it wraps the chunks.

    megatron-core uses these marks to decide over which ranks it sums a gradient. In GPT-OSS two marks are
    wrong.

    A tensor-parallel rank has the attention sinks of its own heads, and they are not marked as such: the norm
    that clips the gradient would count the first rank's sinks only (Megatron-LM issue 7452, finding 8).

    Biases of experts are marked as those behind sequence-parallel layers, whose gradients are summed over the
    tensor-parallel ranks. But experts have data-parallel groups of their own, which sum them already.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".softmax_offset"):
                parameter.tensor_model_parallel = True
                parameter.partition_dim = 0
                parameter.partition_stride = 1
            is_expert = not getattr(parameter, "allreduce", True)  # only linear layers have this attribute
            if is_expert and getattr(parameter, "sequence_parallel", False):
                parameter.sequence_parallel = False


@contextlib.contextmanager
def offloaded_activations(chunks: list[Any], forward_only: bool) -> Iterator[None]:
    """Context for one pass in which chosen modules' activations are in host memory until the backward.

    It does nothing if `parallel.offload_modules` is empty.

    Megatron (0.19.2) makes a plan in the first pass, for its number of micro-batches and the order of their
    backward passes, and keeps a pinned buffer for every shape. Here, micro-batches differ from update to
    update, and scoring has no backward pass. So every training pass starts a new plan, and leaves nothing but
    pinned memory that PyTorch's allocator reuses.
    """
    configs = [get_model_config(chunk) for chunk in chunks]
    if not configs[0].offload_modules:
        yield
        return
    for config in configs:
        config.fine_grained_activation_offloading = not forward_only
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints a table after a first pass
            yield
    finally:
        if not forward_only:
            Offloading.reset_instance()


def exchange_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the TransformerConfig's fields that choose megatron-core's dispatcher (parallel.ep_exchange).

    The dispatcher decides how tokens reach the experts of other ranks. All-to-all sends a token once for each
    of its experts. DeepEP's kernels send it once for each rank that has some of them, and add up the results
    of that rank's experts there.
    """
    if parallel.ep_exchange == "a2a":
        # Dense models also need a value, although they have no experts.
        return {"moe_token_dispatcher_type": "alltoall"}
    return {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_router_dtype": "fp32",  # DeepEP sends only weights of this dtype
        "moe_shared_expert_overlap": False,  # as Megatron-Bridge sets it beside this dispatcher
    }


def check_exchange(model: ModelConfig, parallel: ParallelConfig, on_cpu: bool) -> None:
    """Raise ConfigError if DeepEP is chosen and this machine, or the dtype, cannot have it."""
    if parallel.ep_exchange == "a2a":
        return
    here = "parallel.ep_exchange=deepep"
    if on_cpu:
        raise ConfigError(f"{here}: DeepEP's kernels need GPUs, and there is none here; leave it out")
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"{here}: DeepEP adds up experts' outputs in bfloat16 only, not model.dtype={model.dtype}"
        )
    from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP

    if not HAVE_DEEP_EP:
        raise ConfigError(
            f"{here}: megatron-core cannot import DeepEP 1.2 here (DeepEP 2 lacks utils.EventOverlap): "
            "install it as docker/trainer.Dockerfile does, or leave the key out"
        )
