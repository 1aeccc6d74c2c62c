"""Checks that this GPU trains correctly and measures its speed: one command, one table, under 8 minutes.

    python benchmarks/device_check.py            # writes results/device_check_<gpu>.json
    python benchmarks/device_check.py --smoke    # tiny sizes; also on a CPU, which has no FP8 and no kernels

  head       the fused log-prob head on the device against fp64: log-probs and both gradients, every mode
  quack      the same on Hopper with train.head_backend=quack, if QuACK is installed
  layers     this machine's layers (Transformer Engine's on a GPU) against the local layers of CPU runs, which
             a process without a GPU computes: the same weights, one pack, log-probs and gradients; and with
             shared prompts here, by PyTorch's FlashAttention on a GPU
  shared     the time of updates with shared prompts and without, and the planner's prediction
  train      updates of models with random weights, shaped like Qwen2.5-1.5B and like 7B with fewer layers:
             tokens a second, MFU, seconds of head, body, optimizer and weight export, peak memory by part;
             head and update in every mode of the head, the head's share, and the speed-up over an update
             whose head computes all logits (bf16 product, fp32 log_softmax)
  fp8        the same with FP8, if Transformer Engine is installed
  offload    updates with optimizer states and activations in host memory: equality, speed, memory
  ipc        another process maps a weight bucket of this GPU, like a colocated rollout server: bytes, GB/s

It runs the checks that the machine can run. The table names those that are missing or fail, and for each
check the proof on CPU to which the check adds the GPU. The exit status is 1 if a check that ran gave a wrong
result.
"""

from __future__ import annotations

import argparse
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

import device_ipc
import torch
from lib.device import head as fused_head
from lib.device import offload, shared
from lib.device.model import (
    SHAPES,
    TINY,
    clean_up,
    clock,
    made_rows,
    policy_of,
    save_model,
    update_flops,
)

from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.types import TrainBatch

# TFLOPS of bf16 matrix products without sparsity, from NVIDIA's data sheets
PEAK_TFLOPS = {"H200": 989, "H100": 989, "H800": 989, "A100": 312, "A800": 312, "B200": 2250, "L40S": 362}

# By check: the proof on CPU of the same code, and the part that only a GPU can prove.
PROOFS = {
    "head": "tests/kernels/test_triton_head.py, under Triton's interpreter against fp64: the kernels run",
    "quack": "tests/kernels/test_quack_head.py, a transcription against fp64, and compiled: the kernel runs",
    "layers": "tests/megatron/test_gradient_invariance.py, local layers against transformers, and "
    "test_attention_kernel.py: Transformer Engine's layers against those",
    "shared": "tests/megatron/test_shared_prompts.py and test_merged_attention.py, the merge in fp64: "
    "PyTorch's FlashAttention, and its time",
    "offload": "tests/megatron/test_precision.py and test_activation_offload.py: pinned memory, streams",
    "ipc": "tests/weights/test_ipc.py and tests/servers/test_colocated.py, by shared memory: CUDA's handles",
    "fp8": "tests/weights/test_fp8.py and tests/megatron/test_fp8_copies.py, scales and copies: FP8 products",
    "train": "tests/megatron/test_gradient_invariance.py, test_memory_profile.py: speed, fused kernels",
}


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
    begin = time.perf_counter()
    report: dict[str, Any] = {"machine": machine(), "smoke": args.smoke, "results": {}, "missing": {}}
    if not torch.cuda.is_available():
        report["missing"]["gpu"] = "torch finds no CUDA device, so the checks ran on the CPU"
    attempt(report, "head", partial(fused_head.head, args.smoke))
    if reason := fused_head.no_quack():
        report["missing"]["quack"] = reason
    else:
        attempt(report, "quack", partial(fused_head.quack, args.smoke))
    attempt(report, "layers", layers)
    attempt(report, "shared", partial(shared.times, args.smoke))
    attempt(report, "offload", partial(offload.offload, args.smoke))
    if torch.cuda.is_available():
        attempt(report, "ipc", partial(device_ipc.check, args.smoke))
    else:
        report["missing"]["ipc"] = device_ipc.NO_GPU
    if reason := no_fp8():
        report["missing"]["fp8"] = reason
    for recipe in (None,) if reason else (None, "tensorwise"):
        for name, shape in SHAPES.items():
            shape, named = ({**shape, **TINY} if args.smoke else shape), name + (", fp8" if recipe else "")
            attempt(report, named, partial(train, shape, args.smoke, recipe))
    report["completes"] = PROOFS
    report["seconds"] = round(time.perf_counter() - begin, 1)
    print_table(report)
    gpu = re.sub(r"\W+", "_", report["machine"]["device"].lower()).strip("_")
    out = args.out or (None if args.smoke else Path(__file__).parent / f"results/device_check_{gpu}.json")
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(not value.get("right", True) for value in report["results"].values()) or "failed" in report)


def attempt(report: dict[str, Any], name: str, check: Callable[[], dict[str, Any]]) -> None:
    """Run one check and record its result or its error, so that the other checks still run."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        report["results"][name] = check()
    except Exception as error:
        traceback.print_exc()
        report.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:300]
    finally:
        clean_up()


def machine() -> dict[str, str]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"device": "cpu", "python": platform.python_version()}
    if torch.cuda.is_available():
        versions |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return versions


def no_fp8() -> str:
    """Return the reason why FP8 cannot run here, or an empty string if it can."""
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
    """Compare log-probs and gradients of one pack: here, and with local layers in a process without a GPU."""
    result: dict[str, Any] = {"right": True}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        save_model(folder, {**SHAPES["qwen2.5-1.5b"], **TINY, "tie_word_embeddings": False})
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, __file__, "--local", str(folder)], check=True, env=environment)
        local = torch.load(folder / "local.pt")
        # On a GPU, Transformer Engine multiplies float32 matrices in TF32: 3 bits more than bfloat16.
        limits = {"float32": 4e-3, "bfloat16": 3e-2} if torch.cuda.is_available() else {"float32": 1e-6}
        variants = {dtype: (dtype, False, limit) for dtype, limit in limits.items()}
        dtype, limit = list(limits.items())[-1]
        variants[f"{dtype}, shared prompts"] = (dtype, True, 10 * limit if dtype == "float32" else limit)
        for name, (dtype, share_prompts, limit) in variants.items():
            one_pack(folder, dtype, folder / "here.pt", share_prompts)
            here = torch.load(folder / "here.pt")
            clean_up()
            errors = {"logp": float((here["logp_r"] - local["logp_r"]).abs().max())}
            errors["gradient"] = max(
                float((here["gradients"][n] - g).norm() / g.norm()) for n, g in local["gradients"].items()
            )
            result[name] = errors
            result["right"] = result["right"] and max(errors.values()) < limit
    return result


def one_pack(folder: Path, dtype: str, out: Path, share_prompts: bool = False) -> None:
    """Write log-probs of made-up rows and the gradients, under Hugging Face names, of their weighted sum."""
    policy = policy_of(folder, dtype, max_tokens=4096, share_prompts=share_prompts)
    rows = made_rows(groups=3, k=3, prompt=7, response=20, vocab=TINY["vocab_size"], ragged=True)
    gradients: dict[str, Any] = {}
    apply = policy.optimizer.apply

    def take() -> Any:  # the export takes gradients in place of the weights
        parameters = list(policy.model.weights())
        weights = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
            gradients.update({name: tensor.float().clone() for name, tensor in policy.weights()})
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        return apply()

    policy.optimizer.apply = take  # type: ignore[method-assign]
    outcome = policy.update(rows, at_step_start=True, keep_logp=True)
    torch.save({"logp_r": outcome.logp_r, "gradients": gradients}, out)


def first_update(shape: dict[str, Any], smoke: bool, fp8: str | None) -> tuple[Policy, TrainBatch, Any]:
    """Policy, rows and outcome of an update on 8 groups of random tokens, in packs of 8192.

    The update builds and tunes kernels, and measures memory. In FP8 the length of a pack is a multiple of
    FP8's blocks.
    """
    tiny, usual = {"groups": 2, "k": 2, "prompt": 8, "response": 24}, {"groups": 8, "k": 5}
    sizes: dict[str, Any] = {"prompt": 150, "response": 850, **(tiny if smoke else usual)}
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), shape)
        policy = policy_of(Path(directory), dtype, max_tokens=8192, fp8=fp8)
    rows = made_rows(vocab=shape["vocab_size"], **sizes)
    return policy, rows, policy.update(rows, at_step_start=True)


def memory_of(outcome: Any) -> dict[str, float]:
    """The memory of an update by part, in GiB."""
    return {name.split("/")[1].removesuffix("_gib"): gib for name, gib in outcome.memory.items()}


def train(shape: dict[str, Any], smoke: bool, fp8: str | None = None) -> dict[str, Any]:
    """Measure the seconds of updates after the first, in every mode of the head, and of the export."""
    on_gpu = torch.cuda.is_available()
    dtype, rounds = "bfloat16" if on_gpu else "float32", 2 if smoke else 4
    policy, rows, first = first_update(shape, smoke, fp8)
    seconds: dict[str, float] = {"update": 0.0, "optimizer": 0.0}
    apply = policy.optimizer.apply

    def timed() -> Any:
        with clock(seconds, "optimizer"):
            return apply()

    policy.optimizer.apply = timed  # type: ignore[method-assign]
    for _ in range(rounds):
        with clock(seconds, "update"):
            policy.update(rows, at_step_start=True)
    of_head = fused_head.head_seconds(policy, rows, dtype)
    seconds["head"] = rounds * of_head["weights_first"]  # the mode of the update above
    updates = {"weights_first": seconds["update"] / rounds}
    policy.optimizer.apply = apply  # type: ignore[method-assign]
    for mode, stash in (("stash", policy._stash_bytes), ("recompute", 0)):  # weights after the forward
        policy._stash_bytes = stash
        policy.update(rows, at_step_start=False)
        with clock(updates, mode):
            policy.update(rows, at_step_start=False)
    try:
        with fused_head.naive_head():
            policy.update(rows, at_step_start=True)
            with clock(updates, "naive"):
                policy.update(rows, at_step_start=True)
    except torch.OutOfMemoryError:  # the naive head's logits may not fit; the other timings stay
        updates.pop("naive", None)
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
        "times_naive": {m: updates["naive"] / t for m, t in updates.items() if m != "naive" in updates},
        "exported_gb_per_s": exported / seconds["export"] / 1e9,
        "memory_gib": memory_of(first),
        "right": bool(torch.isfinite(torch.tensor(first.update.grad_norm))) and not first.update.skipped,
    }


def print_table(report: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [(name, value) for name, value in report["machine"].items()]
    for name, result in report["results"].items():
        for key, value in flat(result):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            rows.append((f"{name}: {key}", shown))
    rows += [(f"missing: {name}", reason) for name, reason in report["missing"].items()]
    rows += [(f"FAILED: {name}", reason) for name, reason in report.get("failed", {}).items()]
    rows += [(f"completes, {name}", proof) for name, proof in report["completes"].items()]
    rows.append(("seconds", f"{report['seconds']}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def flat(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        rows += flat(value, f"{before}{name} ") if isinstance(value, dict) else [(f"{before}{name}", value)]
    return rows


if __name__ == "__main__":
    main()
