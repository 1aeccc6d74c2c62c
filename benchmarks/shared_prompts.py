"""Predicts the savings of train.share_prompts by the planner's formulas, and measures them on this CPU.

Whole updates of a small model by the real policy in one process take turns with and without sharing, `--runs`
times. Each run gives the ratio of CPU seconds (of this process, which other work disturbs least) and of
seconds; another update gives the peak of activations. The table also has the planner's prediction for the
same small model and lengths, and for Qwen2.5-7B, and says if lengths were scaled down to fit a CPU. Only the
ratios apply to other machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.sharing import sharing
from megatron_gvpo.planner.workload import Lengths, Workload

CASES = {"150+850, k=5": (150, 850, 5, 1), "4000+1000, k=8": (4000, 1000, 8, 8)}  # prompt, response, k, scale
MODEL = "Qwen/Qwen2.5-7B"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--groups", type=int, default=2, help="prompts of an update (2)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the small model (256)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/shared_prompts_cpu.json")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python benchmarks/shared_prompts.py",
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "cpu_update": {"groups": args.groups, "hidden": args.hidden, "layers": 4},
        "cases": {},
    }
    for name, (prompt, response, k, scale) in CASES.items():
        case: dict[str, Any] = {MODEL: predicted(MODEL, prompt, response, k)}
        case |= {"lengths_divided_by": scale} | measured(prompt // scale, response // scale, k, args)
        report["cases"][name] = case
        ratios = {key: value["ratio"] for key, value in case[MODEL].items()}
        print(f"{name}: predicted for {MODEL}, of whole sequences': {ratios}")
        print(
            f"  on this CPU, lengths / {scale}: CPU seconds {case['cpu_s']['ratio']:.2f}, activations "
            f"{case['activation_mib']['ratio']:.2f}; the planner says "
            f"{case['predicted']['flops']['ratio']:.2f} and {case['predicted']['tokens']['ratio']:.2f}"
        )
    args.out.write_text(json.dumps(report, indent=2) + "\n")


def predicted(model: str, prompt: int, response: int, k: int) -> dict[str, dict[str, float]]:
    """Return the planner's costs of one group of k responses of this length."""
    exact = Lengths(response - 1e-3, response - 1e-4, response)
    shared = sharing(architecture.load(model), Workload(1, k, prompt, exact))
    assert shared is not None
    return shared.to_dict()


def measured(prompt: int, response: int, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of updates in every run, the medians of the runs' ratios, and the prediction."""
    import torch
    import transformers

    from megatron_gvpo.megatron import parallel
    from megatron_gvpo.megatron.policy import Policy
    from megatron_gvpo.settings.config import build_config
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
        policy = Policy.of(
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
        forecast = predicted(directory, prompt, response, k)
    activations = {shared: activations_of(policy, rows, shared) for shared in (False, True)}
    runs: list[dict[str, float]] = []
    for i in range(args.runs + 1):
        run = {"load_before": round(os.getloadavg()[0], 1)}
        for shared, kind in ((False, "whole"), (True, "shared")):
            policy.model.share_prompts = shared
            begin, cpu_begin = time.perf_counter(), time.process_time()
            policy.update(rows, at_step_start=True)
            run[f"{kind}_s"] = time.perf_counter() - begin
            run[f"{kind}_cpu_s"] = time.process_time() - cpu_begin
        runs += [run] if i else []  # the first run only fills caches
    parallel.shut_down()
    return {
        "predicted": forecast,
        "cpu_s": {"ratio": median(run["shared_cpu_s"] / run["whole_cpu_s"] for run in runs)},
        "seconds": {"ratio": median(run["shared_s"] / run["whole_s"] for run in runs)},
        "activation_mib": {
            "whole": activations[False],
            "shared": activations[True],
            "ratio": activations[True] / activations[False],
        },
        "runs": runs,
    }


def activations_of(policy: Any, rows: Any, shared: bool) -> float:
    """Return the peak of activations in an update, in MiB."""
    from megatron_gvpo.megatron.memory_profile import MemoryProfile

    policy.model.share_prompts = shared
    policy._first_update_profile = lambda: MemoryProfile((policy.model, policy.optimizer))
    memory: dict[str, float] = policy.update(rows, at_step_start=True).memory
    policy._first_update_profile = lambda: None
    return 1024 * memory["memory/activations_gib"]


if __name__ == "__main__":
    main()
