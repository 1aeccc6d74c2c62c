"""Computes what train.share_prompts saves in tokens and flops, by formula, and measures the time.

A group of k responses of r tokens to a prompt of p tokens has k (p + r) tokens in whole sequences, and p + k
r with a shared prompt. Matrix products take 6 flops for each parameter of the layers and token, forward and
backward. Causal attention, without recomputing, takes 12 flops for each channel of its heads and pair of
tokens that attend to each other. The head processes response tokens only, in both cases. The shape is
Qwen2.5-7B's.

The time is measured on whole updates of a small model by the real policy in one process, in turn with and
without sharing. The table says if lengths were scaled down to fit a CPU. Only the ratio applies elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

CASES = {"150+850, k=5": (150, 850, 5, 1), "4000+1000, k=8": (4000, 1000, 8, 8)}  # prompt, response, k, scale
QWEN_7B = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "ffn": 18944}
VOCAB = 152_064


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=2, help="prompts of an update (2)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the small model (256)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/shared_prompts_cpu.json")
    args = parser.parse_args()
    report: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    report["threads"] = os.environ.get("OMP_NUM_THREADS")
    cases = {}
    for name, (prompt, response, k, scale) in CASES.items():
        found = formula(prompt, response, k)
        found["cpu"] = measured(prompt // scale, response // scale, k, args) | {"lengths_divided_by": scale}
        cases[name] = found
        tokens, flops = found["tokens"], found["flops"]
        seconds = found["cpu"]["ratio"]
        print(
            f"{name}: tokens {tokens['whole']} -> {tokens['shared']} ({tokens['ratio']:.2f}), "
            f"flops with the head {flops['ratio']:.2f} of whole sequences', time on this CPU {seconds:.2f} "
            f"(lengths / {scale})"
        )
    measured_with = {"groups": args.groups, "hidden": args.hidden, "layers": 4, "rounds": args.rounds}
    report |= {"formulas": "Qwen2.5-7B", "cpu_update": measured_with, "cases": cases}
    args.out.write_text(json.dumps(report, indent=2) + "\n")


def formula(prompt: int, response: int, k: int) -> dict[str, dict[str, float]]:
    """Return tokens and flops of one group, forward and backward."""
    m = QWEN_7B
    width = m["heads"] * m["head_dim"]
    attention = m["hidden"] * (2 * width + 2 * m["kv_heads"] * m["head_dim"])
    layers = m["layers"] * (attention + 3 * m["hidden"] * m["ffn"])
    head = 6 * m["hidden"] * VOCAB * k * response

    def flops(tokens: int, pairs: float) -> float:
        return 6 * layers * tokens + 12 * m["layers"] * width * pairs + head

    def causal(n: int) -> float:
        return n * (n + 1) / 2

    tokens = {"whole": k * (prompt + response), "shared": prompt + k * response}
    pairs = {
        "whole": k * causal(prompt + response),
        "shared": causal(prompt) + k * (prompt * response + causal(response)),
    }
    of = {kind: flops(tokens[kind], pairs[kind]) for kind in tokens}
    found: dict[str, Mapping[str, float]] = {"tokens": tokens, "attention_pairs": pairs, "flops": of}
    return {name: {**v, "ratio": v["shared"] / v["whole"]} for name, v in found.items()}


def measured(prompt: int, response: int, k: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of an update, and the median of the rounds' ratios."""
    import torch
    import transformers

    from megatron_gvpo.config.schema import build_config
    from megatron_gvpo.megatron import parallel
    from megatron_gvpo.megatron.policy import Policy
    from megatron_gvpo.types import TrainBatch

    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=4,
        num_attention_heads=max(2, args.hidden // 32),
        num_key_value_heads=2,
        max_position_embeddings=prompt + response,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(512, (n,), generator=generator).tolist())

    n = args.groups * k
    prompts = [tokens(prompt) for _ in range(args.groups)]
    rows = TrainBatch(
        prompt_ids=[prompts[i // k] for i in range(n)],
        response_ids=[tokens(response) for _ in range(n)],
        group_n=torch.arange(n) // k,
        reward_n=torch.rand(n, generator=generator),
        truncated_n=torch.zeros(n, dtype=torch.bool),
    )
    with tempfile.TemporaryDirectory() as directory:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        policy = Policy(
            build_config(
                {
                    "output_dir": "unused",
                    "model": {"path": directory, "dtype": "float32"},
                    "data": {"train": {"path": "unused"}},
                    "algorithm": {"recipe": "gvpo"},
                    "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": 1 << 16},
                    "optimizer": {"lr": 1e-6},
                }
            )
        )
    rounds: list[dict[bool, float]] = []
    for i in range(args.rounds + 1):
        took = {}
        for shared in (False, True):
            policy.model.share_prompts = shared
            begin = time.perf_counter()
            policy.update(rows, at_step_start=True)
            took[shared] = time.perf_counter() - begin
        rounds += [took] if i else []  # the first round fills caches
    parallel.shut_down()
    return {
        "whole_s": median(r[False] for r in rounds),
        "shared_s": median(r[True] for r in rounds),
        "ratio": median(r[True] / r[False] for r in rounds),
    }


if __name__ == "__main__":
    main()
