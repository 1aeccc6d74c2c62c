"""Compares seconds a GRPO step on CPU: TRL's GRPOTrainer and this trainer do the same work in turn.

The task is a tiny Qwen2 (4 layers, hidden 128, fp32), 32 prompts of 16 tokens x 8 responses, one optimizer
update a step, with the same responses, rewards and learning rate on both sides. Each side is a process whose
trainer runs its own loop; a callback stops it after every step until its next turn. There are three cases:

  equal   the training step on given responses of 128 tokens: advantages, packing or padding, forward,
          loss, backward, optimizer
  ragged  the same, with given responses of 4 to 128 tokens, uniform
  whole   the whole step, with each side's own sampling of 128 tokens, rewards and transfer of the weights

There is no whole ragged step, because sampling cannot stop at chosen lengths. The model's weights prevent its
end token, so that all sampled responses have full length.

The gradient norms show that both sides compute the same: they agree step by step on given responses, and each
depends on all updates before it. TRL gets its fastest settings on the machine of the committed results: no
gradient checkpointing, no reference model, and micro-batches of 64 (256 and 32 are slower). It computes the
entropy for its log, and has no option to skip that.

Ratios are TRL / ours of neighbouring steps, above 1 if ours is faster. On a machine that runs other programs,
read the median; `of_fastest`, the ratio of each side's fastest step; and `cpu_ratio`, the ratio of processor
times. The first run creates an environment with TRL in the user's cache directory (a few minutes). This
writes the committed results, three runs of all cases with the load at the beginning of each:

    python benchmarks/step_vs_trl.py --runs 3 --out benchmarks/results/step_vs_trl_cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from lib.step.task import BATCH, CASES, Case, make_material

from megatron_gvpo.core.versions import REFERENCE

ROOT = Path(__file__).parent.parent
SIDES = ROOT / "benchmarks" / "lib" / "step" / "sides.py"
PINS = tuple(f"{name}=={REFERENCE[name]}" for name in ("trl", "accelerate", "datasets"))


def main() -> None:
    args = parse()
    trl_python = make_environment()
    report: dict[str, Any] = {"machine": machine(), "settings": settings(args), "batch": BATCH, "runs": []}
    for run in range(args.runs):
        cases: dict[str, Any] = {}
        report["runs"].append(cases)
        for name in args.cases:
            load = os.getloadavg()[0]
            cases[name] = {"load": round(load, 2), **measure(name, args, trl_python)}
            print(f"run {run + 1} of {args.runs}, load {load:.1f}, ", end="")
            print_case(name, cases[name])
            report["ladder"] = ladder(report["runs"])
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=f"of {', '.join(CASES)} (8k: a vocabulary of 8192, not 64); default: all",
    )
    parser.add_argument("--runs", type=int, default=1, help="repetitions of all cases in new processes (1)")
    parser.add_argument("--rounds", type=int, default=8, help="measured steps of each side (8)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them (1)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side (2); they run in turn")
    parser.add_argument("--trl-batch", type=int, default=64, help="TRL's per_device_train_batch_size (64)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="our max_tokens_per_micro_batch (8192)")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    return parser.parse_args()


def measure(name: str, args: argparse.Namespace, trl_python: Path) -> dict[str, Any]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        make_material(Path(directory), case.vocab)
        with (
            Side("trl", trl_python, name, directory, args) as trl,
            Side("ours", Path(sys.executable), name, directory, args) as own,
        ):
            for _ in range(args.warm_up):
                trl.step(), own.step()
            rounds = []
            for i in range(args.rounds):
                rounds.append((trl.step(), own.step()))
                shown = " and ".join(f"{side['wall_s']:.1f} s" for side in rounds[-1])
                print(f"{name} {i + 1}/{args.rounds}: TRL and ours {shown}", file=sys.stderr, flush=True)
            parts = [own.step("parts")["seconds"] for _ in range(3)]
            operators = own.step("operators")["operators"]
    return summarise(case, rounds, parts, operators)


class Side:
    """One trainer's process: it takes a step on request and returns its figures."""

    def __init__(self, side: str, python: Path, case: str, directory: str, args: argparse.Namespace) -> None:
        options = ["--case", case, "--directory", directory]
        options += ["--trl-batch", str(args.trl_batch), "--max-tokens", str(args.max_tokens)]
        self._log = Path(directory) / f"{side}.log"
        self._process = subprocess.Popen(
            [str(python), str(SIDES), side, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(args.threads)},
        )

    def step(self, how: str = "plain") -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(how, file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self._log.stem} ended too early:\n{self._log.read_text()}") from None

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()  # the end of its standard input ends the process


def make_environment() -> Path:
    """Return the Python of an environment with TRL; the first call creates it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-gvpo"
    directory = cache / "-".join(PINS).replace("==", "-")
    python, complete = directory / "bin" / "python", directory / ".complete"
    if not complete.exists():
        print(f"making an environment with {', '.join(PINS)} in {cache}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
        subprocess.run([*install, "--constraints", str(ROOT / "constraints.txt"), *PINS], check=True)
        complete.touch()
    return python


def settings(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in ("threads", "trl_batch", "max_tokens")}


def machine() -> dict[str, Any]:
    versions = dict(pin.split("==") for pin in PINS)
    versions |= {name: version(name) for name in ("torch", "transformers", "megatron-core")}
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def summarise(
    case: Case, rounds: list[tuple[dict, dict]], parts: list[dict[str, float]], operators: dict[str, float]
) -> dict[str, Any]:
    median_of = {name: median(p.get(name, 0.0) for p in parts) for name in parts[0]}
    median_of["rest"] = 2 * median_of["step"] - sum(median_of.values())
    return {
        **case._asdict(),
        "trl_s": spread(trl["wall_s"] for trl, _ in rounds),
        "ours_s": spread(own["wall_s"] for _, own in rounds),
        "ratio": ratios(rounds, "wall_s"),
        "cpu_ratio": ratios(rounds, "cpu_s"),
        "grad_norm": rounds[-1][1]["grad_norm"],
        # Sampled responses differ between the sides, and so do their gradients.
        "grad_norm_difference": None
        if case.is_full_step
        else max(abs(own["grad_norm"] / trl["grad_norm"] - 1) for trl, own in rounds),
        "ours_parts_s": {name: round(value, 3) for name, value in median_of.items()},
        "ours_operators": operators,
    }


def ratios(rounds: list[tuple[dict, dict]], clock: str) -> dict[str, float]:
    fastest = [min(r[side][clock] for r in rounds) for side in (0, 1)]
    of_fastest = round(fastest[0] / fastest[1], 3)
    return spread(trl[clock] / own[clock] for trl, own in rounds) | {"of_fastest": of_fastest}


def ladder(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each case, the target and the runs' median ratios, with the load at each run's start."""
    steps = {}
    for name in runs[0]:
        of_case = [run[name] for run in runs if name in run]
        steps[name] = {"target": of_case[0]["target"]}
        steps[name] |= {key: [one[key]["median"] for one in of_case] for key in ("ratio", "cpu_ratio")}
        steps[name]["load"] = [one["load"] for one in of_case]
    return steps


def spread(values: Iterable[float]) -> dict[str, float]:
    values = sorted(values)
    return {"min": round(values[0], 3), "median": round(median(values), 3), "max": round(values[-1], 3)}


def print_case(name: str, result: dict[str, Any]) -> None:
    trl, own, ratio = (result[key] for key in ("trl_s", "ours_s", "ratio"))
    target = "" if result["target"] is None else f", target {result['target']}"
    print(
        f"{name}: TRL {trl['median']:.2f} s, ours {own['median']:.2f} s; ratio {ratio['median']:.2f} "
        f"({ratio['min']:.2f} to {ratio['max']:.2f}{target}), "
        f"of the fastest {ratio['of_fastest']:.2f}; in CPU time {result['cpu_ratio']['median']:.2f}"
    )
    if result["grad_norm_difference"] is not None:
        print(f"  gradient norms differ by at most {result['grad_norm_difference']:.0e}")
    print("  ours: " + ", ".join(f"{part} {value:.2f} s" for part, value in result["ours_parts_s"].items()))
    print("  ours: " + ", ".join(f"{name} {share:.0%}" for name, share in result["ours_operators"].items()))


if __name__ == "__main__":
    main()
