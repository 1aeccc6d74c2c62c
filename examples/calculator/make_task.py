"""Makes a small model with random weights, and problems that it cannot solve without a calculator.

    python examples/calculator/make_task.py --out DIR [--seed 0]

It writes DIR/model, a Hugging Face checkpoint of Qwen2's architecture (0.8 M random parameters, one token
per character), and DIR/data with train.jsonl and test.jsonl, whose prompts are all different. A problem is a
sum of two products. The calculator of environment.py takes two operands:

    prompt         47*86+12*9=
    demonstration  (47*86)[4042](12*9)[108](4042+108)[4150]{4150}

[4042] is the calculator's answer. Three quarters of the demonstrations give only a result, {4150}, without a
call. So the fine-tuned model does both, and is mostly wrong when it gives only the result. In GVPO it then
learns to use the calculator.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

WITH_CALLS = 0.25  # share of the demonstrations that use the calculator
SIZES = {"train": 16384, "test": 512}


def make_model(directory: Path, seed: int) -> None:
    # `rollout.stop_token_ids` of gvpo.yaml has the number of ")", which ends a call.
    small.save_small_model(small.small_tokenizer("0123456789+-*=()[]{}E"), directory, seed)


def make_data(directory: Path, seed: int) -> None:
    small.write_problems(directory, SIZES, make_problem, seed)


def make_problem(rng: random.Random) -> dict[str, str]:
    a, b, c, d = (rng.randint(2, 99) for _ in range(4))
    x, y = a * b, c * d
    result = f"{{{x + y}}}"
    calls = f"({a}*{b})[{x}]({c}*{d})[{y}]({x}+{y})[{x + y}]{result}"
    shown = calls if rng.random() < WITH_CALLS else result
    return {"prompt": f"{a}*{b}+{c}*{d}=", "answer": str(x + y), "demonstration": shown}


if __name__ == "__main__":
    small.make_material("Make the calculator's model and data.", make_model, make_data)
