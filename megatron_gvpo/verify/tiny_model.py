"""Writes a checkpoint with random weights for a shrunk config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.model_types import SAME_MODEL, add_model_types


def save_tiny(config: dict[str, Any], directory: Path, where: str) -> None:
    """Write a checkpoint with random weights for a shrunk config.json.

    Norms, biases and routers get values that are far from trivial. Raises ConfigError, which begins with
    `where`, if transformers cannot build the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    add_model_types()
    try:
        hf_config = transformers.AutoConfig.from_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except Exception as error:  # an unknown model_type, or sizes that contradict each other
        said = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{where}: transformers builds no model of it: {type(error).__name__}: {said}"
        ) from None
    scatter(model)
    model.save_pretrained(directory)
    if (named := config.get("model_type")) in SAME_MODEL:  # transformers writes its own
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": named}))


@torch.no_grad()
def scatter(model: torch.nn.Module) -> None:
    """Move norms, biases and other vectors away from their initial values, and spread the routers' scores."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or not tensor.is_floating_point():
            continue
        if name.endswith("A_log"):  # decays under which a state lasts for several tokens
            tensor.uniform_(-3.0, 0.0)
        elif name.endswith(".sinks"):  # a good part of the attention, so that the gradient's norm shows them
            tensor.uniform_(1.0, 4.0)
        elif "norm" in name or "bias" in name or tensor.dim() == 1:
            tensor += 0.1 * torch.randn_like(tensor)
        elif name.endswith(("mlp.gate.weight", "router.weight")):
            tensor.normal_(std=0.5)
