"""A small model that answers every prompt with one of a few texts, each about as often.

Runs of reinforcement learning start from it. Its answers vary, so that rewards differ, and every other token
is nearly certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from helpers.inputs.chat_tokenizer import END, ids, tokenizer

LEAD = "<|im_end|>\n<|im_start|>assistant\n"


def make(directory: Path, before: str, answers: Sequence[str], longest: int = 450, steps: int = 120) -> None:
    """Write a model with the chat tokenizer. `before`: a text like its prompts."""
    spelling = tokenizer()
    config = Qwen2Config(
        vocab_size=len(spelling),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    written = [[*ids(spelling, answer), END] for answer in answers]
    teach(model, list(ids(spelling, before)), list(ids(spelling, LEAD)), written, steps, longest)
    model.save_pretrained(directory)
    spelling.save_pretrained(directory)


def teach(
    model: PreTrainedModel,
    before: Sequence[int],
    lead: Sequence[int],
    answers: Sequence[Sequence[int]],
    steps: int,
    longest: int = 450,
) -> None:
    """Train on texts of `before`, cut to 20 to `longest` tokens, then `lead`, then one of the answers."""
    text = list(before) * (1 + longest // len(before))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        lengths = torch.randint(20, longest, (8,)).tolist()
        chosen = torch.randint(len(answers), (8,)).tolist()
        rows = [[*text[:n], *lead, *answers[i]] for n, i in zip(lengths, chosen, strict=True)]
        width = max(map(len, rows))
        token = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        label = torch.full_like(token, -100)
        for row, i in enumerate(chosen):
            label[row, -len(answers[i]) :] = token[row, -len(answers[i]) :]
        model(input_ids=token, attention_mask=(token != 0).long(), labels=label).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
