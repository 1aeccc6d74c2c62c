"""Weights between a Hugging Face directory and a Megatron one, in one process, on a CPU too.

A Megatron directory is megatron-core's distributed checkpoint of the model alone: any layout loads it. The
newest `checkpoints/step_*` of a run is one, too, with more in it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from megatron_gvpo.config import ConfigError, ModelConfig, ParallelConfig, read_model_config
from megatron_gvpo.families import check_family
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.checkpoint import load_weights, weights_state
from megatron_gvpo.megatron.everywhere import everywhere
from megatron_gvpo.megatron.model import Model, build
from megatron_gvpo.megatron.saving import Writer, save_shards

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja", "generation_*")


def to_megatron(source: Path, target: Path) -> None:
    """Write the weights of the Hugging Face directory `source`. Raises ConfigError, CheckpointError."""
    model = _build(source, "SOURCE")
    target.mkdir(parents=True, exist_ok=True)

    with parallel.megatron_device():
        save_shards(f"cannot write {target}", lambda: weights_state(model), target, Writer())


def to_hugging_face(source: Path, target: Path, like: Path) -> None:
    """Write the weights of the Megatron directory `source` as a Hugging Face one.

    `like`: the Hugging Face directory that the model came from, for its configuration and tokenizer. Raises
    ConfigError, CheckpointError.
    """
    model = _build(like, "--like")

    def read() -> None:
        with parallel.megatron_device(), torch.no_grad():
            load_weights(model, dist_checkpointing.load(weights_state(model), str(source)))

    everywhere(f"cannot read {source} as weights of {like}", read)
    everywhere(f"cannot write {target}", lambda: model.save_hf(target))
    for pattern in _TOKENIZER:
        for file in like.glob(pattern):
            shutil.copy(file, target)


def _build(directory: Path, key: str) -> Model:
    config = read_model_config(str(directory), key)
    check_family(config, f"{key}={directory}")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored not in ("float32", "bfloat16"):
        raise ConfigError(f"{key}={directory}: dtype={stored} in config.json; supported: float32, bfloat16")
    layout = ParallelConfig()
    parallel.initialize(layout, seed=0)
    return build(ModelConfig(path=str(directory), dtype=stored), layout, trained=False)
