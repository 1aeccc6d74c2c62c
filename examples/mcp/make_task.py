"""Makes a small model with random weights, and problems that it cannot solve without tools.

    python examples/mcp/make_task.py --out DIR [--seed 0]

It writes DIR/model, a Hugging Face checkpoint of Qwen2's architecture (0.8 M random parameters), and DIR/data
with train.jsonl and test.jsonl, whose prompts are all different. A problem is a sum of two products, such as
47*86+12*9=. The tools are those of calculator_server.py. The model writes calls as the parser `xml` reads
them, and to keep turns short, whatever is the same in every call is one token:

    <function=multiply><parameter=a> 4 7 </parameter><parameter=b> 8 6 </parameter></function> <|end|>

The chat template writes the server's answer as [4042]; the model gives the result as {4150}. It does not show
the tools' schemas, which a template of a larger model does: this model knows no letters. Three quarters of
the demonstrations give only a result, without a call. So the fine-tuned model does both, and is mostly wrong
when it gives only the result. In GVPO it then learns to call the tools.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

WITH_CALLS = 0.25  # share of the demonstrations that call tools
SIZES = {"train": 16384, "test": 512}
CALL = "<function={}><parameter=a>"
AND, DONE = "</parameter><parameter=b>", "</parameter></function>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}[{{ message.content }}]"
    "{% elif message.role == 'assistant' %}{{ message.content }}<|end|>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)


def make_model(directory: Path, seed: int) -> None:
    words = [CALL.format("add"), CALL.format("multiply"), AND, DONE]
    tokenizer = small.small_tokenizer("0123456789+-*=[]{}", words=words, template=TEMPLATE)
    small.save_small_model(tokenizer, directory, seed)


def make_data(directory: Path, seed: int) -> None:
    small.write_problems(directory, SIZES, make_problem, seed)


def make_problem(rng: random.Random) -> dict[str, str]:
    a, b, c, d = (rng.randint(2, 99) for _ in range(4))
    x, y = a * b, c * d
    result = f"{{{x + y}}}"
    calls = call("multiply", a, b, x) + call("multiply", c, d, y) + call("add", x, y, x + y)
    shown = calls + result if rng.random() < WITH_CALLS else result
    return {"prompt": f"{a}*{b}+{c}*{d}=", "answer": str(x + y), "demonstration": shown}


def call(tool: str, a: int, b: int, answer: int) -> str:
    """A turn that calls the tool, and the tool's answer, as the chat template writes them."""
    return f"{CALL.format(tool)}{a}{AND}{b}{DONE}{small.END}[{answer}]"


if __name__ == "__main__":
    small.make_material("Make the model and the data.", make_model, make_data)
