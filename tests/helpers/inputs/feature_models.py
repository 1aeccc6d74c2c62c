"""The tiny task with the models of test_feature_pairs.py. Four layers allow virtual pipeline stages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.references import gradient_reference as reference
from megatron_gvpo.verify.shrink import scatter

_LATENT = reference._MLA | reference._EXPERTS | reference._GROUPED


def make(task: Path, directory: Path, name: str) -> Path:
    """Copy `task` to `directory` with the model `name`; returns `directory`."""
    shutil.copytree(task, directory)
    model_directory = directory / "model"
    config = _config(name, transformers.AutoConfig.from_pretrained(model_directory))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    scatter(model)
    (model_directory / "model.safetensors").unlink()
    model.save_pretrained(model_directory)
    run = directory / "run.yaml"
    run.write_text(run.read_text().replace(str(task), str(directory)))
    return directory


def _config(name: str, of_task: Any) -> transformers.PretrainedConfig:
    own = {key: getattr(of_task, key) for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    small = {**reference.COMMON, **own, "bos_token_id": None}
    if name == "tied":
        return transformers.Qwen2Config(**{**small, "tie_word_embeddings": True})
    if name == "sinks":  # every second layer attends to the last eight tokens only
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return transformers.GptOssConfig(**small, **experts, head_dim=16, sliding_window=8)
    if name == "latent":
        return transformers.DeepseekV3Config(**{**small, **_LATENT})
    assert name == "teacher", name
    return transformers.Qwen3Config(**{**small, "hidden_size": 64}, head_dim=16)
