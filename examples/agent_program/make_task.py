"""Makes a small model with a chat template, and problems that it cannot solve without a calculator.

    python examples/agent_program/make_task.py --out DIR [--seed 0]

It writes DIR/model and DIR/data, with the problems of examples/calculator/make_task.py. The tokenizer has a
chat template, and a token each for the beginning and the end of a tool call in the form of Hermes:

    prompt         <|user|>47*86+12*9=<|end|><|assistant|>
    demonstration  <tool_call>{... "47*86"}}</tool_call><|end|><|tool|>4042<|end|><|assistant|> ... 4150

Three quarters of the demonstrations give only the result.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

WITH_CALLS = 0.25  # share of the demonstrations that use the calculator
SIZES = {"train": 16384, "test": 512}
USER, ASSISTANT, TOOL = "<|user|>", "<|assistant|>", "<|tool|>"
BEGIN_CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "'
END_CALL = '"}}</tool_call>'
# A model of this size knows its one tool, so the template does not describe tools.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(directory: Path, seed: int) -> None:
    marks, words = [USER, ASSISTANT, TOOL], [BEGIN_CALL, END_CALL]
    tokenizer = small.small_tokenizer("0123456789+-*=E", words=words, marks=marks, template=TEMPLATE)
    small.save_small_model(tokenizer, directory, seed)


def make_data(directory: Path, seed: int) -> None:
    small.write_problems(directory, SIZES, make_problem, seed)


def make_problem(rng: random.Random) -> dict[str, str]:
    a, b, c, d = (rng.randint(2, 99) for _ in range(4))
    x, y = a * b, c * d
    calls = "".join(
        f"{BEGIN_CALL}{call}{END_CALL}{small.END}{TOOL}{result}{small.END}{ASSISTANT}"
        for call, result in ((f"{a}*{b}", x), (f"{c}*{d}", y), (f"{x}+{y}", x + y))
    )
    shown = calls if rng.random() < WITH_CALLS else ""
    return {"prompt": f"{a}*{b}+{c}*{d}=", "answer": str(x + y), "demonstration": f"{shown}{x + y}"}


if __name__ == "__main__":
    small.make_material("Make the agent's model and data.", make_model, make_data)
