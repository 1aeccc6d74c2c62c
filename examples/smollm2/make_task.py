"""Makes the sums that SmolLM2 learns: lines {"prompt", "answer"} to train on, and held-out ones.

    python examples/smollm2/make_task.py --out DIR [--seed 0]

A held-out problem has two numbers that no training problem has together, in either order. No answer is a
number of its question. There are many stories about two numbers and few plain questions, so four in five
training problems are stories, and 7 % are differences.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LOWEST, HIGHEST = 2, 15
HELD_OUT = 0.2  # share of the pairs of numbers that is held out
SIZES = {"train": 1024, "test": 128}
NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Eva")
THINGS = ("apples", "books", "coins", "pens", "shells", "cards")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the sums that SmolLM2 learns.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_task(options.out, options.seed)


def make_task(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(LOWEST, HIGHEST + 1) for b in range(LOWEST, a)]
    rng.shuffle(pairs)
    count = round(HELD_OUT * len(pairs))
    for split, of_split in (("train", pairs[count:]), ("test", pairs[:count])):
        problems: dict[str, str] = {}  # answers by prompt
        while len(problems) < SIZES[split]:
            prompt, answer = make_problem(*rng.choice(of_split), rng)
            problems[prompt] = answer
        lines = "".join(
            json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in problems.items()
        )
        (directory / f"{split}.jsonl").write_text(lines)


def make_problem(larger: int, smaller: int, rng: random.Random) -> tuple[str, str]:
    """Return a question about two numbers, and its answer."""
    kind = rng.choice(("sum", "difference", "story"))
    if kind == "difference" and larger != 2 * smaller:  # the answer would be one of the question's numbers
        return f"What is {larger} - {smaller}?", str(larger - smaller)
    first, second = rng.sample((larger, smaller), 2)
    answer = str(first + second)
    if kind != "story":
        return f"What is {first} + {second}?", answer
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    question = f"How many {things} does {name} have now?"
    return f"{name} has {first} {things} and gets {second} more. {question}", answer


if __name__ == "__main__":
    main()
