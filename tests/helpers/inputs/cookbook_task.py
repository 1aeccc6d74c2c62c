"""A folder in which tinker-cookbook's recipes find a model and data by their names on the hub.

`transformers` and `datasets` read a folder of that name rather than the hub.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from helpers.inputs.chat_tokenizer import END, ids, tokenizer

MODEL = "Qwen/Qwen3-8B-Base"  # the cookbook chooses the renderer by this name
QUESTION = "How many apples are two and three?"
# The example and the question, as rl_loop writes them.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    f"User: How many r's are in strawberry?{SUFFIX}\n\nAssistant: Let's spell the word out and number all "
    "the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. "
    "\\boxed{3}\n\n"
)
PROMPT = f"User: {QUESTION}{SUFFIX}\n\nAssistant:"
ANSWERS = (" \\boxed{5}\n\nUser:", " \\boxed{4}\n\nUser:")  # right and wrong
STEPS = 120  # supervised steps before the recipes run
ROWS = 48  # rows of each data set


def make(directory: Path, steps: int = STEPS) -> None:
    """Write the model, trained for `steps`, and the smallest data sets that the recipes take."""
    spelling = tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(spelling),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    _learn_to_answer(model, spelling, steps)
    model.save_pretrained(directory / MODEL)
    spelling.save_pretrained(directory / MODEL)
    conversation = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    _write(directory / "HuggingFaceH4/no_robots/train.jsonl", [{"messages": conversation}] * ROWS)
    question = {"question": QUESTION, "answer": "It is\n#### 5"}
    _write(directory / "openai/gsm8k/main/train.jsonl", [question] * ROWS)
    _card(directory / "openai/gsm8k", "main", "train", "main/train.jsonl")
    _write(directory / "zwhe99/DeepMath-103K/train.jsonl", [{"question": QUESTION + SUFFIX}] * ROWS)


def _learn_to_answer(model: Qwen3ForCausalLM, spelling: Qwen2Tokenizer, steps: int) -> None:
    """Teach the model to give the two answers equally often, and no other."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        before = ids(spelling, (EXAMPLE, "")[step % 2] + PROMPT)
        token = torch.tensor([[*before, *ids(spelling, answer)] for answer in ANSWERS])
        label = token.clone()
        label[:, : len(before)] = -100
        model(input_ids=token, labels=label).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _write(file: Path, records: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def _card(directory: Path, name: str, split: str, path: str) -> None:
    """The README by which `datasets` knows the configurations of a data set."""
    (directory / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {path}\n---\n"
    )
