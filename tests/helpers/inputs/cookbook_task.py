"""A folder in which tinker-cookbook's recipes find a model and data by the names that they ask for.

The recipes name the hub's models and data sets; `transformers` and `datasets` prefer a folder of that name.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from helpers.inputs.chat_tokenizer import END, ids, tokenizer

MODEL = "Qwen/Qwen3-8B-Base"  # a name that the cookbook knows: it chooses the renderer
QUESTION = "How many apples are two and three?"
STEPS = 120  # of supervised learning, before the recipes


def make(directory: Path) -> None:
    """Write the model and the data sets, as small as they can be."""
    spelling = tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(spelling),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    _learn_to_answer(model, spelling)
    model.save_pretrained(directory / MODEL)
    spelling.save_pretrained(directory / MODEL)
    conversation = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    _write(directory / "HuggingFaceH4/no_robots/train.jsonl", [{"messages": conversation}] * 8)
    question = {"question": QUESTION, "answer": "It is\n#### 5"}
    _write(directory / "openai/gsm8k/main/train.jsonl", [question] * 8)
    _card(directory / "openai/gsm8k", "main", "train", "main/train.jsonl")
    _write(directory / "zwhe99/DeepMath-103K/train.jsonl", [{"question": "What is 1 + 1?"}] * 8)


def _learn_to_answer(model: Qwen3ForCausalLM, spelling: Qwen2Tokenizer) -> None:
    """Teach the model to answer with 5 or with 4, so that some of the answers to a prompt are right."""
    before = list(ids(spelling, f"User: {QUESTION}\n\nAssistant: It is.\n\n" * 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        lengths = torch.randint(20, 450, (8,)).tolist()
        rows = []
        for i, length in enumerate(lengths):
            answer = ids(spelling, f"\n\nAssistant: \\boxed{{{4 + i % 2}}}\n\nUser:")
            rows.append(([0] * 450 + before[:length] + list(answer))[-460:])
        token = torch.tensor(rows)
        label = token.clone()
        label[:, : -len(ids(spelling, " \\boxed{5}\n\nUser:"))] = -100
        model(input_ids=token, attention_mask=(token != 0).long(), labels=label).loss.backward()
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
