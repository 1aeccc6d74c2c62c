"""Trains a small model, by GVPO, to call the tools of an MCP server instead of guessing.

    python examples/mcp/run.py [key.sub=value ...]

The arguments go to the GVPO run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RUN = Path("runs/mcp")


def main() -> int:
    begin = time.perf_counter()
    seconds: dict[str, float] = {}

    def run(title: str, *command: str) -> None:
        print(f"\n== {title}: {' '.join(command)}", flush=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True)
        seconds[title] = time.perf_counter() - start

    train = ("-m", "megatron_gvpo", "train", "--overwrite")
    cpu = str(HERE.parent / "cpu.yaml")
    run("make the task", str(HERE / "make_task.py"), "--out", str(RUN / "task"))
    run("warm start (SFT)", *train, str(HERE / "sft.yaml"), cpu)
    server = json.dumps([{"command": [sys.executable, str(HERE / "calculator_server.py")]}])
    mine = f"rollout.conversation.mcp={server}"  # with this Python, which has the package mcp
    run("GVPO", *train, str(HERE / "gvpo.yaml"), cpu, mine, *sys.argv[1:])

    total = time.perf_counter() - begin
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    evaluated = [
        {name: line[name] for name in ("step", "eval/pass@1", "env/turns", "env/tool_calls") if name in line}
        for line in lines
        if "eval/pass@1" in line
    ]
    result = {"evaluations": evaluated, "seconds": {"total": total, "by_command": seconds}}
    (RUN / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\nstep  held-out pass@1  turns in training")
    for line in evaluated:
        turns = f"{line['env/turns']:.1f}" if "env/turns" in line else ""
        print(f"{line['step']:4}  {line['eval/pass@1']:15.1%}  {turns:>17}")
    print(f"{total:.0f} s in all: " + ", ".join(f"{title} {s:.0f} s" for title, s in seconds.items()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"the example stopped: `{' '.join(error.cmd[1:])}` ended with {error.returncode}")
