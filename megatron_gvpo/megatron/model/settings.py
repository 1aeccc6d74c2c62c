"""Translates this package's configuration into megatron-core's settings of model and data parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_gvpo.config.schema import FP8Config, ModelConfig, ParallelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_settings(
    model: ModelConfig, parallel: ParallelConfig, on_cpu: bool, deterministic: bool
) -> dict[str, Any]:
    """Return the TransformerConfig's fields that the checkpoint's architecture does not decide."""
    dtype = DTYPES[model.dtype]
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "cp_comm_type": parallel.cp_exchange,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": model.dtype == "bfloat16",
        "fp16": False,
        "attention_dropout": 0.0,  # scoring and training must run the same model
        "hidden_dropout": 0.0,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        "variable_seq_lengths": True,  # packs differ in length between micro-batches
        # As Megatron-LM's own scripts do: a stage keeps no output that it has sent. gloo reads what it sends
        # with virtual stages later, when the memory could be another tensor's.
        "deallocate_pipeline_outputs": not (on_cpu and parallel.vpp > 1),
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "deterministic_mode": deterministic,
        "mtp_num_layers": None,  # layers that predict further tokens are not part of the policy
        # Only the policy's loss trains the router: balancing terms would depend on the layout.
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths requires it, even for dense models
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_bias_update_rate": 0.0,
    }
    if model.fp8 is not None:
        settings |= _fp8_settings(model.fp8)
    if parallel.vpp > 1:  # with gloo, batched communication gave wrong gradients without an error
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if parallel.stage_layers is not None:
        settings["pipeline_model_parallel_layout"] = stages(parallel.stage_layers)
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
    if on_cpu:
        settings |= {
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
    return settings


def _fp8_settings(fp8: FP8Config) -> dict[str, Any]:
    settings: dict[str, Any] = {
        # With one scale a tensor, gradients need the range of e5m2. With a scale a block, e4m3 serves all.
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
