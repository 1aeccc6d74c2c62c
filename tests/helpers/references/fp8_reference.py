"""Runs an engine's own block-wise FP8 quantiser on the tensors of a file, in the engine's environment.

usage: python fp8_reference.py sglang|vllm IN.safetensors OUT.safetensors
"""

import sys

from safetensors.torch import load_file, save_file


def main(engine: str, source: str, target: str) -> None:
    if engine == "vllm":
        from vllm.utils.deep_gemm import per_block_cast_to_fp8
    else:
        from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8
    out = {}
    for name, weight in load_file(source).items():
        out[name], out[f"{name}_scale_inv"] = (t.contiguous() for t in per_block_cast_to_fp8(weight))
    save_file(out, target)


main(*sys.argv[1:])
