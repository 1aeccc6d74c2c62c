"""Checks that delta pushes over real training steps in bf16 are bit-exact, and measures the saved bytes.

    python benchmarks/delta_steps.py --out benchmarks/results/delta_steps_cpu.json

GVPO trains the tests' tiny model (bf16, lr 1e-6) with a real SGLang server. The delta transport sends the
weights after every step. At the end the server computes checksums of its tensors, loads the trainer's export
from files, and computes them again: an element that was missed in any step would differ.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers import tiny_run  # noqa: E402 - from tests/
from helpers.servers.real_servers import Client, checksum, running, served_config  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Delta pushes over real training steps in bf16.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = measure(Path(directory), args.steps, args.lr)
    report["command"] = " ".join(["python", "benchmarks/delta_steps.py", *sys.argv[1:]])
    report["machine"] = platform.machine()
    print(json.dumps({k: v for k, v in report.items() if k != "by_step"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["bit_exact"] else 1


def measure(folder: Path, steps: int, lr: float) -> dict[str, object]:
    task, out = folder / "task", folder / "run"
    tiny_run.make(task)
    bf16 = "model.dtype=bfloat16"
    with running("sglang", task, folder / "servers", bf16) as supervisor:
        url = supervisor.processes[0].url
        config = served_config(
            "sglang",
            task,
            out,
            bf16,
            f"rollout.servers.urls=[{url}]",
            "rollout.weights.transport=delta",
            "algorithm=gvpo",
            "train.mini_batches=2",
            f"train.steps={steps}",
            f"optimizer={{lr: {lr}, warmup_steps: 0}}",
            "data.eval=null",
        )
        tiny_run.fit(config)
        client = Client("sglang", url)
        pushed = checksum(client.loop, client.server)
        client.receiver("disk", "load_directory", out / "hf", "from files")
        bit_exact = pushed == checksum(client.loop, client.server)
        client.close()
    records = [r for r in tiny_run.records(out) if "sync/bytes" in r]
    full_bytes = sum(f.stat().st_size for f in (out / "hf").glob("*.safetensors"))
    return {
        "steps": len(records),
        "lr": lr,
        "bit_exact": bit_exact,
        "tensors_compared": len(pushed),
        "whole_bytes": full_bytes,
        "mean_bytes": mean(r["sync/bytes"] for r in records),
        "mean_share_of_bytes": mean(r["sync/bytes"] for r in records) / full_bytes,
        "mean_share_of_elements": mean(r["sync/changed"] for r in records),
        "by_step": [{"bytes": r["sync/bytes"], "changed": r["sync/changed"]} for r in records],
    }


if __name__ == "__main__":
    sys.exit(main())
