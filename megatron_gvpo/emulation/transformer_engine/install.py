"""Replaces the compiled functions of `transformer_engine_torch` by their references."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_gvpo.emulation.mode import Launches
from megatron_gvpo.emulation.transformer_engine import (
    activations,
    attention,
    gemm,
    multi_tensor,
    norms,
    packs,
    quantization,
    rotary,
    router,
)
from megatron_gvpo.emulation.transformer_engine.references import TABLE, Reference

# The import of these modules fills TABLE.
_MODULES = (activations, attention, gemm, multi_tensor, norms, packs, quantization, rotary, router)
# Functions without a reference: they compute their answer on the host, or only allocate memory.
QUESTIONS = {
    *("get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams", "get_stream_priority_range"),
    *("get_fused_attn_backend", "get_grouped_gemm_setup_workspace_size", "ubuf_built_with_mpi"),
    "nvte_built_with_cublasmp",
    *("device_supports_multicast", "create_empty_quantized_tensor", "bulk_allocate"),
}


def install() -> None:
    """Replace every function that starts a kernel, in the extension and in modules that imported it by name.

    Imports Transformer Engine. A function without a reference raises NotImplementedError with its name when
    it is called. A second call of `install` changes nothing.
    """
    import transformer_engine.pytorch  # noqa: F401 - it loads the extension
    import transformer_engine_torch as extension

    replaced: dict[int, tuple[Any, Any]] = {}
    for name, function in functions(extension).items():
        if name in QUESTIONS or hasattr(function, "emulated"):
            continue
        replacement = _computed(function, TABLE[name]) if name in TABLE else _refused(name)
        replaced[id(function)] = (function, replacement)
        setattr(extension, name, replacement)
    for module in [module for name, module in sys.modules.items() if _may_import_it(name)]:
        for name, value in list(vars(module).items()):
            original, replacement = replaced.get(id(value), (None, None))
            if original is not None and original is value:
                setattr(module, name, replacement)


def functions(extension: Any) -> dict[str, Callable[..., Any]]:
    """Return the extension's functions by name, without its classes and enumerations."""
    names = [name for name in dir(extension) if not name.startswith("_")]
    values = {name: getattr(extension, name) for name in names}
    return {name: value for name, value in values.items() if callable(value) and not isinstance(value, type)}


def _may_import_it(name: str) -> bool:
    return name.split(".")[0] in ("transformer_engine", "megatron", "megatron_gvpo")


def _computed(function: Callable[..., Any], reference: Reference) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with Launches():
            result = function(*args, **options)
        with _disable_current_modes(), torch.no_grad():
            reference(result, *args, **options)
        return result

    run.emulated = True  # type: ignore[attr-defined]
    return run


def _refused(name: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"the emulated GPU has no reference for Transformer Engine's {name}")

    run.emulated = True  # type: ignore[attr-defined]
    return run
