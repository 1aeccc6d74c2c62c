"""A stand-in for SGLang's GPU kernel package, which has no CPU build on the package index.

With it SGLang's server can be imported, and runs with its native torch operators; a call of a kernel raises
an error. Tests with it cover the protocol and the control flow, not SGLang's kernels. It is never installed
on a machine with CUDA.
"""

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"

# Operators that SGLang's models with a vision tower look up when they are imported.
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    torch.library.define(f"sgl_kernel::{_name}", "(Tensor x) -> Tensor")


def copy_all_layer_kv_cache_cpu(keys: Any, values: Any, target: Any, source: Any) -> None:
    """Move cache entries between slots. This is the only operation that the CPU path calls here."""
    for cache in (*keys, *values):
        cache[target] = cache[source]


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this is the CPU stand-in, without kernels")

    return missing
