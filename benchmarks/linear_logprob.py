"""Time and memory of the fused log-prob head, against log_softmax + gather under autograd.

Three ways to the same dX and dW of sum(w * logp), each run in a fresh process (clean peak memory), the
three in turn, `--rounds` times:

  naive  full logits, log_softmax, gather, autograd
  late   linear_logprob; w is given to the backward
  known  linear_logprob with weight_r; w is given to the forward

Memory is the peak beyond the inputs, dX and dW. Times are of one forward and backward; ratios are
medians over the rounds of ratios to the same round's naive time, because machines are noisy. "busy" is
CPU seconds over wall seconds times threads: well under 1 on a CPU, others had the cores and wall times
say little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

MODES = ("naive", "late", "known")
TARGETS = {"late": {"extra_mb": 450, "ratio": 1.2}, "known": {"extra_mb": 450, "ratio": 1.0}}


def main() -> None:
    args = parse()
    if args.mode is not None:
        print(json.dumps(measure(args)))
        return
    path = args.out or Path(__file__).parent / "results" / f"linear_logprob_{args.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, dict[str, float]]] = []
    for i in range(args.rounds):
        rounds.append({mode: run_in_process(mode, args) for mode in MODES})
        shown = ", ".join(f"{mode} {rounds[-1][mode]['wall_s']:.1f} s" for mode in MODES)
        print(f"round {i + 1}/{args.rounds}: {shown}", file=sys.stderr, flush=True)
        report = summarise(args, rounds)
        path.write_text(json.dumps(report, indent=2) + "\n")
    print_table(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=4096, metavar="T")
    parser.add_argument("--hidden", type=int, default=896, metavar="H")
    parser.add_argument("--vocab", type=int, default=151_936, metavar="V")
    parser.add_argument(
        "--logits-mib", type=int, default=None, help="logits_bytes; default: the function's own"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, help="default: results/linear_logprob_DEVICE.json beside this file"
    )
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)  # one measurement, in this process
    return parser.parse_args()


def run_in_process(mode: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def measure(args: argparse.Namespace) -> dict[str, float]:
    import torch

    from megatron_gvpo.kernels.linear_logprob import linear_logprob

    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    hidden_rh = torch.randn(args.tokens, args.hidden, **options).requires_grad_()
    weight_vh = torch.empty(args.vocab, args.hidden, **options).normal_(std=0.1).requires_grad_()
    labels_r = torch.randint(args.vocab, (args.tokens,), device=args.device)
    w_r = torch.randn(args.tokens, device=args.device)
    limit = {} if args.logits_mib is None else {"logits_bytes": args.logits_mib << 20}

    def naive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logp_rv = torch.log_softmax((x @ w.T).float(), -1)
        return (w_r * logp_rv.gather(1, labels_r[:, None])[:, 0]).sum()

    def late(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (w_r * linear_logprob(x, w, labels_r, **limit).logp_r).sum()

    def known(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        surrogate = linear_logprob(x, w, labels_r, weight_r=w_r, **limit).surrogate
        assert surrogate is not None
        return surrogate

    loss = {"naive": naive, "late": late, "known": known}[args.mode]
    if args.device == "cuda":
        return measure_cuda(lambda: loss(hidden_rh, weight_vh), hidden_rh, weight_vh)
    return measure_cpu(lambda: loss(hidden_rh, weight_vh), hidden_rh, weight_vh)


def measure_cpu(loss: Callable, *inputs) -> dict[str, float]:
    import torch

    (torch.ones(512, 512) @ torch.ones(512, 512)).exp()  # thread pools and BLAS buffers exist from here on
    before = memory_kib("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    gradients = torch.autograd.grad(loss(), inputs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    extra = (memory_kib("VmHWM") - before) * 1024 - sum(d.nbytes for d in gradients)
    return {"wall_s": wall, "cpu_s": cpu, "extra_mb": extra / 1e6}


def memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure_cuda(loss: Callable, *inputs) -> dict[str, float]:
    import torch

    torch.autograd.grad(loss(), inputs)  # warm up: cuBLAS workspaces, kernel loading
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wall, cpu = time.perf_counter(), time.process_time()
    gradients = torch.autograd.grad(loss(), inputs)
    torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    extra = torch.cuda.max_memory_allocated() - before - sum(d.nbytes for d in gradients)
    return {"wall_s": wall, "cpu_s": cpu, "extra_mb": extra / 1e6}


def summarise(args: argparse.Namespace, rounds: list[dict[str, dict[str, float]]]) -> dict:
    import torch

    machine = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    shape = {name: getattr(args, name) for name in ("tokens", "hidden", "vocab", "dtype", "logits_mib")}
    modes = {}
    threads = machine["threads"]
    for mode in MODES:
        runs = [r[mode] for r in rounds]
        modes[mode] = {
            "extra_mb": round(max(run["extra_mb"] for run in runs)),
            "wall_s": round(median(run["wall_s"] for run in runs), 3),
            "cpu_s": round(median(run["cpu_s"] for run in runs), 3),
            "busy": round(median(run["cpu_s"] / run["wall_s"] / threads for run in runs), 2),
            "wall_ratio": round(median(r[mode]["wall_s"] / r["naive"]["wall_s"] for r in rounds), 3),
            "cpu_ratio": round(median(r[mode]["cpu_s"] / r["naive"]["cpu_s"] for r in rounds), 3),
        }
    return {"machine": machine, "shape": shape, "modes": modes, "targets": TARGETS, "rounds": rounds}


def print_table(report: dict) -> None:
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
