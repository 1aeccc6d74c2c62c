"""For device_check.py: compares training with and without optimizer states or activations in host memory.

It takes the same updates of a model of eight layers with nothing offloaded, with half and all of the
optimizer's states offloaded and, on a GPU, with the inputs of the attention's parts offloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # a variant's process runs this file as a program

from lib.device.model import (
    SHAPES,
    TINY,
    clean_up,
    clock,
    made_rows,
    policy_of,
    save_model,
)

UPDATES = 3
MODULES = ["qkv_linear", "core_attn", "attn_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "half of the optimizer": {"optimizer": {"offload_fraction": 0.5}},
    "optimizer": {"optimizer": {"offload_fraction": 1.0}},
    "attention": {"parallel": {"offload_modules": MODULES}},
}


def offload(smoke: bool) -> dict[str, Any]:
    """Return losses, gradient norms, seconds of the last update and memory by part, for every variant."""
    on_gpu = torch.cuda.is_available()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tiny = TINY if smoke else {"num_hidden_layers": 8}
        save_model(folder, {**SHAPES["qwen2.5-1.5b"], **tiny})
        for name in VARIANTS:
            if name != "attention":
                results[name] = one(folder, name, smoke)
                clean_up()
            elif on_gpu:  # in a new process, because Transformer Engine reads its environment at import
                environment = {**os.environ, "NVTE_CPU_OFFLOAD_V1": "1"}
                arguments = [str(folder), name, *(["--smoke"] if smoke else [])]
                subprocess.run([sys.executable, __file__, *arguments], check=True, env=environment)
                results[name] = json.loads((folder / "found.json").read_text())
    limit = 2e-3 if on_gpu else 1e-4  # a master's last bit may change how a bf16 weight is rounded
    for part in results.values():
        for values, wanted in ((part[n], results["nothing"][n]) for n in ("losses", "grad_norms")):
            far = max(abs(v - w) / abs(w) for v, w in zip(values, wanted, strict=True))
            part["right"] = part.get("right", True) and far < limit
    return {**results, "right": all(part["right"] for part in results.values())}


def one(folder: Path, name: str, smoke: bool) -> dict[str, Any]:
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    sections = {"optimizer": {"lr": 1e-4}, **VARIANTS[name]}
    sections["optimizer"] = {"lr": 1e-4, **sections["optimizer"]}
    policy = policy_of(folder, dtype, max_tokens=8192, sections=sections)
    sizes = {"groups": 2, "k": 2, "prompt": 8, "response": 24} if smoke else {"groups": 4, "k": 5}
    rows = made_rows(vocab=policy.model.vocab_size, ragged=True, **{"prompt": 150, "response": 850, **sizes})
    seconds: dict[str, float] = {}
    apply = policy.optimizer.apply

    def timed() -> Any:
        seconds.clear()
        with clock(seconds, "optimizer"):
            return apply()

    policy.optimizer.apply = timed  # type: ignore[method-assign]
    results, took = [], dict[str, float]()
    for _ in range(UPDATES):
        took.clear()
        with clock(took, "update"):
            results.append(policy.update(rows, at_step_start=True))
    memory = {n.split("/")[1].removesuffix("_gib"): v for n, v in results[0].memory.items()}
    return {
        "losses": [result.metrics["loss"] for result in results],
        "grad_norms": [result.update.grad_norm for result in results],
        "seconds": {**took, **seconds},
        "memory_gib": memory,
    }


if __name__ == "__main__":
    where, variant = Path(sys.argv[1]), sys.argv[2]
    (where / "found.json").write_text(json.dumps(one(where, variant, "--smoke" in sys.argv)))
