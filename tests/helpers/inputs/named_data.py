"""Small data of the named evaluations, made by hand, with the fields of their data sets on the hub.

Each problem comes with right and wrong answers, which `MadeUpAnswers` gives in place of a policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SUMS = [(2, 3), (10, 7), (1200, 34), (5, 5), (60, 9)]
GSM8K = [
    {
        "question": f"Ann has {a} pens and gets {b} more. How many pens?",
        "answer": f"{a} + {b}\n#### {a + b:,}",
    }
    for a, b in SUMS
]
EXAMPLES = [
    {"question": f"Bob reads {a} pages, then {a}. How many pages?", "answer": f"{a} + {a}\n#### {2 * a}"}
    for a in range(1, 9)
]
MATH500 = [
    {
        "problem": f"What is {a} over {b}?",
        "solution": rf"It is $\boxed{{\frac{{{a}}}{{{b}}}}}$.",
        "answer": rf"\frac{{{a}}}{{{b}}}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": f"test/{a}.json",
    }
    for a, b in [(1, 2), (3, 4), (5, 6)]
]
AIME24 = [
    {"ID": f"2024-I-{i}", "Problem": f"Find m+n, number {i}.", "Solution": "By counting.", "Answer": 100 + i}
    for i in (1, 2, 3)
]
GPQA = [
    {
        "Question": f"Which metal is number {i}?",
        "Correct Answer": f"right metal {i}",
        "Incorrect Answer 1": f"wrong metal {i}a",
        "Incorrect Answer 2": f"wrong metal {i}b",
        "Incorrect Answer 3": f"wrong metal {i}c",
    }
    for i in range(6)
]
IFEVAL = [
    {
        "key": 1,
        "prompt": "Write about rain without commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{"num_words": None}],
    },
    {
        "key": 2,
        "prompt": "Write at least 5 words in lower case.",
        "instruction_id_list": ["length_constraints:number_words", "change_case:english_lowercase"],
        "kwargs": [{"num_words": 5, "relation": "at least"}, {"num_words": None}],
    },
]
SPLITS = {
    "gsm8k": {"test": GSM8K, "train": EXAMPLES},
    "math500": {"test": MATH500},
    "aime24": {"train": AIME24},
    "gpqa": {"train": GPQA},
    "ifeval": {"train": IFEVAL},
}


def write_data(directory: Path) -> Path:
    for name, splits in SPLITS.items():
        (directory / name).mkdir(parents=True)
        for split, records in splits.items():
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (directory / name / f"{split}.jsonl").write_text(lines)
    return directory


class MadeUpAnswers:
    """A stand-in for `evals.answers.Answers`, to test how answers are scored.

    Each of `turns` is a function of a prompt's text that gives one answer.
    """

    def __init__(self, *turns: Callable[[str], str]) -> None:
        self.n, self._turns = len(turns), turns
        self.prompts: list[str] = []
        self.until: list[str] = []

    def sample(
        self, name: str, prompts: Sequence[Sequence[int]], until: Sequence[str]
    ) -> list[list[tuple[str, str]]]:
        self.prompts, self.until = [bytes(ids).decode() for ids in prompts], list(until)
        return [[(turn(text), "stop") for turn in self._turns] for text in self.prompts]


class Bytes:
    """A tokenizer whose tokens are the bytes of the text, with a chat template's methods."""

    name_or_path = "bytes"
    chat_template = "{messages}"

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, Any]:
        ids = [list(text.encode()) for text in texts]
        return {"input_ids": ids, "special_tokens_mask": [[0] * len(row) for row in ids]}

    def apply_chat_template(self, chat: Sequence[Mapping[str, str]], **options: Any) -> str:
        text = "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in chat)
        return (
            text.removesuffix("</assistant>") if options["continue_final_message"] else f"{text}<assistant>"
        )
