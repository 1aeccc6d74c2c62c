"""Measures the cost of verifying weights: the share of a load that checksums and checks of values take.

    python benchmarks/checksum_cost.py --out benchmarks/results/checksum_cost_cpu.json

A Qwen2 model of random bfloat16 weights goes from its Hugging Face directory to a Megatron checkpoint, and
back from that; each way loads it once, as training, `eval`, `export` and `convert` do. The exported files,
which have checksums, are loaded a third time. Files are in the page cache, so a disk would make the
share smaller. Times are processor times, because other work on the machine disturbs those less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "quickstart")]


def main() -> int:
    parser = argparse.ArgumentParser(description="The share of a load that verifying takes.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "command": " ".join(["python", "benchmarks/checksum_cost.py", *sys.argv[1:]]),
            **measure(Path(folder), args.layers, args.width),
        }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(folder: Path, layers: int, width: int) -> dict[str, Any]:
    import make_task
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make_task.make_model(folder / "tokenizer", 0)
    size = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    config = Qwen2Config(vocab_size=32000, tie_word_embeddings=False, **size, **heads)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "hf")
    for file in (folder / "tokenizer").glob("*token*"):
        file.rename(folder / "hf" / file.name)

    from megatron_gvpo.huggingface import checked_weights, checksums
    from megatron_gvpo.megatron.cpu.bridge import import_bridge
    from megatron_gvpo.training import conversion

    clock = Clock()
    clock.watch(checked_weights.CheckedWeights, "_look", "values and checksums of Hugging Face")
    clock.watch(checksums, "compare", "checksums of Megatron")
    clock.watch(checked_weights, "checksum", "checksums of Hugging Face")
    clock.watch(import_bridge().AutoBridge, "load_hf_weights", "load Hugging Face")
    clock.watch(conversion, "load_shards", "load Megatron")
    result: dict[str, Any] = {"gb": round(sum(p.numel() for p in model.parameters()) * 2 / 1e9, 3)}
    del model
    for name, convert in {
        "Hugging Face, without checksums": lambda: conversion.to_megatron(folder / "hf", folder / "megatron"),
        "Megatron": lambda: conversion.to_hugging_face(folder / "megatron", folder / "out", folder / "hf"),
        "Hugging Face, with checksums": lambda: conversion.to_megatron(folder / "out", folder / "again"),
    }.items():
        clock.seconds.clear()
        convert()
        result[name] = {what: round(seconds, 3) for what, seconds in clock.seconds.items()}
    return result


class Clock:
    """Adds up the processor time of functions, each under a name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, name: str, what: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.process_time()
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - begin

        setattr(owner, name, timed)


if __name__ == "__main__":
    sys.exit(main())
