"""Compiles the head's Triton kernels for GPUs that are absent, and prints what each takes of one, as JSON.

    python triton_compiled.py 80 90 100     # compute capabilities

A line for each kernel: {"capability", "kernel", "entropy", "registers" and "stack" (of a thread; bytes of the
stack are spills), "shared" (bytes of a block), "tensor_cores", "wide" (loads of 16 bytes)}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_gvpo.kernels import triton_tiles as kernels

SIZES = ("columns", "hidden", "per_split")  # multiples of 16, as Triton finds out at a launch


def build(
    capability: int,
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    sizes: tuple[str, ...] = SIZES,
    num_warps: int = 8,
    num_stages: int = 3,
) -> dict[str, Any]:
    """Compile one kernel; `sizes`: the arguments that are multiples of 16, as are strides with "hidden"."""
    pointers = {"labels": "*i64", "x": dtype, "w": dtype, "out": dtype}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        integer = name.endswith("stride") or name in ("rows", "splits", *SIZES)
        signature[name] = "i32" if integer else pointers.get(name, "*fp32")
        if name in constants:
            signature[name] = "constexpr"
        stride = name.endswith("stride") and "hidden" in sizes
        if signature[name][0] == "*" or stride or name in sizes:
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True).stdout
    usage = dict(part.split(":")[:2] for part in text.split("\n")[-2].split() if part.count(":") == 1)
    ptx = made.asm["ptx"]
    return {
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "shared": made.metadata.shared,
        "tensor_cores": any(word in ptx for word in ("wgmma", "tcgen05.mma", "mma.sync")),
        "wide": "ld.global.v4" in ptx,
    }


def compiled(capability: int) -> Iterator[dict[str, Any]]:
    for entropy in (False, True):
        rows = {"ENTROPY": entropy, "LEAST": kernels.LEAST, "BLOCK": kernels.ROW_BLOCK, "STASH": not entropy}
        slope = {"SLOPE": entropy, "BLOCK": kernels.ROW_BLOCK}
        cases: dict[str, Any] = {
            "rows": (kernels.row_kernel, "*bf16", rows, {}),
            "gradient": (kernels.gradient_kernel, "*bf16", slope, {}),
        }
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            tile = kernels.scan_tile(dtype, 8192, 151936, 3584)
            options = {key: tile.pop(key) for key in ("num_warps", "num_stages")}
            scan = {"ENTROPY": entropy, "PER_ROW": entropy, "LEAST": kernels.LEAST, **tile}
            cases[f"scan {name}"] = (kernels.scan_kernel, f"*{name}", scan, options)
            if name == "bf16" and not entropy:
                odd = {**options, "sizes": ("columns", "per_split")}
                cases["scan bf16, hidden no multiple of 16"] = (kernels.scan_kernel, "*bf16", scan, odd)
        for name, (kernel, dtype_name, constants, options) in cases.items():
            made = build(capability, kernel, dtype_name, constants, **options)
            yield {"capability": capability, "kernel": name, "entropy": entropy, **made}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for line in compiled(int(argument)):
            print(json.dumps(line), flush=True)
