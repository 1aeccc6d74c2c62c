"""A configuration without any error, for tests that change something in it (the fixture `good`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import load_config

GOOD = """
output_dir: runs/x
model: {path: model}
data:
  train: {path: train.jsonl}
train: {steps: 20, prompts_per_step: 4, mini_batches: 2}
optimizer: {lr: 1e-5}
"""


def message(good: Path, *overrides: str) -> str:
    """The message of the error that refuses these overrides."""
    with pytest.raises(ConfigError) as error:
        load_config([good], overrides)
    return str(error.value)


SHORT = ("train.steps=2", "train.prompts_per_step=8", "optimizer.warmup_steps=0", "eval.n=1", "eval.k=[1]")
