"""Makes the agent's material: a small model with a chat template, and problems that it cannot do alone.

    python examples/agent_program/make_task.py --out DIR [--seed 0]

It writes DIR/model and DIR/data, with the problems of examples/calculator/make_task.py. The tokenizer has a
chat template, and a token each for the beginning and the end of a tool call in the form of Hermes:

    prompt         <|user|>47*86+12*9=<|end|><|assistant|>
    demonstration  <tool_call>{... "47*86"}}</tool_call><|end|><|tool|>4042<|end|><|assistant|> ... 4150

Three quarters of the demonstrations only give the result.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

WITH_CALLS = 0.25  # share of the demonstrations that ask the calculator
SIZES = {"train": 16384, "test": 512}
PAD, END, USER, ASSISTANT, TOOL = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"
BEGIN_CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "'
END_CALL = '"}}</tool_call>'
TOKENS = [PAD, END, "Ċ", "Ġ", *"0123456789+-*=E"]  # newline and space as byte-level BPE writes them
# A model of this size knows its one tool, so the template does not describe tools.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the agent's model and data.")
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
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT, TOOL]})
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (BEGIN_CALL, END_CALL)])
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
    calls = "".join(
        f"{BEGIN_CALL}{call}{END_CALL}{END}{TOOL}{result}{END}{ASSISTANT}"
        for call, result in ((f"{a}*{b}", x), (f"{c}*{d}", y), (f"{x}+{y}", x + y))
    )
    shown = calls if rng.random() < WITH_CALLS else ""
    return {"prompt": f"{a}*{b}+{c}*{d}=", "answer": str(x + y), "demonstration": f"{shown}{x + y}"}


if __name__ == "__main__":
    main()
