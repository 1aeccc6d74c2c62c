"""GVPO in one file: every step from prompts to a better policy, in plain functions.

    make quickstart                       # once: it makes the task and a model that solves a third of it
    python examples/minimal_loop.py       # then this loop raises held-out pass@1, in minutes on a CPU

This is Algorithm 1 of the GVPO paper (arXiv 2504.19599) on one process, with the package's own blocks: its
sampler, its math reward, its columns of rows and its GVPO loss. The policy is a plain `transformers` model
and its optimizer PyTorch's AdamW. The trainer (megatron_gvpo/training/trainer.py) takes the same steps with
a Megatron model on many ranks, a head that never stores logits, and servers that sample.

Names say shapes: `_r` has an entry for every token of every response, one response after the other, and `_n`
an entry for every response.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.groups import Group, Prompt
from megatron_gvpo.rewards.math_answer import verify_math
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import requests_for
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

QUICKSTART = Path("runs/quickstart")
RESPONSES = 8  # responses to each prompt: GVPO compares them with each other
PROMPTS = 64  # prompts of a step
MINI_BATCHES = 2  # optimizer updates of a step; from the second one on, policy and reference differ
ROWS = 64  # responses in one forward pass
SAMPLING = SamplingConfig(temperature=1.0, max_tokens=96)


def main() -> int:
    parser = argparse.ArgumentParser(description="GVPO in one file.")
    parser.add_argument(
        "--model", type=Path, default=QUICKSTART / "sft" / "hf", help="a Hugging Face directory"
    )
    parser.add_argument("--train", type=Path, default=QUICKSTART / "task" / "data" / "train.jsonl")
    parser.add_argument("--test", type=Path, default=QUICKSTART / "task" / "data" / "test.parquet")
    parser.add_argument("--out", type=Path, default=Path("runs/minimal_loop"), help="gets the trained model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 1 or not 0 < options.lr < 1:
        parser.error(f"--steps {options.steps} --lr {options.lr}: want 1 step or more, and a rate in (0, 1)")
    for path in (options.model, options.train, options.test):
        if not path.exists():
            print(f"error: {path} is missing: `make quickstart` makes it", file=sys.stderr)
            return 2

    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = read_prompts(options.train, tokenizer)
    held_out = read_prompts(options.test, tokenizer)
    order = torch.randperm(len(prompts)).tolist()

    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    loss = GVPO(beta=0.1)
    sampler = LocalModel(
        str(options.model),
        tokenizer,
        device="cpu",
        dtype=torch.float32,
        batch_size=512,
        end_token_ids=(tokenizer.eos_token_id,),
    )

    print(f"before: held-out pass@1 {pass_at_1(sampler, policy, held_out):.1%}")
    for step in range(1, options.steps + 1):
        begin = time.perf_counter()
        batch = [prompts[order[i % len(order)]] for i in range((step - 1) * PROMPTS, step * PROMPTS)]

        # 1. Sample from the policy, and score: a group is the responses to one prompt.
        groups = sample(sampler, policy, batch, RESPONSES, seed=step)
        for group in groups:
            for rollout in group.rollouts:
                rollout.reward = verify_math(group.prompt, rollout)

        # 2. Freeze the reference: the log-probs of the policy at the start of the step.
        mini_batches = [
            TrainBatch.from_groups(groups[a:b])
            for a, b in pairwise(range(0, PROMPTS + 1, PROMPTS // MINI_BATCHES))
        ]
        with torch.no_grad():
            mini_batches = [rows.with_columns(ref_logp_r=log_probs(policy, rows)) for rows in mini_batches]

        # 3. Update with each mini-batch.
        for rows in mini_batches:
            value = update(policy, optimizer, loss, rows)

        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        print(
            f"step {step}: reward {sum(rewards) / len(rewards):.3f}, loss {value:.4f}, "
            f"{time.perf_counter() - begin:.1f} s",
            flush=True,
        )
    print(f"after {options.steps} steps: held-out pass@1 {pass_at_1(sampler, policy, held_out):.1%}")
    policy.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"model: {options.out}")
    return 0


def read_prompts(file: Path, tokenizer: Any) -> list[Prompt]:
    """The problems of a file, as the tokens that the policy sees."""
    if file.suffix == ".parquet":
        records = pyarrow.parquet.read_table(file).to_pylist()
    else:
        records = [json.loads(line) for line in file.read_text().splitlines()]
    prompts = []
    for number, record in enumerate(records):
        if missing := {"prompt", "answer"} - record.keys():
            sys.exit(
                f"error: {file}, record {number + 1}: there is no field {' and no '.join(sorted(missing))}"
            )
        text = record["prompt"]
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        token_ids = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
        prompts.append(
            Prompt(f"{file.name}:{number}", tuple(token_ids), record["prompt"], str(record["answer"]))
        )
    return prompts


def sample(
    sampler: LocalModel, policy: torch.nn.Module, prompts: Sequence[Prompt], n: int, seed: int
) -> list[Group]:
    """`n` responses of the policy to each prompt. The sampler has a copy of the weights, as a server has."""
    sampler.load(policy.state_dict().items(), version=seed)
    rollouts = sampler.generate(requests_for(prompts, n, seed), SAMPLING)
    return [Group(prompt, responses) for prompt, responses in zip(prompts, rollouts, strict=True)]


def log_probs(policy: torch.nn.Module, rows: TrainBatch) -> Tensor:
    """log pi(token | tokens before it) of every response token, fp32 [r].

    This stores the logits of whole micro-batches: 150,000 floats a token for a large vocabulary. The
    package's head (docs/explanation/head.md) computes the same numbers without them.
    """
    parts = []
    pairs = iter(zip(rows.prompt_ids, rows.response_ids, strict=True))
    while chunk := list(islice(pairs, ROWS)):
        longest = max(len(prompt) + len(response) for prompt, response in chunk)
        ids = torch.zeros(len(chunk), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, (prompt, response) in enumerate(chunk):  # padded on the right, where no token looks
            ids[i, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
            mask[i, : len(prompt) + len(response)] = 1
        logits = policy(input_ids=ids, attention_mask=mask).logits.float() / SAMPLING.temperature
        logp = F.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        for i, (prompt, response) in enumerate(chunk):  # the token at position p is predicted at p - 1
            parts.append(logp[i, len(prompt) - 1 : len(prompt) - 1 + len(response)])
    return torch.cat(parts)


def update(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: GVPO, rows: TrainBatch) -> float:
    """One optimizer update on whole groups; returns the loss before it.

    GVPO regresses the centred implicit reward beta (l - l_ref) on the centred reward, where l is the sum of a
    response's log-probs: the loss below is 1/2 sum_i [(R_i - R) - beta (d_i - d)]^2 / (k - 1), a mean over
    groups. Its minimum is the policy that is optimal for the reward and the KL to the reference.
    """
    value, _ = loss(LossInputs(rows, log_probs(policy, rows), BatchTotals.of(rows)))
    optimizer.zero_grad()
    value.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return value.item()


def pass_at_1(sampler: LocalModel, policy: torch.nn.Module, prompts: Sequence[Prompt]) -> float:
    """The share of right answers among 4 samples of every held-out prompt."""
    groups = sample(sampler, policy, prompts, 4, seed=0)
    right = [verify_math(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return sum(right) / len(right)


if __name__ == "__main__":
    sys.exit(main())
