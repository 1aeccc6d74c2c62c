"""Every function of Transformer Engine's extension has a reference, only answers, or is refused by name.

A new release that calls something else fails here with the function's name.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from helpers import on_null_cuda

from megatron_gvpo.emulation.transformer_engine.install import QUESTIONS
from megatron_gvpo.emulation.transformer_engine.references import TABLE
from megatron_gvpo.rehearsal import transformer_engine

# Transformer Engine calls these for things that this project lacks: each raises when called, with its name.
REFUSED = {
    # NVFP4, and mxfp8 weights that the distributed optimizer casts
    *("mxfp8_scaling_compute_partial_amax", "mxfp8_scaling_partial_cast", "newton_schulz"),
    *("cusolvermp_ctx_create", "cusolvermp_ctx_destroy", "multi_tensor_compute_scale_inv_e8m0"),
    # tensors of all experts in one, and the fused multilayer perceptron of experts
    *("group_quantize", "group_dequantize", "group_requantize_inplace", "bgrad_group_quantize"),
    *("grouped_swizzle_for_gemm", "swizzle_scales_for_gemm_", "multi_tensor_swizzle_scales_for_gemm_"),
    *("multi_tensor_swizzle_scales_for_gemm_unchecked_", "te_general_grouped_gemm_for_grouped_tensor"),
    *("te_general_grouped_gemm_for_discrete_in", "te_general_grouped_gemm_for_discrete_out"),
    *("group_scaled_swiglu", "group_scaled_clamped_swiglu", "splits_to_offsets", "splits_to_offsets_multi"),
    *("copy_data_ptrs_to_device", "scaled_clamped_swiglu", "scaled_clamped_dswiglu", "scaled_srelu"),
    *("scaled_dsrelu", "scaled_situglu", "scaled_dsituglu", "situglu", "dsituglu"),
    # userbuffers, NVSHMEM
    *("bulk_overlap_ag_with_external_gemm", "init_nvshmem_backend", "create_nvshmem_tensor"),
    "nvshmem_send_on_current_stream",
    *("nvshmem_wait_on_current_stream", "nvshmem_finalize"),
    # permutation by compiled kernels: megatron-core's are in Triton
    *("moe_permute_fwd", "moe_permute_bwd", "moe_unpermute_fwd", "moe_unpermute_bwd"),
    # losses and quantiles that balance the experts: the policy's loss alone trains the router
    "fused_topk_with_score_function_qb_fwd",
    *("fused_score_for_moe_aux_loss_fwd", "fused_score_for_moe_aux_loss_bwd", "fused_moe_aux_loss_fwd"),
    *("fused_moe_aux_loss_fwd_graph_safe", "fused_moe_aux_loss_bwd"),
    # attention in FP8, by FlashAttention, with dropout, or with a cache; softmax by itself
    *("fa_prepare_fwd", "fa_prepare_bwd", "copy_to_kv_cache", "dropout_fwd", "dropout_bwd"),
    *("multi_tensor_transpose_to_bhsd", "multi_tensor_pad_last_dim"),
    *("fused_qkv_rope_forward", "fused_qkv_rope_backward"),
    # other optimizers
    *("multi_tensor_adam_fp8", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"),
    "multi_tensor_sgd",
}
REFUSED_FAMILIES = re.compile(r"nvfp4_\w+|scaled_\w*softmax_(forward|backward)")
# Names that its Python mentions and this build has not: experts over NCCL, fallbacks, examples in comments.
ABSENT = re.compile(r"ep_\w+|LayerNorm|gemm_inf|layernorm|(mx)?fp8_(cs_)?(de)?quantize")
CODE = """
import torch
import transformer_engine.pytorch
import transformer_engine_torch as extension
from megatron_gvpo.emulation.transformer_engine.install import functions
result = {"functions": sorted(functions(extension)), "names": dir(extension)}
"""


@functools.cache
def extension() -> dict[str, list[str]]:
    names: dict[str, Any] = on_null_cuda.run_code(CODE)
    return names


def is_refused(name: str) -> bool:
    return name in REFUSED or REFUSED_FAMILIES.fullmatch(name) is not None


def test_every_function_is_known() -> None:
    functions = set(extension()["functions"])
    unknown = {n for n in functions if not (n in TABLE or n in QUESTIONS or is_refused(n))}
    assert unknown == set()
    absent = (set(TABLE) | REFUSED) - functions
    assert absent == set(), "the extension has no such functions"
    assert {name for name in TABLE if name in QUESTIONS or is_refused(name)} == set()


def test_every_reference_has_a_test() -> None:
    """By its name, or by that of the activation whose backward it is."""
    texts = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*_kernels.py"))
    tested = set(re.findall(r'"(\w+)"', texts))
    assert {name for name in TABLE if not {name, re.sub("^(dbias_)?d", "", name)} & tested} == set()


def test_every_name_that_its_python_calls_is_known() -> None:
    engine = transformer_engine.find()
    assert engine is not None
    called = set()
    for file in (engine.package / "pytorch").rglob("*.py"):
        called |= set(re.findall(r"\btex\.(\w+)", file.read_text()))
    known = set(TABLE) | QUESTIONS | set(extension()["names"])
    assert {name for name in called - known if not ABSENT.fullmatch(name)} == set()
    assert {"generic_gemm", "fused_attn_fwd", "quantize", "rmsnorm_bwd"} <= called
