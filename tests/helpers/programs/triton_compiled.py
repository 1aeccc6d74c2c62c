"""Compiles the head's Triton kernels for absent GPUs, and prints the resources that each uses, as JSON.

    python triton_compiled.py 80 90 100     # compute capabilities

A line for each kernel: {"capability", "kernel", "entropy", "registers" and "stack" (of a thread; bytes of the
stack are spills), "shared" (bytes of a block), "wide" (loads of 16 bytes)}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_gvpo.kernels import triton_tiles as kernels


def build(capability: int, kernel: Any, dtype: str, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel for columns and strides in multiples of 16, which Triton detects at a launch."""
    pointers = {"labels": "*i64", "out": dtype}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        integer = name.endswith("stride") or name in ("rows", "columns")
        signature[name] = "i32" if integer else pointers.get(name, "*fp32")
        if name in constants:
            signature[name] = "constexpr"
        if signature[name][0] == "*" or name.endswith("stride") or name == "columns":
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8, "num_stages": 3}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True).stdout
    usage = dict(part.split(":")[:2] for part in text.split("\n")[-2].split() if part.count(":") == 1)
    return {
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "shared": made.metadata.shared,
        "wide": "ld.global.v4" in made.asm["ptx"],
    }


def compiled(capability: int) -> Iterator[dict[str, Any]]:
    for entropy in (False, True):
        rows = {"ENTROPY": entropy, "LEAST": kernels.LEAST, "BLOCK": kernels.ROW_BLOCK, "STASH": True}
        slope = {"SLOPE": entropy, "BLOCK": kernels.ROW_BLOCK}
        cases = {"rows": (kernels.row_kernel, rows), "gradient": (kernels.gradient_kernel, slope)}
        for name, (kernel, constants) in cases.items():
            made = build(capability, kernel, "*bf16", constants)
            yield {"capability": capability, "kernel": name, "entropy": entropy, **made}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for line in compiled(int(argument)):
            print(json.dumps(line), flush=True)
