"""The task of both sides of step_vs_trl.py: a model, prompts, given responses, a reward.

At import this module needs only the standard library, because TRL's environment lacks megatron_gvpo.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

PROMPTS, RESPONSES, PROMPT_TOKENS, MAX_TOKENS, MIN_TOKENS = 32, 8, 16, 128, 4
LEARNING_RATE = 1e-4
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = {
    **MODEL,
    "dtype": "float32",
    "prompts": PROMPTS,
    "responses": RESPONSES,
    "prompt_tokens": PROMPT_TOKENS,
    "response_tokens": {"equal": MAX_TOKENS, "ragged": [MIN_TOKENS, MAX_TOKENS]},
}
FIRST_TOKEN = 0x4E00  # token i is the character chr(FIRST_TOKEN + i)


class Case(NamedTuple):
    lengths: str
    vocab: int
    target: float | None = None  # median ratio, TRL / ours
    is_full_step: bool = False


CASES = {
    "equal": Case("equal", 64, target=1.15),
    "ragged": Case("ragged", 64, target=1.9),
    "whole": Case("equal", 64, target=1.3, is_full_step=True),
    "equal_8k": Case("equal", 8192),
    "ragged_8k": Case("ragged", 8192),
}


def make_material(directory: Path, vocab: int) -> None:
    """Write a model with random weights, a tokenizer with one character a token, and prompts."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    padding, *characters = [decode([i]) for i in range(vocab - 1)]
    tokenizer = Qwen2Tokenizer(
        vocab={padding: 0}, merges=[], pad_token=padding, eos_token=None, unk_token=None
    )
    tokenizer.add_tokens(characters)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(directory / "model")

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        **MODEL,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # all tokens share a coordinate that makes the end token's logit very low
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = -10.0
    model.save_pretrained(directory / "model")

    rng = random.Random(0)
    prompts = [decode(rng.choices(range(1, vocab - 1), k=PROMPT_TOKENS)) for _ in range(64 * PROMPTS)]
    (directory / "train.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))


def given_responses(case: Case, step: int) -> list[list[list[int]]]:
    """Return the token ids of the responses to each prompt."""
    rng = random.Random(step)

    def response() -> list[int]:
        length = MAX_TOKENS if case.lengths == "equal" else rng.randint(MIN_TOKENS, MAX_TOKENS)
        return rng.choices(range(1, case.vocab - 1), k=length)

    return [[response() for _ in range(RESPONSES)] for _ in range(PROMPTS)]


def even_share(text: str) -> float:
    """Return the share of even tokens: a reward that differs between responses and costs nothing."""
    return sum(i % 2 == 0 for i in encode(text)) / max(len(text), 1)


def reward(prompt: Any, response: Any) -> float:
    """`even_share`, with the arguments that our reward workers pass."""
    return even_share(response.text)


def encode(text: str) -> list[int]:
    return [ord(character) - FIRST_TOKEN for character in text]


def decode(ids: list[int]) -> str:
    return "".join(chr(FIRST_TOKEN + i) for i in ids)
