"""Makes models of a given size for weight_sync.py: Qwen2's architecture, random weights, few tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "quickstart"))

import make_task

from megatron_gvpo.huggingface.adapter_layers import adapter_shapes
from megatron_gvpo.settings.adapter import possible_targets

WIDTHS = {50: 256, 500: 1024, 1 << 40: 2048}  # hidden size by the largest megabytes of a model


def make_model(directory: Path, megabytes: int, device: torch.device) -> dict[str, Tensor]:
    """Write a checkpoint of about this size; returns its bf16 weights by Hugging Face name, on `device`."""
    make_task.make_model(directory, seed=0)  # this model's tokenizer is used
    hidden = next(width for limit, width in WIDTHS.items() if megabytes <= limit)
    config = Qwen2Config.from_pretrained(directory)
    settings = config.to_dict() | {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "dtype": "bfloat16",
    }
    layer = hidden * (2 * hidden + hidden // 2 + 9 * hidden)  # q and o, k and v, the MLP
    settings["num_hidden_layers"] = layers = max(1, round(megabytes * 1e6 / 2 / layer))
    settings["layer_types"] = ["full_attention"] * layers
    settings["max_window_layers"] = layers
    config = Qwen2Config.from_dict(settings)
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in Qwen2ForCausalLM(config).state_dict().items()}
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weights = {name: _fill(torch.empty(shape, dtype=torch.bfloat16), noise) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(directory)
    return {name: weight.to(device) for name, weight in weights.items()}


def make_adapter(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return an adapter of this rank on all linear layers, bf16, by Hugging Face PEFT's names."""
    stored = {name: tuple(weight.shape) for name, weight in weights.items()}
    shapes, _ = adapter_shapes(stored, possible_targets("Qwen2ForCausalLM"), rank)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).mul_(0.02).bfloat16()
    return {name: _fill(torch.empty(shape, dtype=torch.bfloat16), noise) for name, shape in shapes.items()}


def change(weights: dict[str, Tensor], every: int) -> None:
    """Change every `every`-th element by a unit in its last place, like a small update."""
    for weight in weights.values():
        weight.view(-1).view(torch.int16)[::every].bitwise_xor_(1)


def _fill(tensor: Tensor, noise: Tensor) -> Tensor:
    """Fill the tensor with repeated noise, at the speed of a copy."""
    for part in tensor.view(-1).split(len(noise)):
        part.copy_(noise[: len(part)])
    return tensor
