"""Compiles the head's product in QuACK for an H100, which may be absent, and prints what it takes, as JSON.

    QUACK_ARCH=90 CUTE_DSL_ARCH=sm_90a QUACK_CACHE_DIR=... python quack_compiled.py 192 128    # columns

`quack_product.product` itself runs, on tensors without memory, up to the launch. A line for each tile:
{"tile", "registers" and "stack" (of a thread; bytes of the stack are spills), "products" (the tensor cores'
asynchronous ones), "loads" and "stores" (of the tensor memory accelerator), "powers" (of two), "fused"
(log2(e) z - k with one rounding, log2(e) in fp32)}.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from quack.epilogue import frontend
from quack.gemm_runtime import host

from megatron_gvpo.kernels.quack_product import product

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def build(tile: int) -> dict[str, Any]:
    """Compile the product for tiles of `tile` columns."""
    launched: list[Any] = []
    host.get_max_active_clusters = lambda size: (
        132 // size
    )  # asks the driver; an H100 has 132 multiprocessors
    frontend.run_gemm_epi_plan = lambda plan, *_, **__: launched.append(plan)
    before = set(objects())

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, columns = 4000, 100 * tile
    labels_r, inverse_r = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.float32)
    product(empty(rows, 3584), empty(columns, 3584), labels_r, inverse_r, empty(rows, columns), tile)
    [made], [_] = set(objects()) - before, launched
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        cubin.write_bytes(b"\x7fELF" + made.read_bytes().split(b"\x7fELF")[2])  # an object of the host has it
        usage = run("cuobjdump", "--dump-resource-usage", cubin)
        code = run("nvdisasm", "--print-code", cubin)
    resources = dict(part.split(":")[:2] for part in usage.split("\n")[-2].split() if part.count(":") == 1)
    return {
        "tile": tile,
        "registers": int(resources["REG"]),
        "stack": int(resources["STACK"]),
        "products": code.count("HGMMA"),
        "loads": code.count("UTMALDG"),
        "stores": code.count("UTMASTG"),
        "powers": code.count("MUFU.EX2"),
        "fused": len(re.findall(r"FFMA .*, 1\.44269502", code)),
    }


def objects() -> list[Path]:
    return list(Path(os.environ["QUACK_CACHE_DIR"]).rglob("*.o"))


def run(tool: str, option: str, file: Path) -> str:
    return subprocess.run([TOOLS / tool, option, file], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(build(int(argument))), flush=True)
