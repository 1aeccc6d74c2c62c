r"""Makes a small model with random weights, and arithmetic problems for it to learn.

    python examples/quickstart/make_task.py --out DIR [--seed 0]

It writes DIR/model, a Hugging Face checkpoint of Qwen2's architecture (0.8 M random parameters, one token
per character), and DIR/data with train.jsonl, validation.jsonl and test.parquet, whose prompts are all
different. A problem is a sum. Its worked solution has one operation a line:

    prompt    7+5-9=
    solution  7+5=12
              12-9=3
              \boxed{3}

Supervised fine-tuning imitates the field `demonstration`. For some problems it is the worked solution,
for the others only the final line. So the fine-tuned model does both, and is mostly wrong when it gives only
the final line. In GVPO it then learns to work step by step.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from megatron_gvpo.core.lazy_imports import heavy_imports

with heavy_imports():
    import pyarrow
    import pyarrow.parquet
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer


class Level(NamedTuple):
    share: float  # share of the problems in every split
    operands: int


# A level must have more different problems than the splits take from it.
LEVELS = {
    1: Level(share=0.25, operands=4),
    2: Level(share=0.25, operands=5),
    3: Level(share=0.25, operands=6),
    4: Level(share=0.25, operands=7),
}
HIGHEST = 9  # every intermediate result lies between 0 and this
WORKED = 0.25  # share of the demonstrations that show the intermediate steps
SIZES = {"train": 8192, "validation": 512, "test": 512}

PAD, END, BOXED = "<|pad|>", "<|end|>", "\\boxed{"
NEWLINE, SPACE = "ĊĠ"  # their symbols in byte-level BPE, which Qwen2 uses
TOKENS = [PAD, END, BOXED, "}", NEWLINE, SPACE, *"0123456789+-*="]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_model(options.out / "model", options.seed)
    make_data(options.out / "data", options.seed)


def make_model(directory: Path, seed: int, width: int = 128) -> None:
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(TOKENS)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
    )
    tokenizer.add_tokens(BOXED)
    tokenizer.save_pretrained(directory)

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.06 * (128 / width) ** 0.5,  # about 0.7 / sqrt(width): learns faster
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
        records = []
        for number in rng.choices(list(LEVELS), [level.share for level in LEVELS.values()], k=size):
            record = make_problem(LEVELS[number], rng)
            while record["prompt"] in used:  # try again on the same level, so that all splits are alike
                record = make_problem(LEVELS[number], rng)
            used.add(record["prompt"])
            shown = record["solution"] if rng.random() < WORKED else record["solution"].splitlines()[-1]
            records.append(record | {"level": number, "demonstration": shown})
        if split == "test":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), directory / "test.parquet")
        else:
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (directory / f"{split}.jsonl").write_text(lines)


def make_problem(level: Level, rng: random.Random) -> dict[str, Any]:
    value = rng.randint(0, HIGHEST)
    prompt, steps = str(value), []
    for _ in range(level.operands - 1):
        change = rng.choice([d for d in range(-9, 10) if d and 0 <= value + d <= HIGHEST])
        prompt += f"{change:+d}"
        steps.append(f"{value}{change:+d}={value + change}\n")
        value += change
    return {
        "prompt": f"{prompt}=",
        "solution": "".join(steps) + rf"\boxed{{{value}}}",
        "answer": str(value),
    }


if __name__ == "__main__":
    main()
