"""The planner against published step times, with its misses.

    python benchmarks/planner_accuracy.py            # the table, and benchmarks/results/planner_accuracy.json
    python benchmarks/planner_accuracy.py --check    # fails unless that file and docs/planner.md say the same

The publications are NeMo-RL's performance summary (docs/about/performance-summary.md, DGX-H100, GRPO in bf16
on megatron-core with vLLM): its release 0.4 for lengths and layouts, and the times of that release and of a
later commit. Its settings: two scoring passes a step (policy and reference), prompts of about 160 tokens, 32
responses to each; the 95th percentile of the lengths is not published and taken as 2.2 times the mean. Its
own time for moving weights (0.2 to 14 s) stands for ours, which sends all of them through one rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_gvpo.cluster.planner import architecture, workload
from megatron_gvpo.cluster.planner.time import seconds
from megatron_gvpo.cluster.planner.workload import Layout, Lengths, Workload

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "planner_accuracy.json", ROOT / "docs" / "planner.md"
PROMPT, RESPONSES, SYNC = 160, 32, 5.0
WITHIN = 0.25


@dataclass(frozen=True)
class Published:
    model: str
    layout: Layout
    tokens: float  # of a sequence, mean
    longest: int
    prompts: int
    mini_batches: int
    micro_tokens: int
    seconds: float
    source: str


A3B, A22B, V3 = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3"
LLAMA, DENSE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"
OLD, NEW = "NeMo-RL 0.4", "NeMo-RL, 2026"


def _split(gpus: int, rollout_tp: int, **sizes: int) -> Layout:
    return Layout(gpus // 2, rollout_gpus=gpus // 2, rollout_tp=rollout_tp, async_steps=1, **sizes)


ROWS = (
    Published(LLAMA, Layout(16, pp=2), 1060, 4096, 64, 4, 8192, 97.7, OLD),
    Published(LLAMA, _split(16, 1, pp=2), 1129, 4096, 64, 4, 8192, 74.6, OLD),
    Published(DENSE, Layout(32, tp=4, pp=4, rollout_tp=4), 3206, 4096, 64, 4, 4096, 393, OLD),
    Published(DENSE, _split(64, 4, tp=4, pp=4), 3207, 4096, 64, 4, 4096, 215, OLD),
    Published(A3B, Layout(32, tp=2, ep=8, rollout_tp=4), 3154, 4096, 64, 4, 4096, 225, OLD),
    Published(A3B, Layout(32, tp=2, ep=8, rollout_tp=4), 3306, 4096, 64, 4, 4096, 192, NEW),
    Published(A3B, _split(32, 2, pp=2, ep=8), 3158, 4096, 64, 4, 4096, 244, OLD),
    Published(A3B, _split(32, 2, pp=2, ep=8), 3359, 4096, 64, 4, 4096, 152, NEW),
    Published(A22B, Layout(128, tp=2, cp=2, pp=8, ep=16, rollout_tp=16), 5671, 8192, 16, 1, 8192, 506, OLD),
    Published(A22B, Layout(128, tp=2, cp=2, pp=8, ep=16, rollout_tp=16), 5816, 8192, 16, 1, 8192, 395, NEW),
    Published(A22B, _split(256, 8, tp=4, pp=8, ep=16), 5691, 8192, 16, 1, 8192, 241, OLD),
    Published(A22B, _split(256, 8, tp=4, pp=8, ep=16), 6780, 8192, 16, 1, 8192, 231, NEW),
    Published(V3, Layout(256, pp=16, ep=16, rollout_tp=32), 745, 1536, 16, 1, 1536, 154, OLD),
    Published(V3, _split(512, 32, pp=16, ep=16), 744, 1536, 16, 1, 1536, 77.9, OLD),
)


def predict(row: Published) -> float:
    mean = row.tokens - PROMPT
    room = row.longest - PROMPT
    lengths = Lengths(mean, min(room, 2.2 * mean), room)
    work = Workload(row.prompts, RESPONSES, PROMPT, lengths, row.mini_batches, scoring=2.0)
    took = seconds(architecture.load(row.model), workload.gpu("h100"), row.layout, work, row.micro_tokens)
    return replace(took, sync=SYNC).step


def table() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for row in ROWS:
        predicted = predict(row)
        ratio = predicted / row.seconds
        rows.append(
            {
                "model": row.model.split("/")[1],
                "layout": row.layout.name,
                "published_s": row.seconds,
                "source": row.source,
                "predicted_s": round(predicted, 1),
                "ratio": round(ratio, 2),
                "within_25_percent": abs(ratio - 1) <= WITHIN,
            }
        )
    return rows


def markdown(rows: list[dict[str, object]]) -> str:
    lines = ["| model | layout on H100s | published | predicted | ratio | |", "|---|---|---|---|---|---|"]
    for row in rows:
        mark = "" if row["within_25_percent"] else "**miss**"
        lines.append(
            f"| {row['model']} | {row['layout']} | {row['published_s']} s ({row['source']}) | "
            f"{row['predicted_s']} s | {row['ratio']} | {mark} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="The planner against published step times.")
    parser.add_argument("--check", action="store_true")
    rows = table()
    if parser.parse_args().check:
        same = json.loads(RESULT.read_text()) == rows and markdown(rows) in PAGE.read_text()
        print("same" if same else f"{RESULT} and {PAGE} must have:\n{markdown(rows)}")
        return 0 if same else 1
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
