"""Does this GPU train right, and how fast: one command, one table, under 8 minutes on one GPU.

    python benchmarks/device_check.py            # writes results/device_check_<gpu>.json
    python benchmarks/device_check.py --smoke    # tiny sizes; also on a CPU, which has no FP8 and no kernels

  head       the fused log-prob head on the device against fp64: log-probs and both gradients, every mode
  layers     this machine's layers (Transformer Engine's on a GPU) against the local ones of CPU runs, in a
             process without a GPU: the same weights, one pack, log-probs and gradients
  train      updates of a model shaped as Qwen2.5-1.5B and of one as 7B with fewer layers, of random weights:
             tokens a second, MFU, seconds of head, body, optimizer and weight export, peak memory by part;
             head and update in every mode of the head, the head's share, and what the whole update gains over
             one whose head makes all logits (bf16 product, fp32 log_softmax)
  fp8        the same with FP8, where Transformer Engine is there
  offload    updates with optimizer states and activations in host memory: the same, how fast, in what memory
  ipc        a weight bucket of this GPU in another process, as colocated rollout servers map it: bytes, GB/s

It runs with what the machine has. What is missing or fails is said in the table, and the exit status is 1
where something that ran was wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# bf16 matrix products without sparsity, TFLOPS: NVIDIA's data sheets.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "H800": 989, "A100": 312, "A800": 312, "B200": 2250, "L40S": 362}
QWEN = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SHAPES = {
    "qwen2.5-1.5b": {**QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    "7b, 8 layers": {
        **{**QWEN, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 8},
    },
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, which say nothing about speed")
    parser.add_argument(
        "--out", type=Path, help="default: results/device_check_<gpu>.json; none with --smoke"
    )
    parser.add_argument("--local", type=Path, help=argparse.SUPPRESS)  # the other process of "layers"
    args = parser.parse_args()
    if args.local is not None:
        one_pack(args.local, "float32", args.local / "local.pt")
        return
    import torch

    begin = time.perf_counter()
    report: dict[str, Any] = {"machine": machine(), "smoke": args.smoke, "results": {}, "missing": {}}
    if not torch.cuda.is_available():
        report["missing"]["gpu"] = "torch sees no CUDA device: this is its CPU's check"
    results = report["results"]
    attempt(report, "head", lambda: results.update(head=device_head().head(args.smoke)))
    attempt(report, "layers", lambda: results.update(layers=layers()))
    attempt(report, "offload", lambda: results.update(offload=device_offload().offload(args.smoke)))
    if torch.cuda.is_available():
        attempt(report, "ipc", lambda: results.update(ipc=device_ipc().check(args.smoke)))
    else:
        report["missing"]["ipc"] = "no GPU: CUDA IPC maps memory of one"
    if reason := no_fp8():
        report["missing"]["fp8"] = reason
    for recipe in (None,) if reason else (None, "tensorwise"):
        for name, shape in SHAPES.items():
            shape, named = ({**shape, **TINY} if args.smoke else shape), name + (", fp8" if recipe else "")
            check = partial(train, shape, args.smoke, recipe)
            attempt(report, named, lambda n=named, f=check: results.update({n: f()}))
    report["seconds"] = round(time.perf_counter() - begin, 1)
    print_table(report)
    gpu = re.sub(r"\W+", "_", report["machine"]["device"].lower()).strip("_")
    out = args.out or (None if args.smoke else Path(__file__).parent / f"results/device_check_{gpu}.json")
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(not found.get("right", True) for found in results.values()) or "failed" in report)


def device_head() -> Any:
    """Imports what the checks of the head need."""
    import device_head

    return device_head


def device_offload() -> Any:
    import device_offload

    return device_offload


def device_ipc() -> Any:
    """Imports what the check of shared GPU memory needs."""
    import device_ipc

    return device_ipc


def attempt(report: dict[str, Any], name: str, check: Callable[[], None]) -> None:
    """Whatever one check does, the others run."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        report.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:300]
    finally:
        clean_up()


def clean_up() -> None:
    import torch

    from megatron_gvpo.megatron import parallel

    parallel.shut_down()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def machine() -> dict[str, str]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"device": "cpu", "python": platform.python_version()}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def no_fp8() -> str:
    """Why FP8 cannot run here; empty where it can."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        return "the GPU is older than FP8 (compute capability 8.9)"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        return f"Transformer Engine cannot be imported: {error}"
    return ""


def layers() -> dict[str, Any]:
    """Log-probs and gradients of one pack: here, and with the local layers in a process without a GPU."""
    import torch

    found: dict[str, Any] = {"right": True}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        save_model(place, {**SHAPES["qwen2.5-1.5b"], **TINY, "tie_word_embeddings": False})
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, __file__, "--local", str(place)], check=True, env=environment)
        local = torch.load(place / "local.pt")
        limits = {"float32": 1e-4, "bfloat16": 3e-2} if torch.cuda.is_available() else {"float32": 1e-6}
        for dtype, limit in limits.items():
            one_pack(place, dtype, place / "here.pt")
            here = torch.load(place / "here.pt")
            clean_up()
            errors = {"logp": float((here["logp_r"] - local["logp_r"]).abs().max())}
            errors["gradient"] = max(
                float((here["gradients"][n] - g).norm() / g.norm()) for n, g in local["gradients"].items()
            )
            found[dtype] = errors
            found["right"] = found["right"] and max(errors.values()) < limit
    return found


def one_pack(place: Path, dtype: str, out: Path) -> None:
    """Write log-probs of made-up rows and the gradients, under Hugging Face names, of their weighted sum."""
    import torch

    policy = policy_of(place, dtype, max_tokens=4096)
    rows = made_rows(groups=3, k=3, prompt=7, response=20, vocab=TINY["vocab_size"], ragged=True)
    gradients: dict[str, Any] = {}
    apply = policy.optimizer.apply

    def take() -> Any:  # in the weights' places, gradients are exported
        parameters = list(policy.model.weights())
        weights = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.main_grad)
            gradients.update({name: tensor.float().clone() for name, tensor in policy.weights()})
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        return apply()

    policy.optimizer.apply = take
    found = policy.update(rows, at_step_start=True, keep_logp=True)
    torch.save({"logp_r": found.logp_r, "gradients": gradients}, out)


def train(shape: dict[str, Any], smoke: bool, fp8: str | None = None) -> dict[str, Any]:
    """Updates of 32 groups' rows of random tokens in packs of 8192 (in FP8, of multiples of its blocks)."""
    import torch

    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    sizes = {"groups": 2, "k": 2, "prompt": 8, "response": 24} if smoke else {"groups": 8, "k": 5}
    sizes = {"prompt": 150, "response": 850, **sizes}
    rounds = 2 if smoke else 4
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), shape)
        policy = policy_of(Path(directory), dtype, max_tokens=8192, fp8=fp8)
    rows = made_rows(vocab=shape["vocab_size"], **sizes)
    first = policy.update(rows, at_step_start=True)  # kernels are built and tuned here, memory measured
    seconds: dict[str, float] = {"update": 0.0, "optimizer": 0.0}
    apply = policy.optimizer.apply

    def timed() -> Any:
        with clock(seconds, "optimizer"):
            return apply()

    policy.optimizer.apply = timed
    for _ in range(rounds):
        with clock(seconds, "update"):
            policy.update(rows, at_step_start=True)
    of_head = device_head().head_seconds(policy, rows, dtype)
    seconds["head"] = rounds * of_head["known"]  # as the update above has it, at a step's start
    updates = {"known": seconds["update"] / rounds}
    policy.optimizer.apply = apply
    for mode, stash in (("stash", policy._stash_bytes), ("recompute", 0)):  # weights that come late
        policy._stash_bytes = stash
        policy.update(rows, at_step_start=False)
        with clock(updates, mode):
            policy.update(rows, at_step_start=False)
    with device_head().naive_head():
        policy.update(rows, at_step_start=True)
        with clock(updates, "naive"):
            policy.update(rows, at_step_start=True)
    seconds["body"] = seconds["update"] - seconds["optimizer"] - seconds["head"]
    seconds = {name: value / rounds for name, value in seconds.items()}
    with clock(seconds, "export"):
        exported = sum(tensor.nbytes for _, tensor in policy.weights())
    tokens = sum(len(p) + len(r) for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True))
    flops = update_flops(shape, rows)
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device), None)
    return {
        "dtype": dtype if fp8 is None else f"fp8 {fp8}",
        "parameters": sum(p.numel() for p in policy.model.weights()),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds["update"],
        "tflops": flops / seconds["update"] / 1e12,
        "mfu_of_bf16_peak": None if peak is None else flops / seconds["update"] / 1e12 / peak,
        "seconds": seconds,
        "head_seconds": of_head,
        "update_seconds": updates,
        "head_share": seconds["head"] / seconds["update"],
        "times_naive": {mode: updates["naive"] / updates[mode] for mode in updates if mode != "naive"},
        "exported_gb_per_s": exported / seconds["export"] / 1e9,
        "memory_gib": {n.split("/")[1].removesuffix("_gib"): v for n, v in first.memory.items()},
        "right": bool(torch.isfinite(torch.tensor(first.update.grad_norm))) and not first.update.skipped,
    }


class clock:  # noqa: N801 - reads as a statement
    """Adds the seconds of a block to `into[name]`, the device's work included."""

    def __init__(self, into: dict[str, float], name: str) -> None:
        self._into, self._name = into, name

    def __enter__(self) -> None:
        synchronize()
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        synchronize()
        self._into[self._name] = self._into.get(self._name, 0.0) + time.perf_counter() - self._begin


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def update_flops(shape: dict[str, Any], rows: Any) -> float:
    """6 a parameter and token of layers and head, 12 a channel and pair of tokens of the attention."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    width = hidden // heads * (heads + shape["num_key_value_heads"])
    layer = 2 * hidden * width + 3 * hidden * shape["intermediate_size"]
    lengths = [len(p) + len(r) - 1 for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True)]
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    of_layers = shape["num_hidden_layers"] * (6 * layer * sum(lengths) + 12 * hidden * pairs)
    return of_layers + 6 * hidden * shape["vocab_size"] * int(rows.length_n.sum())


def save_model(place: Path, shape: dict[str, Any]) -> None:
    import torch
    import transformers

    config = transformers.Qwen2Config(**shape, max_position_embeddings=2048, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(place)


def policy_of(
    place: Path,
    dtype: str,
    max_tokens: int,
    fp8: str | None = None,
    sections: dict[str, dict[str, Any]] | None = None,
) -> Any:
    """`sections` of the configuration take the place of these."""
    from megatron_gvpo.config import build_config
    from megatron_gvpo.megatron.policy import Policy

    return Policy(
        build_config(
            {
                "output_dir": "unused",
                "model": {"path": str(place), "dtype": dtype, "fp8": {"recipe": fp8} if fp8 else None},
                "data": {"train": {"path": "unused"}},
                "algorithm": {"recipe": "gvpo"},
                "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": max_tokens},
                "optimizer": {"lr": 1e-6},
                **(sections or {}),
            }
        )
    )


def made_rows(groups: int, k: int, prompt: int, response: int, vocab: int, ragged: bool = False) -> Any:
    import torch

    from megatron_gvpo.types import Rows

    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab, (n,), generator=generator).tolist())

    n = groups * k
    prompts = [tokens(prompt) for _ in range(groups)]
    return Rows(
        prompt_ids=[prompts[i // k] for i in range(n)],
        response_ids=[tokens(response - i % response // 2 if ragged else response) for i in range(n)],
        group_n=torch.arange(n) // k,
        reward_n=torch.rand(n, generator=generator),
        truncated_n=torch.zeros(n, dtype=torch.bool),
    )


def print_table(report: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [(name, value) for name, value in report["machine"].items()]
    for name, found in report["results"].items():
        for key, value in flat(found):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            rows.append((f"{name}: {key}", shown))
    rows += [(f"missing: {name}", reason) for name, reason in report["missing"].items()]
    rows += [(f"FAILED: {name}", reason) for name, reason in report.get("failed", {}).items()]
    rows.append(("seconds", f"{report['seconds']}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def flat(found: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in found.items():
        rows += flat(value, f"{before}{name} ") if isinstance(value, dict) else [(f"{before}{name}", value)]
    return rows


if __name__ == "__main__":
    main()
