"""Measures time, memory and error of the fused log-prob head, log_softmax + gather, and other fused heads.

All heads (parts/heads.py) compute the same dX and dW of sum(g * logp). Each measurement runs in a new
process, for a clean peak memory. All heads run in turn, `--rounds` times. Memory is the peak beyond the
inputs, dX and dW. Times are of one forward and backward.

On a CPU it compares the naive head and this head's modes, at one shape. A ratio is the median over the rounds
of ratios to the same round's naive time, because machines are noisy. "busy" is CPU seconds over wall seconds
times threads. If "busy" is well under 1 on a CPU, other programs used the cores, and wall times mean little.

On a GPU (`--device cuda`) it compares all installed heads in bf16, at the shapes of Qwen2.5 1.5B, 7B and 72B
and 4k, 8k and 32k tokens, or at one given shape. "useful" counts 6 T H V flops, so logits that are computed
twice count as waste. "of GEMM" is the useful rate over the rate of this device's own products of the same
shape. Errors are against fp64, on 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[..., "Tensor"]

CPU_HEADS = ("naive", "recompute", "stash", "weights_first")
CPU_SHAPE = (4096, 896, 151_936)
CPU_TARGETS = {"recompute": {"extra_mb": 450, "ratio": 1.2}, "weights_first": {"extra_mb": 450, "ratio": 1.0}}
GPU_HEADS = (
    *("naive", "compiled", "torch_linear_ce", "liger", "quack", "cce", "cce_exact"),
    *("recompute", "weights_first", "stash_2gb", "stash_10gb", "stash_quack"),
)
GPU_MODELS = {"Qwen2.5-1.5B": (1536, 151_936), "Qwen2.5-7B": (3584, 152_064), "Qwen2.5-72B": (8192, 152_064)}
GPU_TOKENS = (4096, 8192, 32_768)
# Targets at T=32768, H=3584, V=152064 on an H200. extra_mb_beyond_stash leaves out the stash's own memory.
GPU_TARGETS = {
    "stash_10gb": {"useful_tflops": 700, "times_best_peer": 1.2, "extra_mb_beyond_stash": 1000},
    "all": {"times_naive_above_2k": 1.0},
}
ERROR_TOKENS = 512


def main() -> None:
    args = parse()
    if args.head is not None:
        print(json.dumps(measure(args)))
        return
    path = args.out or Path(__file__).parent / "results" / f"linear_logprob_{args.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("--device cuda: PyTorch finds no GPU here")
        from lib.heads import NOTES

        report: dict[str, Any] = {
            "machine": machine(args),
            "heads": NOTES,
            "targets": GPU_TARGETS,
            "shapes": [],
        }
        for tokens, hidden, vocab in shapes(args):
            at = ["--tokens", str(tokens), "--hidden", str(hidden), "--vocab", str(vocab)]
            report["shapes"].append(compare_on_gpu(args, at))
            path.write_text(json.dumps(report, indent=2) + "\n")
            print_gpu_table(report["shapes"][-1])
        return
    rounds: list[dict[str, dict[str, Any]]] = []
    for i in range(args.rounds):
        rounds.append({head: run_in_process(head, sys.argv[1:]) for head in CPU_HEADS})
        if missing := [result["missing"] for result in rounds[-1].values() if "missing" in result]:
            sys.exit(missing[0])
        shown = ", ".join(f"{head} {rounds[-1][head]['wall_s']:.1f} s" for head in CPU_HEADS)
        print(f"round {i + 1}/{args.rounds}: {shown}", file=sys.stderr, flush=True)
        report = summarise_cpu(args, rounds)
        path.write_text(json.dumps(report, indent=2) + "\n")
    print_cpu_table(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32, on a GPU bfloat16"
    )
    parser.add_argument("--tokens", type=int, metavar="T")
    parser.add_argument("--hidden", type=int, metavar="H")
    parser.add_argument("--vocab", type=int, metavar="V")
    parser.add_argument(
        "--logits-mib", type=int, default=None, help="logits_bytes; default: the function's own"
    )
    parser.add_argument("--stash-mib", type=int, default=4096, help="stash_bytes of the head `stash` (4096)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, help="default: results/linear_logprob_DEVICE.json beside this file"
    )
    parser.add_argument("--head", help=argparse.SUPPRESS)  # one measurement, in this process
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def shapes(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Return (tokens, hidden, vocab) of every comparison."""
    sizes = (args.tokens, args.hidden, args.vocab)
    if args.device == "cpu" or any(sizes):
        tokens, hidden, vocab = (size or usual for size, usual in zip(sizes, CPU_SHAPE, strict=True))
        return [(tokens, hidden, vocab)]
    return [(t, h, v) for t, (h, v) in product(GPU_TOKENS, GPU_MODELS.values())]


def run_in_process(head: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return one measurement, or {"missing": reason}."""
    command = [sys.executable, __file__, *arguments, "--head", head]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or ["killed"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from lib.heads import head

    tokens, hidden, vocab = shapes(args)[0]
    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    x = torch.randn(tokens, hidden, **options).requires_grad_()
    w = torch.empty(vocab, hidden, **options).normal_(std=0.1).requires_grad_()
    labels_t = torch.randint(vocab, (tokens,), device=args.device)
    g_t = torch.randn(tokens, device=args.device)
    if args.head == "rates":
        return measure_rates(x, w)
    limit = None if args.logits_mib is None else args.logits_mib << 20
    loss = head(args.head, args.stash_mib << 20, limit)
    if args.device == "cpu":
        return measure_cpu(lambda: loss(x, w, labels_t, g_t), x, w)
    cost = measure_cuda(lambda: loss(x, w, labels_t, g_t), args.rounds, x, w)
    few = slice(0, ERROR_TOKENS)
    return cost | errors(loss, x[few], w, labels_t[few], g_t[few])


def measure_cpu(loss: Loss, *inputs: Tensor) -> dict[str, float]:
    import torch

    (torch.ones(512, 512) @ torch.ones(512, 512)).exp()  # creates thread pools and BLAS buffers
    before = memory_kib("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    gradients = torch.autograd.grad(loss(), inputs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    extra = (memory_kib("VmHWM") - before) * 1024 - sum(d.nbytes for d in gradients)
    return {"wall_s": wall, "cpu_s": cpu, "extra_mb": extra / 1e6}


def memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure_cuda(loss: Loss, rounds: int, *inputs: Tensor) -> dict[str, float]:
    import torch

    for _ in range(2):  # creates workspaces, loads and compiles kernels
        torch.autograd.grad(loss(), inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(loss(), inputs)
    extra = torch.cuda.max_memory_allocated() - before - sum(d.nbytes for d in gradients)
    del gradients
    return {
        "wall_s": seconds_on_gpu(lambda: torch.autograd.grad(loss(), inputs), rounds),
        "extra_mb": extra / 1e6,
    }


def seconds_on_gpu(work: Callable[[], Any], rounds: int) -> float:
    import torch

    seconds = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return median(seconds)


def measure_rates(x: Tensor, w: Tensor) -> dict[str, float]:
    """Measure this device's rates of copies, and of the three products that every head needs."""
    import torch

    x, w = x.detach(), w.detach()
    d = torch.randn(len(x), len(w), device=x.device, dtype=x.dtype)
    products = (lambda: torch.mm(x, w.T, out=d), lambda: d @ w, lambda: d.T @ x)
    flops = 2 * x.numel() * len(w)
    for each in products:
        each()
    seconds = [seconds_on_gpu(each, 10) for each in products]
    source = torch.empty(2 << 30, dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy = seconds_on_gpu(lambda: target.copy_(source), 10)
    return {
        "gemm_tflops": 3 * flops / sum(seconds) / 1e12,
        "logits_tflops": flops / seconds[0] / 1e12,
        "dx_tflops": flops / seconds[1] / 1e12,
        "dw_tflops": flops / seconds[2] / 1e12,
        "copy_gb_s": 2 * source.numel() / copy / 1e9,
    }


def errors(loss: Loss, x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor) -> dict[str, float]:
    """Return the errors of loss, dX and dW: largest difference from fp64 over the largest magnitude."""
    import torch
    from torch.nn.functional import cross_entropy

    value = loss(x, w, labels_t, g_t)
    gradients = torch.autograd.grad(value, (x, w))
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    exact = -(g_t.double() * cross_entropy(exact_x @ exact_w.T, labels_t, reduction="none")).sum()
    wanted = (exact.detach(), *torch.autograd.grad(exact, (exact_x, exact_w)))
    pairs = zip(("loss", "dx", "dw"), (value.detach(), *gradients), wanted, strict=True)
    return {
        f"error_{name}": float((got.double() - want).abs().max() / want.abs().max())
        for name, got, want in pairs
    }


def machine(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def compare_on_gpu(args: argparse.Namespace, shape: Sequence[str]) -> dict[str, Any]:
    """Measure all heads at one shape, each in its own process."""
    from lib.heads import OURS, PEERS

    arguments = [*sys.argv[1:], *shape]
    tokens, hidden, vocab = (int(size) for size in shape[1::2])
    rates = run_in_process("rates", arguments)
    heads = {}
    for head in GPU_HEADS:
        result = heads[head] = run_in_process(head, arguments)
        if "missing" not in result:
            result["useful_tflops"] = 6 * tokens * hidden * vocab / result["wall_s"] / 1e12
            if "missing" not in rates:
                result["of_gemm"] = result["useful_tflops"] / rates["gemm_tflops"]
        print(f"T={tokens} H={hidden} V={vocab} {head}: {result}", file=sys.stderr, flush=True)
    measured = {head: result["wall_s"] for head, result in heads.items() if "missing" not in result}
    peers = [measured[head] for head in PEERS if head in measured]
    for head in (head for head in OURS if head in measured):
        heads[head]["times_best_peer"] = min(peers) / measured[head] if peers else None
        heads[head]["times_naive"] = measured["naive"] / measured[head] if "naive" in measured else None
    return {"tokens": tokens, "hidden": hidden, "vocab": vocab, "rates": rates, "heads": heads}


def print_gpu_table(shape: dict[str, Any]) -> None:
    print(f"T={shape['tokens']} H={shape['hidden']} V={shape['vocab']}; device: {shape['rates']}")
    columns = ("wall_s", "useful_tflops", "of_gemm", "extra_mb", "error_loss", "error_dx", "error_dw")
    print(f"{'':16}" + "".join(f"{name:>15}" for name in columns))
    for head, cost in shape["heads"].items():
        shown = cost.get("missing") or "".join(f"{cost.get(name, float('nan')):>15.4g}" for name in columns)
        print(f"{head:16}{shown}")


def summarise_cpu(args: argparse.Namespace, rounds: list[dict[str, dict[str, Any]]]) -> dict:
    tokens, hidden, vocab = shapes(args)[0]
    shape = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "dtype": args.dtype}
    shape |= {"logits_mib": args.logits_mib, "stash_mib": args.stash_mib}
    on = machine(args)
    modes = {}
    threads = on["threads"]
    for mode in CPU_HEADS:
        runs = [r[mode] for r in rounds]
        modes[mode] = {
            "extra_mb": round(max(run["extra_mb"] for run in runs)),
            "wall_s": round(median(run["wall_s"] for run in runs), 3),
            "cpu_s": round(median(run["cpu_s"] for run in runs), 3),
            "busy": round(median(run["cpu_s"] / run["wall_s"] / threads for run in runs), 2),
            "wall_ratio": round(median(r[mode]["wall_s"] / r["naive"]["wall_s"] for r in rounds), 3),
            "cpu_ratio": round(median(r[mode]["cpu_s"] / r["naive"]["cpu_s"] for r in rounds), 3),
        }
    return {"machine": on, "shape": shape, "modes": modes, "targets": CPU_TARGETS, "rounds": rounds}


def print_cpu_table(report: dict) -> None:
    shape = report["shape"]
    print(f"T={shape['tokens']} H={shape['hidden']} V={shape['vocab']} {shape['dtype']}, {report['machine']}")
    print(
        f"{'':6} {'beyond in, dX, dW':>18} {'wall':>9} {'CPU':>9} {'busy':>5} "
        f"{'wall/naive':>11} {'CPU/naive':>10}"
    )
    for mode, row in report["modes"].items():
        print(
            f"{mode:6} {row['extra_mb']:>15} MB {row['wall_s']:>7.2f} s {row['cpu_s']:>7.2f} s "
            f"{row['busy']:>5.2f} "
            f"{row['wall_ratio']:>11.2f} {row['cpu_ratio']:>10.2f}"
        )


if __name__ == "__main__":
    main()
