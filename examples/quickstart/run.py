"""Runs the quickstart: a small model learns arithmetic, first from worked solutions, then by GVPO.

    python examples/quickstart/run.py [--nproc N] [key.sub=value ...]

The arguments go to both training commands, so `--nproc 2 parallel.tp=2` runs both tensor-parallel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from megatron_gvpo.observe import time_report

HERE = Path(__file__).parent
RUN = Path("runs/quickstart")


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    arguments = sys.argv[1:]
    seconds: dict[str, float] = {}
    begin = time.perf_counter()

    def run(title: str, command: list[str]) -> None:
        print(f"\n== {title}: {' '.join(command[1:])}", flush=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True)
        seconds[title] = time.perf_counter() - start

    train = ["-m", "megatron_gvpo", "train", "--overwrite"]
    cpu = str(HERE.parent / "cpu.yaml")
    run("make the task", [str(HERE / "make_task.py"), "--out", str(RUN / "task")])
    run("warm start (SFT)", [*train, str(HERE / "sft.yaml"), cpu, *arguments])
    run("GVPO", [*train, str(HERE / "gvpo.yaml"), cpu, *arguments])

    file = RUN / "summary.json"
    summary = json.loads(file.read_text())
    summary["seconds"] |= {"total": time.perf_counter() - begin, "by_command": seconds}
    file.write_text(json.dumps(summary, indent=2) + "\n")
    before, after = summary["pass_at_1_before"], summary["pass_at_1_after"]
    print("\n== where the time went\n" + time_report(seconds, summary["seconds"]["total"]))
    print(f"\nheld-out pass@1: {before:.1%} before GVPO, {after:.1%} after {summary['steps']} steps")
    print(f"curve: {RUN}/curve.png   model: {RUN}/hf   metrics: {RUN}/metrics.jsonl")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"the quickstart stopped: `{' '.join(error.cmd[1:])}` ended with {error.returncode}")
