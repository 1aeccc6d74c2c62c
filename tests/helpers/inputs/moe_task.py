"""The tiny task with a mixture of experts."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers

LAYERS, EXPERTS, PER_TOKEN = 3, 8, 3


def make(task: Path, directory: Path, pairs: bool = False) -> Path:
    """Copy `task` to `directory` with a Qwen3-MoE of random weights; returns `directory`.

    With `pairs` the routers' scores of two experts are nearly equal, and a token goes through an odd number
    of experts, so through one of its last pair. Rounding decides which one, and so engine and trainer differ.
    The two experts of a pair differ by 0.2 %: if they differed more, the probe of the first push would report
    wrong weights.
    """
    shutil.copytree(task, directory)
    dense = transformers.AutoConfig.from_pretrained(directory / "model")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=dense.vocab_size,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=EXPERTS,
            num_experts_per_tok=PER_TOKEN,
            norm_topk_prob=True,
            max_position_embeddings=512,
            initializer_range=0.15,
            tie_word_embeddings=False,
            eos_token_id=dense.eos_token_id,
            pad_token_id=dense.pad_token_id,
            dtype="float32",
        )
    )
    for layer in model.model.layers:
        router = layer.mlp.gate.weight.data.normal_(std=0.5)
        if pairs:
            router[1::2] = router[::2] * (1 + 1e-7 * torch.randn_like(router[::2]))
            for experts in (layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data):
                experts[1::2] = experts[::2] + 0.002 * experts.std() * torch.randn_like(experts[::2])
    (directory / "model" / "model.safetensors").unlink()
    model.save_pretrained(directory / "model")
    run = directory / "run.yaml"
    run.write_text(run.read_text().replace(str(task), str(directory)))
    return directory
