"""The head's Triton kernels without a GPU: interpreted, and compiled for a GPU that is absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from paths import HELPERS


def python(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, because Triton reads TRITON_INTERPRET at its first import."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_the_kernels_compute_what_they_should():
    cases = HELPERS / "triton_head_cases.py"
    done = python("-m", "pytest", "-p", "no:cacheprovider", str(cases), interpret=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "passed" in done.stdout or "[100%]" in done.stdout


COMPILE = """
import json, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_gvpo.kernels import triton_tiles as kernels

SIZES = ("columns", "hidden", "per_split")  # multiples of 16, as Triton finds out at a launch

def build(kernel, dtype, constants, num_warps=8, num_stages=3):
    pointers = {"labels": "*i64", "x": dtype, "w": dtype, "out": dtype}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        integer = name.endswith("stride") or name in ("rows", "splits", *SIZES)
        signature[name] = "i32" if integer else pointers.get(name, "*fp32")
        if name in constants:
            signature[name] = "constexpr"
        if signature[name][0] == "*" or name.endswith("stride") or name in SIZES:
            aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True).stdout
    usage = dict(part.split(":")[:2] for part in text.split("\\n")[-2].split() if part.count(":") == 1)
    ptx = made.asm["ptx"]
    return {"shared": made.metadata.shared, "stack": int(usage["STACK"]), "tensor_cores": "wgmma" in ptx,
            "wide": "ld.global.v4" in ptx}

found = {}
for entropy in (False, True):
    rows = {"ENTROPY": entropy, "LEAST": kernels.LEAST, "BLOCK": kernels.ROW_BLOCK}
    found["rows", entropy] = build(kernels.row_kernel, "*bf16", {**rows, "STASH": not entropy})
    slope = {"SLOPE": entropy, "BLOCK": kernels.ROW_BLOCK}
    found["gradient", entropy] = build(kernels.gradient_kernel, "*bf16", slope)
    for name in ("bf16", "fp32"):
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        tile = kernels.scan_tile(dtype, 8192, 151936, 3584)
        options = {key: tile.pop(key) for key in ("num_warps", "num_stages")}
        scan = {"ENTROPY": entropy, "PER_ROW": entropy, "LEAST": kernels.LEAST, **tile}
        found["scan " + name, entropy] = build(kernels.scan_kernel, "*" + name, scan, **options)
print(json.dumps([[*key, value] for key, value in found.items()]))
"""


def test_hopper_can_run_the_kernels():
    """The machine code of sm_90 fits into shared memory, spills nothing, and uses the tensor cores for
    bf16.
    """
    done = python("-c", COMPILE)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) == 8
    for name, entropy, made in kernels:
        assert made["shared"] <= 227 << 10, (name, entropy)
        assert made["stack"] <= 16, (name, entropy)  # bytes a thread
        assert made["tensor_cores"] == (name == "scan bf16")
        assert made["wide"] or name.startswith("scan"), (name, entropy)  # 16 bytes a load; scans copy async


def test_a_cpu_without_the_interpreter_is_told():
    code = (
        "import torch; from megatron_gvpo.kernels.linear_logprob import linear_logprob as f; "
        "f(torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64), backend='triton')"
    )
    done = python("-c", code)
    assert "ValueError: backend='triton' on a CPU needs TRITON_INTERPRET=1" in done.stderr
