"""Runs PyTorch's own table of operations on the CPU and on the emulated GPU of this process, and compares.

    python -m helpers.workers.emulated_operations RESULT.json [NAME ...]

The program prints the name of each operation before it begins. The result maps "operation/dtype" to "equal",
"named" (refused with its name), "refused" (PyTorch's CUDA code refuses what the CPU computes), or a line that
says how they differ. Random numbers and unwritten memory are not compared.
"""

from __future__ import annotations

import json
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron_gvpo.emulation import mode

SAMPLES, FEW = 6, 2  # samples of each operation, and of each where names are given
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
RANDOM = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform"),
    *("rand_like", "randint", "randint_like", "randn", "randn_like", "nn.functional.dropout"),
    *("nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout"),
    *("nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d", "nn.functional.rrelu"),
    *("nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward"),
    *("nn.functional.scaled_dot_product_attention",),  # its samples use dropout
    *("pca_lowrank",),  # a random projection decides the signs of its vectors
}
UNWRITTEN = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


def table() -> list[Any]:
    """PyTorch's table; the package `expecttest`, which its module imports, is for tests that do not run."""
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def moved(tree: Any, device: str) -> Any:
    """The tree with copies of its tensors on the device, and with its name in place of "cpu"."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)
        return device if leaf == "cpu" else leaf

    return tree_map(move, tree)


def results(operation: Any, sample: Any, device: str, with_gradient: bool) -> list[Tensor]:
    """The operation's results, and the gradients of their sum."""
    torch.manual_seed(0)
    first, args, options = moved((sample.input, sample.args, sample.kwargs), device)
    out = operation(first, *args, **options)
    leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    gradients: list[Tensor] = []
    if with_gradient:
        inputs = [t for t in tree_leaves((first, args, options)) if isinstance(t, Tensor) and t.requires_grad]
        summed = [t.double().sum() for t in leaves if t.requires_grad and t.is_floating_point()]
        if summed:
            computed = torch.autograd.grad(torch.stack(summed).sum(), inputs, allow_unused=True)
            gradients = [gradient for gradient in computed if gradient is not None]
    return [t.detach().cpu() for t in (*leaves, *gradients)]


def compared(operation: Any, dtype: torch.dtype, count: int) -> str:
    with_gradient = dtype == torch.float32 and operation.supports_autograd
    samples = list(operation.sample_inputs("cpu", dtype, requires_grad=with_gradient))[:count]
    for sample in samples:
        try:
            wanted = results(operation, sample, "cpu", with_gradient)
        except Exception:
            continue  # a sample that the CPU refuses says nothing
        try:
            computed = results(operation, sample, "cuda", with_gradient)
        except mode.EmulationError:
            return "named"
        except Exception as error:
            return f"refused: {str(error).splitlines()[0]}"
        if len(computed) != len(wanted):
            return f"{len(computed)} results instead of {len(wanted)}"
        for a, b in zip(computed, wanted, strict=True):
            try:
                torch.testing.assert_close(a, b, equal_nan=True, check_dtype=False)
            except AssertionError as error:
                return f"differs: {' '.join(str(error).split())[:200]}"
    return "equal"


def chosen(names: set[str]) -> Iterator[tuple[str, Any, torch.dtype]]:
    for operation in table():
        variant = f".{operation.variant_test_name}" if operation.variant_test_name else ""
        is_left_out = operation.name in RANDOM | UNWRITTEN
        if is_left_out or (names and operation.name not in names):
            continue
        for dtype in DTYPES:
            if dtype in operation.dtypes and dtype in operation.dtypesIfCUDA:
                yield f"{operation.name}{variant}/{str(dtype).removeprefix('torch.')}", operation, dtype


def main(result: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    mode.install()
    count = FEW if names else SAMPLES
    outcomes = {}
    for name, operation, dtype in chosen(set(names)):
        print(name, flush=True)  # names the operation if it never ends
        outcomes[name] = compared(operation, dtype, count)
    Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
