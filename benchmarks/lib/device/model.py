"""Models for the device's checks: random weights in Qwen2.5's shapes, made-up rows, and a clock."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.settings.config import build_config
from megatron_gvpo.types import TrainBatch

QWEN = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SHAPES = {
    "qwen2.5-1.5b": {**QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    "7b, 8 layers": {
        **{**QWEN, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 8},
    },
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def update_flops(shape: dict[str, Any], rows: TrainBatch) -> float:
    """Return an update's flops: 6 per parameter and token, and in attention 12 per channel and token pair."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    width = hidden // heads * (heads + shape["num_key_value_heads"])
    layer = 2 * hidden * width + 3 * hidden * shape["intermediate_size"]
    lengths = [len(p) + len(r) - 1 for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True)]
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    of_layers = shape["num_hidden_layers"] * (6 * layer * sum(lengths) + 12 * hidden * pairs)
    return of_layers + 6 * hidden * shape["vocab_size"] * int(rows.length_n.sum())


def save_model(folder: Path, shape: dict[str, Any]) -> None:
    import transformers

    config = transformers.Qwen2Config(**shape, max_position_embeddings=2048, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def policy_of(
    folder: Path,
    dtype: str,
    max_tokens: int,
    fp8: str | None = None,
    sections: dict[str, dict[str, Any]] | None = None,
    share_prompts: bool = False,
) -> Policy:
    """Build a policy; `sections` replace these sections of the configuration."""
    return Policy.of(
        build_config(
            {
                "output_dir": "unused",
                "model": {"path": str(folder), "dtype": dtype, "fp8": {"recipe": fp8} if fp8 else None},
                "data": {"train": {"path": "unused"}},
                "algorithm": {"recipe": "gvpo"},
                "train": {
                    **{"steps": 1, "prompts_per_step": 1, "share_prompts": share_prompts},
                    "max_tokens_per_micro_batch": max_tokens,
                },
                "optimizer": {"lr": 1e-6},
                **(sections or {}),
            }
        )
    )


def made_rows(
    groups: int, k: int, prompt: int, response: int, vocab: int, ragged: bool = False
) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab, (n,), generator=generator).tolist())

    n = groups * k
    prompts = [tokens(prompt) for _ in range(groups)]
    return TrainBatch(
        prompt_ids=[prompts[i // k] for i in range(n)],
        response_ids=[tokens(response - i % response // 2 if ragged else response) for i in range(n)],
        group_n=torch.arange(n) // k,
        reward_n=torch.rand(n, generator=generator),
        truncated_n=torch.zeros(n, dtype=torch.bool),
    )


def clean_up() -> None:
    parallel.shut_down()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class clock:  # noqa: N801 - reads as a statement
    """Context that adds its seconds to `into[name]`, the device's work included."""

    def __init__(self, into: dict[str, float], name: str) -> None:
        self._into, self._name = into, name

    def __enter__(self) -> None:
        synchronize()
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        synchronize()
        self._into[self._name] = self._into.get(self._name, 0.0) + time.perf_counter() - self._begin


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
