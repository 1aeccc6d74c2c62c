"""Measures strong and weak scaling over a list of layouts: speed, time by phase, MFU, all messages.

    python benchmarks/scaling.py --out scaling.json --plot scaling.png
    python benchmarks/scaling.py --baseline benchmarks/results/scaling_cpu.json

    # On a cluster: a Slurm job for every point, and when all are done, the report:
    python benchmarks/scaling.py CONFIG.yaml --nodes 1 2 4 8 --gpu h800 --layout "parallel.tp=2" \\
        --sbatch=--partition=h800 --points shared/scaling
    python benchmarks/scaling.py --report shared/scaling --out scaling.json

Strong scaling keeps the number of prompts a step; weak scaling keeps the number of prompts a rank. Efficiency
is tokens/s a rank over that of the smallest run of the same kind. Seconds are medians over the steps,
averaged over the ranks. `other` is the rest of the step; it is negative if the medians add up to more than
the step. `waiting` is the time that ranks wait for the slowest one at the beginning of phases. Communication
inside a phase counts in the phase.

Messages are counted, not estimated, in one step after the timed ones. For dense models without context
parallelism, the messages of the updates must equal the planner's formulas byte for byte. MFU's 100 % is the
GPU's bf16 peak; on CPUs it is the measured rate of a matrix product on all ranks at once.

Without a configuration it measures the quickstart's model, with random weights, on 1, 2 and 4 ranks of this
machine. With --baseline it exits with 1 if a point is slower by more than --tolerance, or sends more bytes a
token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lib.scaling.point import PHASES, Point

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "benchmarks" / "lib" / "scaling" / "worker.py"
QUICKSTART = [ROOT / "examples/quickstart/gvpo.yaml", ROOT / "examples/cpu.yaml"]
SP = "parallel.tp=2 parallel.sequence_parallel=true"
LAYOUTS = ("", "parallel.tp=2", SP, "parallel.pp=2", "parallel.tp=2 parallel.pp=2", f"{SP} parallel.pp=2")


def main() -> int:
    args = parse()
    if args.report:
        points = [json.loads(file.read_text()) for file in args.report.glob("*.json")]
        if not points:
            raise SystemExit(f"{args.report}: no points there; the output of a failed job has the reason")
        return report(args, sorted(points, key=lambda p: (p["mode"], p["ranks"], p["layout"])))
    with tempfile.TemporaryDirectory() as scratch:
        overrides = list(args.overrides)
        if not args.config:
            overrides = [*make_task(Path(scratch)), *overrides]
        out = args.points or Path(scratch) / "points"
        done = []
        for point in plan(args):
            command = arguments(args, point, out, overrides, Path(scratch) / "run")
            if args.nodes:
                submit(args, point, command)
                continue
            run(point.ranks, command)
            done.append(json.loads((out / f"{point.name}.json").read_text()))
            speed = f"{done[-1]['tokens_per_s']:.0f} tokens/s, {done[-1]['seconds_per_step']:.2f} s a step"
            print(f"{point.name}: {speed}", file=sys.stderr, flush=True)
    if args.nodes:
        print(f"when the jobs are done: python benchmarks/scaling.py --report {out} --out FILE.json")
        return 0
    return report(args, done)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="*", help="CONFIG.yaml ... and key=value; default: the quickstart")
    parser.add_argument("--modes", nargs="+", choices=("strong", "weak"), default=["strong", "weak"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument(
        "--layout",
        action="append",
        metavar="OVERRIDES",
        help="repeatable; layouts that do not fit are left out",
    )
    parser.add_argument("--prompts", type=int, default=16, help="a step; weak: of the smallest run (16)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one to warm up (3)")
    parser.add_argument("--gpu", help="name in the planner's gpus.json; its peak is MFU's 100 %%")
    parser.add_argument("--nodes", nargs="+", type=int, help="submit Slurm jobs with these numbers of nodes")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--no-gpus", action="store_true", help="a cluster of CPUs")
    parser.add_argument("--sbatch", action="append", default=[], metavar="=--OPTION", help="repeatable")
    parser.add_argument("--dry-run", action="store_true", help="write the jobs' scripts, submit nothing")
    parser.add_argument("--points", type=Path, metavar="DIR", help="the directory for the points' results")
    parser.add_argument("--report", type=Path, metavar="DIR", help="measure nothing: report the points there")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--plot", type=Path, help="draw the results there")
    parser.add_argument("--baseline", type=Path, help="earlier results to compare with")
    parser.add_argument("--tolerance", type=float, default=0.25, help="allowed loss of tokens/s (0.25)")
    args = parser.parse_args()
    args.overrides = [word for word in args.config if "=" in word]
    args.config = [word for word in args.config if "=" not in word]
    if args.nodes and not (args.points and args.config):
        parser.error("--nodes needs a configuration, and --points DIR that all nodes see")
    return args


def plan(args: argparse.Namespace) -> list[Point]:
    """Return all points, the smallest first."""
    sizes = [n * args.ranks_per_node for n in args.nodes] if args.nodes else args.ranks
    points = []
    for mode in args.modes:
        for ranks in sorted(sizes):
            for layout in args.layout or LAYOUTS:
                factor = 1
                for word in layout.split():
                    key, value = word.split("=")
                    factor *= int(value) if key in ("parallel.tp", "parallel.pp", "parallel.cp") else 1
                if ranks % factor == 0:
                    points.append(Point(mode, ranks, layout))
    return points


def arguments(
    args: argparse.Namespace, point: Point, out: Path, overrides: Sequence[str], run_dir: Path
) -> list[str]:
    """Return the arguments of worker.py for a point."""
    smallest = min(p.ranks for p in plan(args))
    prompts = args.prompts * (point.ranks // smallest if point.mode == "weak" else 1)
    output = args.points / point.name if args.points else run_dir
    options = ["--steps", str(args.steps), *(["--gpu", args.gpu] if args.gpu else [])]
    files = [str(Path(file).resolve()) for file in args.config] or [str(file) for file in QUICKSTART]
    settings = [f"output_dir={output}", f"train.prompts_per_step={prompts}", "data.eval=null"]
    options += ["--point", json.dumps(point._asdict())]
    return [str(out / f"{point.name}.json"), *options, *files, *overrides, *settings, *point.layout.split()]


def run(ranks: int, command: Sequence[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    done = subprocess.run(
        [*torchrun, str(WORKER), *command], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def submit(args: argparse.Namespace, point: Point, command: Sequence[str]) -> None:
    """Submit a job of `megatron-gvpo slurm` that runs worker.py."""
    from megatron_gvpo.cluster import slurm
    from megatron_gvpo.cluster.slurm_job import SlurmJob, check_slurm
    from megatron_gvpo.core.errors import ConfigError
    from megatron_gvpo.settings.config import load_config

    words = [w for w in command if w.endswith((".yaml", ".yml")) or ("=" in w and w[0] != "{")]
    job = SlurmJob(
        nodes=point.ranks // args.ranks_per_node,
        ranks_per_node=args.ranks_per_node,
        gpus=not args.no_gpus,
        sbatch=tuple(args.sbatch),
        how="--overwrite",
    )
    try:
        config = load_config([w for w in words if "=" not in w], [w for w in words if "=" in w])
        check_slurm(config, job)
        script = slurm.write(config, slurm.render(config, command, job, program=str(WORKER)))
        print(script if args.dry_run else f"{point.name}: job {slurm.submit(script)}", flush=True)
    except (ConfigError, slurm.SlurmError) as error:
        raise SystemExit(f"{point.name}: {error}") from None


def make_task(directory: Path) -> list[str]:
    """Make the quickstart's model and problems; returns the overrides that name them."""
    maker = str(ROOT / "examples" / "quickstart" / "make_task.py")
    subprocess.run([sys.executable, maker, "--out", str(directory)], check=True, capture_output=True)
    data = f"data.train.path={directory}/data/train.jsonl"
    return [f"model.path={directory}/model", data, "logging.tensorboard=false", "rollout.max_tokens=64"]


def report(args: argparse.Namespace, points: list[dict[str, Any]]) -> int:
    add_efficiency(points)
    wrong = [p for p in points if p["updates_equal_formula"] is False]
    for point in wrong:
        print(f"{name_of(point)}: the messages of its updates differ from the formulas", file=sys.stderr)
    print(table(points))
    result = {
        "machine": machine(),
        "command": " ".join(["python benchmarks/scaling.py", *sys.argv[1:]]),
        "points": points,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        from lib.scaling.plot import plot

        plot(points, args.plot)
    worse = (
        compare(points, json.loads(args.baseline.read_text())["points"], args.tolerance)
        if args.baseline
        else []
    )
    print("\n".join(worse), file=sys.stderr)
    return 1 if wrong or worse else 0


def add_efficiency(points: list[dict[str, Any]]) -> None:
    """Add tokens/s a rank over that of the smallest run, the first of its mode."""
    for mode in {p["mode"] for p in points}:
        of_mode = [p for p in points if p["mode"] == mode]
        first = min(of_mode, key=lambda p: (p["ranks"], len(p["layout"])))
        for point in of_mode:
            point["efficiency"] = point["tokens_per_s_per_rank"] / first["tokens_per_s_per_rank"]


def compare(points: list[dict[str, Any]], before: list[dict[str, Any]], tolerance: float) -> list[str]:
    """Return a line for every point that is slower, or sends more, than in the baseline."""
    earlier = {name_of(p): p for p in before}
    worse = []
    for point in points:
        if (old := earlier.get(name_of(point))) is None:
            continue
        ratio = point["tokens_per_s"] / old["tokens_per_s"]
        if ratio < 1 - tolerance:
            worse.append(f"{name_of(point)}: {ratio:.2f} of the baseline's tokens/s")
        sent, used_to = (sum(m["bytes"] for m in p["messages"]) / p["tokens_per_step"] for p in (point, old))
        if sent > used_to * 1.02:
            worse.append(f"{name_of(point)}: {sent / used_to:.2f} times the baseline's bytes a token")
    return worse


def table(points: list[dict[str, Any]]) -> str:
    lines = [
        "| kind, ranks, layout | tokens/s | a rank | efficiency | MFU, training | "
        + " | ".join(f"{phase} s" for phase in PHASES)
        + " | MB a step on the wire |",
        "|---" * (6 + len(PHASES)) + "|",
    ]
    for p in points:
        phases = [f"{p['seconds'].get(phase, 0.0):.2f}" for phase in PHASES]
        wire = sum(m["wire_bytes"] for m in p["messages"]) / 1e6
        cells = [name_of(p), f"{p['tokens_per_s']:.0f}", f"{p['tokens_per_s_per_rank']:.0f}"]
        cells += [f"{p['efficiency']:.0%}", f"{p['mfu_of_training']:.0%}", *phases, f"{wire:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def name_of(point: dict[str, Any]) -> str:
    return Point(point["mode"], point["ranks"], point["layout"]).name


def machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core")},
    }


if __name__ == "__main__":
    sys.exit(main())
