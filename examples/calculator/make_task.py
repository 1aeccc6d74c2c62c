"""Makes the calculator's material: a small model with random weights, and problems that it cannot do alone.

    python examples/calculator/make_task.py --out DIR [--seed 0]

It writes DIR/model, a Hugging Face checkpoint of Qwen2's architecture (0.8 M random parameters, one token
per character), and DIR/data with train.jsonl and test.jsonl, whose prompts are all different. A problem is a
sum of two products. The calculator of environment.py takes two operands:

    prompt         47*86+12*9=
    demonstration  (47*86)[4042](12*9)[108](4042+108)[4150]{4150}

[4042] is the calculator's answer. Three quarters of the demonstrations only give a result, {4150}, as if done
in the head. So the fine-tuned model does both, and mostly fails when it gives only the result. GVPO then
learns that asking the calculator pays.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

WITH_CALLS = 0.25  # share of the demonstrations that ask the calculator
SIZES = {"train": 16384, "test": 512}
PAD, END = "<|pad|>", "<|end|>"
TOKENS = [PAD, END, "Ċ", "Ġ", *"0123456789+-*=()[]{}E"]  # newline and space as byte-level BPE writes them
# `rollout.stop_token_ids` of gvpo.yaml has the number of ")", which ends a call.


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the calculator's model and data.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_model(options.out / "model", options.seed)
    make_data(options.out / "data", options.seed)


def make_model(directory: Path, seed: int) -> None:
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(TOKENS)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
    )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.06,  # about 1 / sqrt(hidden size): a small model learns faster with it
        tie_word_embeddings=False,
        pad_token_id=TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=TOKENS.index(END),
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def make_data(directory: Path, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    used: set[str] = set()
    for split, size in SIZES.items():
        with (directory / f"{split}.jsonl").open("w") as file:
            for _ in range(size):
                record = make_problem(rng)
                while record["prompt"] in used:
                    record = make_problem(rng)
                used.add(record["prompt"])
                file.write(json.dumps(record) + "\n")


def make_problem(rng: random.Random) -> dict[str, str]:
    a, b, c, d = (rng.randint(2, 99) for _ in range(4))
    x, y = a * b, c * d
    result = f"{{{x + y}}}"
    calls = f"({a}*{b})[{x}]({c}*{d})[{y}]({x}+{y})[{x + y}]{result}"
    shown = calls if rng.random() < WITH_CALLS else result
    return {"prompt": f"{a}*{b}+{c}*{d}=", "answer": str(x + y), "demonstration": shown}


if __name__ == "__main__":
    main()
