"""Compares the planner's predictions with published times of whole steps and of their parts, misses included.

    python benchmarks/planner_accuracy.py            # the table, and benchmarks/results/planner_accuracy.json
    python benchmarks/planner_accuracy.py --check    # fails unless that file and the page agree

Steps: NeMo-RL's performance summaries (docs/about/performance-summary.md of its releases 0.4, 0.5 and 0.6;
DGX-H100, GRPO in bf16 on megatron-core with vLLM). Its recipes (examples/configs/recipes/llm/performance)
give the length of micro-batches (the longest sequence, packed), the recomputed parts, and the two scoring
passes of a step (policy and reference). Prompts have about 160 tokens. The 95th percentile of the lengths is
not published; 2.2 times the mean is assumed. NeMo-RL's time to move weights replaces ours, because we send
all of them through one rank: 5 s for an 8B and 14 s for a 70B model (the blog on its release 0.3; its issue
959), 14.2 s for DeepSeek-V3 (docs/guides/checkpoint-engine-refit.md). Rows on GB200, with FP8 rollouts and
with 8 steps ahead are left out.

Training alone: pre-training of Qwen3-235B in bf16 with the all-to-all dispatcher, or with experts on one node
(Megatron-MoE-ModelZoo, best_practice/Qwen3). Decoding alone: DeepSeek-R1 in FP8 by SGLang on 8 H200s
(InferenceX issue 870) and on 16 H100s (tt-inference-server issue 356). The planner's latency between nodes
comes from the last row; none of its other constants comes from this table.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_gvpo.planner import architecture, workload
from megatron_gvpo.planner.step_time import DecodeStep, seconds
from megatron_gvpo.planner.workload import Layout, Lengths, Workload

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planner_accuracy.json"
PAGE = ROOT / "docs" / "explanation" / "planner.md"
PROMPT = 160
WITHIN = 0.25
LLAMA, DENSE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"
A3B, A22B, V3 = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3"
SYNC = {LLAMA: 5.0, DENSE: 5.0, A3B: 5.0, A22B: 14.0, V3: 14.2}
LONGEST = {LLAMA: 4096, DENSE: 4096, A3B: 4096, A22B: 8192, V3: 1536}  # sequence, and tokens of a micro-batch
PROMPTS = {LLAMA: 64, DENSE: 64, A3B: 64, A22B: 16, V3: 32}
RESPONSES = {LLAMA: 2048, DENSE: 2048, A3B: 2048, A22B: 512, V3: 512}  # of a step; 512 of them in each update


@dataclass(frozen=True)
class Published:
    """One row of the performance summaries."""

    release: str
    model: str
    layout: Layout
    tokens: float  # the mean of a sequence
    seconds: float


def _split(gpus: int, rollout_tp: int, recompute: bool = False, **sizes: Any) -> Layout:
    half = gpus // 2
    return Layout(half, recompute=recompute, rollout_gpus=half, rollout_tp=rollout_tp, async_steps=1, **sizes)


LLAMA_16 = Layout(16, pp=2, recompute=True)
DENSE_32 = Layout(32, tp=4, pp=4, rollout_tp=4)
DENSE_64 = _split(64, 4, tp=4, pp=4)
A3B_32, A3B_SPLIT = Layout(32, ep=8, rollout_tp=2), _split(32, 2, pp=2, ep=8)
A22B_128 = Layout(128, tp=2, cp=2, pp=8, ep=16, recompute=True, rollout_tp=16)
A22B_SPLIT = _split(256, 8, recompute=True, tp=4, pp=8, ep=16)
V3_256 = Layout(256, pp=16, ep=16, recompute=True, rollout_tp=32)
V3_SPLIT = _split(512, 32, recompute=True, pp=16, ep=16)

ROWS = (
    Published("0.4", LLAMA, LLAMA_16, 1060, 97.7),
    Published("0.5", LLAMA, LLAMA_16, 1019, 92.8),
    Published("0.4", LLAMA, _split(16, 1, recompute=True, pp=2), 1129, 74.6),
    Published("0.5", LLAMA, _split(16, 1, recompute=True), 1123, 64.8),
    Published("0.4", DENSE, DENSE_32, 3206, 393),
    Published("0.5", DENSE, DENSE_32, 3251, 376),
    Published("0.4", DENSE, DENSE_64, 3207, 215),
    Published("0.5", DENSE, DENSE_64, 3252, 200),
    Published("0.4", A3B, Layout(32, tp=2, ep=8, rollout_tp=4), 3154, 225),
    Published("0.5", A3B, A3B_32, 3196, 198),
    Published("0.6", A3B, A3B_32, 3203, 192),
    Published("0.4", A3B, A3B_SPLIT, 3158, 244),
    Published("0.5", A3B, A3B_SPLIT, 3201, 154),
    Published("0.6", A3B, A3B_SPLIT, 3201, 152),
    Published("0.4", A22B, A22B_128, 5671, 506),
    Published("0.5", A22B, A22B_128, 5700, 431),
    Published("0.6", A22B, A22B_128, 5698, 395),
    Published("0.6", A22B, replace(A22B_128, gpus=256), 5713, 312),
    Published("0.4", A22B, A22B_SPLIT, 5691, 241),
    Published("0.5", A22B, A22B_SPLIT, 5707, 203),
    Published("0.6", A22B, A22B_SPLIT, 5721, 231),
    Published("0.4", V3, V3_256, 745, 154),
    Published("0.5", V3, V3_256, 744, 134),
    Published("0.6", V3, V3_256, 701, 134),
    Published("0.6", V3, replace(V3_256, gpus=512), 697, 111),
    Published("0.4", V3, V3_SPLIT, 744, 77.9),
    Published("0.5", V3, V3_SPLIT, 738, 64.9),
    Published("0.6", V3, V3_SPLIT, 710, 64.1),
)
TRAINING = (  # layout and seconds of a step of 2048 sequences of 4096 tokens
    (Layout(256, tp=2, pp=32, vpp=3, ep=8), 24.2),
    (Layout(256, tp=4, pp=8, vpp=4, ep=8), 29.0),
)
DECODING = (  # GPU, tensor-parallel ranks, responses at once, mean context, milliseconds a token
    ("h200", 8, 8, 1536, 12.8),
    ("h200", 8, 16, 1536, 17.2),
    ("h200", 8, 32, 1536, 25.6),
    ("h200", 8, 64, 1536, 34.6),
    ("h100", 16, 1, 192, 23.1),
)


def predict(row: Published) -> float:
    mean, room = row.tokens - PROMPT, LONGEST[row.model] - PROMPT
    lengths = Lengths(mean, min(room, 2.2 * mean), room)
    prompts, responses = PROMPTS[row.model], RESPONSES[row.model]
    work = Workload(prompts, responses // prompts, PROMPT, lengths, responses // 512, scoring=2.0)
    model = architecture.load(row.model)
    took = seconds(model, workload.gpu("h100"), row.layout, work, LONGEST[row.model])
    return replace(took, sync=SYNC[row.model]).step


def predict_training(layout: Layout) -> float:
    work = Workload(2048, 1, 1, Lengths(4095 - 1e-3, 4095 - 1e-4, 4095))
    took = seconds(architecture.load(A22B), workload.gpu("h100"), layout, work, 4096)
    return took.training + took.optimizer


def predict_decoding(gpu: str, tp: int, batch: int, context: int) -> float:
    """Return milliseconds a token. Double bandwidth represents FP8, which halves the bytes to read."""
    described = workload.gpu(gpu)
    halved = replace(described, memory_gb_per_s=2 * described.memory_gb_per_s)
    return 1e3 * DecodeStep(architecture.load(V3), halved, tp).seconds(batch, batch * context)


def table() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    def add(model: str, what: str, unit: str, published: float, predicted: float, source: str) -> None:
        ratio = predicted / published
        rows.append(
            {
                "model": model.split("/")[-1],
                "what": what,
                "published": f"{published:g} {unit}",
                "source": source,
                "predicted": f"{predicted:.1f} {unit}",
                "ratio": round(ratio, 2),
                "within_25_percent": abs(ratio - 1) <= WITHIN,
            }
        )

    for row in ROWS:
        add(row.model, row.layout.name, "s", row.seconds, predict(row), f"NeMo-RL {row.release}")
    for layout, published in TRAINING:
        what = f"training alone: {layout.name.split(',')[0]}"
        add(A22B, what, "s", published, predict_training(layout), "MoE-ModelZoo")
    for gpu, tp, batch, context, published in DECODING:
        what = f"decoding alone: tp{tp} on {gpu.upper()}s, {batch} at once"
        source = "InferenceX" if tp == 8 else "tt-inference-server"
        add("DeepSeek-R1, FP8", what, "ms", published, predict_decoding(gpu, tp, batch, context), source)
    return rows


def markdown(rows: list[dict[str, object]]) -> str:
    lines = ["| model | layout on H100s | published | predicted | ratio | |", "|---|---|---|---|---|---|"]
    for row in rows:
        mark = "" if row["within_25_percent"] else "**miss**"
        lines.append(
            f"| {row['model']} | {row['what']} | {row['published']} ({row['source']}) | "
            f"{row['predicted']} | {row['ratio']} | {mark} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the planner with published step times.")
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
