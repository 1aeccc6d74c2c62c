"""The tiny task with a GPT-OSS, a mixture of experts that the embedded engine can sample from."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers

from megatron_gvpo.verify.shrink import scatter

LAYERS, PER_TOKEN = 2, 3


def make(task: Path, directory: Path, pairs: bool = False) -> Path:
    """Copy `task` to `directory` with a GPT-OSS of random weights; returns `directory`.

    With `pairs`, the routers' scores of two experts are equal, and rounding decides which one a token goes
    through.
    """
    shutil.copytree(task, directory)
    dense = transformers.AutoConfig.from_pretrained(directory / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "vocab_size": dense.vocab_size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    experts = {"num_local_experts": 8, "num_experts_per_tok": PER_TOKEN}
    ends = {"eos_token_id": dense.eos_token_id, "pad_token_id": dense.pad_token_id}
    config = transformers.GptOssConfig(
        **sizes,
        **heads,
        **experts,
        **ends,
        initializer_range=0.15,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.GptOssForCausalLM(config)
    scatter(model)
    for layer in model.model.layers if pairs else ():
        router = layer.mlp.router
        router.weight.data[1::2] = router.weight.data[::2]
        router.bias.data[1::2] = router.bias.data[::2] + 1e-8
        for experts_of_layer in layer.mlp.experts.parameters():
            experts_of_layer.data[1::2] = experts_of_layer.data[::2] * 1.002
    (directory / "model" / "model.safetensors").unlink()
    model.save_pretrained(directory / "model")
    run = directory / "run.yaml"
    run.write_text(run.read_text().replace(str(task), str(directory)))
    return directory
