"""Measures what truncated sampling does to ratios of trainer to engine, with supports and without.

    python benchmarks/truncated_sampling.py MODEL [--top-p 0.8] [--dtype bfloat16] [--out FILE.json]

The embedded engine samples from MODEL, a Hugging Face directory, in --dtype. The head computes the log-probs
of the same tokens from transformers' hidden states in fp32: over each token's support, and over the whole
vocabulary. The ratio of a token is e^(head - engine).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.kernels.linear_logprob import linear_logprob
from megatron_gvpo.kernels.truncated_logprob import truncated_logprob
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import RolloutConfig
from megatron_gvpo.types import TrainBatch

QUESTIONS = (
    "Tell me about the town where you grew up.",
    "Why is the sky blue?",
    "What is 17 times 23? Explain each step.",
    "Write a short story about a lighthouse.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    groups = sampled(options)
    engine_r = torch.tensor([x for g in groups for r in g.rollouts for x in r.logprobs], dtype=torch.float64)
    over_support_r, over_all_r, seconds = scored(options.model, groups)
    sizes = torch.cat(
        [torch.from_numpy(r.support.arrays[0]) for g in groups for r in g.rollouts if r.support]
    )
    report = {
        "command": f"python benchmarks/truncated_sampling.py {' '.join(sys.argv[1:])}",
        "machine": {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "tokens": len(engine_r),
        "mean_support": float(sizes.double().mean()),
        "largest_support": int(sizes.max()),
        "support_of_one": float((sizes == 1).double().mean()),
        "over_support": ratios(over_support_r - engine_r),
        "over_vocabulary": ratios(over_all_r - engine_r),
        "head_seconds": seconds,
    }
    print(json.dumps(report, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


def sampled(options: argparse.Namespace) -> list[Group]:
    """Truncated responses of the embedded engine to chats."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = getattr(torch, options.dtype)
    engine = LocalModel(
        str(options.model),
        tokenizer,
        device="cpu",
        dtype=dtype,
        batch_size=64,
        end_token_ids=(tokenizer.eos_token_id,),
    )
    weights = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    engine.load(weights.state_dict().items(), version=0)
    prompts = [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in QUESTIONS
    ]
    requests = [Request(ids, options.samples, seed=i) for i, ids in enumerate(prompts)]
    sampling = RolloutConfig(top_p=options.top_p, max_tokens=options.tokens)
    rows: list[list[Rollout]] = engine.generate(requests, sampling)
    return [Group(Prompt("", ids, ""), row) for ids, row in zip(prompts, rows, strict=True)]


@torch.no_grad()
def scored(path: Path, groups: list[Group]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Log-probs over the supports and over the vocabulary, fp64 [r], and the head's seconds for each."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = PackedBatch.pack(TrainBatch.from_groups(groups))
    assert batch.supports is not None
    states = [model.model(ids[None]).last_hidden_state[0] for ids in batch.token_t.split(batch.lengths)]
    hidden_rh, weight_vh = torch.cat(states)[batch.response_r], model.lm_head.weight
    begin = time.perf_counter()
    over_support = truncated_logprob(hidden_rh, weight_vh, batch.label_r, batch.supports)
    middle = time.perf_counter()
    over_all = linear_logprob(hidden_rh, weight_vh, batch.label_r)
    seconds = {"over_support": middle - begin, "over_vocabulary": time.perf_counter() - middle}
    return over_support.logp_r.double(), over_all.logp_r.double(), seconds


def ratios(difference_r: Tensor) -> dict[str, float]:
    """Statistics of the ratios e^difference."""
    ratio_r = difference_r.exp()
    return {
        "mean": float(ratio_r.mean()),
        "largest_distance_from_1": float((ratio_r - 1).abs().max()),
        "outside_0.9_to_1.1": float(((ratio_r < 0.9) | (ratio_r > 1.1)).double().mean()),
    }


if __name__ == "__main__":
    main()
