"""Makes the material: a small model with random weights, and problems that it cannot do without tools.

    python examples/mcp/make_task.py --out DIR [--seed 0]

It writes DIR/model, a Hugging Face checkpoint of Qwen2's architecture (0.8 M random parameters), and DIR/data
with train.jsonl and test.jsonl, whose prompts are all different. A problem is a sum of two products, such as
47*86+12*9=. The tools are those of calculator_server.py. The model writes calls as the parser `xml` reads
them, and to keep turns short, whatever is the same in every call is one token:

    <function=multiply><parameter=a> 4 7 </parameter><parameter=b> 8 6 </parameter></function> <|end|>

The chat template writes the server's answer as [4042]; the model gives the result as {4150}. It does not show
the tools' schemas, which a template of a larger model does: this model knows no letters. Three quarters of
the demonstrations only give a result, as if done in the head. So the fine-tuned model does both, and mostly
fails when it gives only the result. GVPO is to find that calling the tools pays.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

WITH_CALLS = 0.25  # share of the demonstrations that call tools
SIZES = {"train": 16384, "test": 512}
PAD, END = "<|pad|>", "<|end|>"
CHARACTERS = [PAD, END, "Ċ", "Ġ", *"0123456789+-*=[]{}"]  # newline and space as byte-level BPE writes them
CALL = "<function={}><parameter=a>"
AND, DONE = "</parameter><parameter=b>", "</parameter></function>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}[{{ message.content }}]"
    "{% elif message.role == 'assistant' %}{{ message.content }}<|end|>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model and the data.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_model(options.out / "model", options.seed)
    make_data(options.out / "data", options.seed)


def make_model(directory: Path, seed: int) -> None:
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(CHARACTERS)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
    )
    written = [CALL.format("add"), CALL.format("multiply"), AND, DONE]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in written])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.06,  # about 1 / sqrt(hidden size): a small model learns faster with it
        tie_word_embeddings=False,
        pad_token_id=CHARACTERS.index(PAD),
        bos_token_id=None,
        eos_token_id=CHARACTERS.index(END),
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
    calls = call("multiply", a, b, x) + call("multiply", c, d, y) + call("add", x, y, x + y)
    shown = calls + result if rng.random() < WITH_CALLS else result
    return {"prompt": f"{a}*{b}+{c}*{d}=", "answer": str(x + y), "demonstration": shown}


def call(tool: str, a: int, b: int, answer: int) -> str:
    """A turn that calls the tool, and the tool's answer, as the chat template writes them."""
    return f"{CALL.format(tool)}{a}{AND}{b}{DONE}{END}[{answer}]"


if __name__ == "__main__":
    main()
