"""Adapters in fp64: the merged model of `transformers`, and gradients by the chain rule.

W = W0 + s B A, so that dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.cases.gradient_cases import Step, sampled_for
from helpers.references import gradient_reference as reference
from helpers.workers.gradient_worker import TEMPERATURE, UPDATE

PREFIX = "base_model.model."
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Where the layers of SHARED have one A together: `lora` shares everywhere, and grouped experts always do.
Shared = Literal["everywhere", "experts", "nowhere"]


@dataclass(frozen=True)
class Expected:
    logp_r: Tensor
    base_logp_r: Tensor
    loss: float
    gradients: dict[str, Tensor]  # by PEFT's name
    norm: float
    merged: dict[str, Tensor]
    updated: dict[str, Tensor]  # adapters after one AdamW update
    updated_logp_r: Tensor


def write_adapter(
    base: Path, directory: Path, targets: tuple[str, ...], rank: int, alpha: int, shared: Shared
) -> None:
    """Write random A and B of all layers named in `targets`."""
    generator = torch.Generator().manual_seed(7)
    shapes = {name: tuple(t.shape) for name, t in load_file(base / "model.safetensors").items()}
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(shapes.items()):
        layer = name.split(".")[-2]
        if layer not in targets or not name.endswith(".weight"):
            continue
        out, width = shape
        stem = f"{PREFIX}{name.removesuffix('.weight')}"
        of_first = f"{_first(stem, shared)}.lora_A.weight"
        if of_first not in tensors:
            tensors[of_first] = torch.randn(rank, width, generator=generator) / width**0.5
        tensors[f"{stem}.lora_A.weight"] = tensors[of_first].clone()
        tensors[f"{stem}.lora_B.weight"] = 0.3 * torch.randn(out, rank, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha}
    config |= {"target_modules": list(targets), "base_model_name_or_path": str(base)}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def _first(stem: str, shared: Shared) -> str:
    """The first of the layers that have one A with this one, by PEFT's name without `.lora_A.weight`."""
    prefix, _, layer = stem.rpartition(".")
    if shared == "nowhere" or (shared == "experts" and ".experts." not in prefix):
        return stem
    return f"{prefix}.{next((parts[0] for parts in SHARED if layer in parts), layer)}"


def expected(base: Path, adapter: Path, step: Step, shared: Shared) -> Expected:
    scale, tensors = _adapter_of(adapter)
    rows, *_ = sampled_for(step, base.parent)
    merged = _merged(base, tensors, scale)
    model = _model_of(merged, base, adapter)
    logp, loss, full = _differentiate(model, step, base)
    once = _gradients_once(full, tensors, scale, shared)
    by_name = {name: once[_shared_name(name, shared)] for name in tensors}
    norm = torch.stack([g.norm() for g in once.values()]).norm().item()
    moved = {name: t.clone() for name, t in tensors.items()}
    for name, tensor in moved.items():
        tensor.grad = by_name[name] * min(1.0, UPDATE["clip_grad"] / norm)
    torch.optim.AdamW(
        list(moved.values()), **{key: UPDATE[key] for key in ("lr", "eps", "betas", "weight_decay")}
    ).step()
    updated = {name: t.detach() for name, t in moved.items()}
    with torch.no_grad():
        after = _model_of(_merged(base, updated, scale), base, adapter)
        updated_logp = reference.log_probs(after, rows, TEMPERATURE)
        base_logp = reference.log_probs(reference.load(base), rows, TEMPERATURE)
    return Expected(logp, torch.cat(base_logp), loss, by_name, norm, merged, updated, torch.cat(updated_logp))


def merged_in_bf16(base: Path, adapter: Path, step: Step, shared: Shared) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and the adapters' gradients where `transformers` has the merged weights in bf16.

    The loss and the chain rule are in fp64.
    """
    scale, tensors = _adapter_of(adapter)
    model = _model_of(_merged(base, tensors, scale), base, adapter).bfloat16()
    logp, _, full = _differentiate(model, step, base)
    once = _gradients_once({name: g.double() for name, g in full.items()}, tensors, scale, shared)
    return logp, {name: once[_shared_name(name, shared)] for name in tensors}


def _adapter_of(directory: Path) -> tuple[float, dict[str, Tensor]]:
    """The scale, and the tensors in fp64 by PEFT's names."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    return config["lora_alpha"] / config["r"], {name: t.double() for name, t in tensors.items()}


def _merged(base: Path, adapters: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    weights = {name: weight.double() for name, weight in load_file(base / "model.safetensors").items()}
    for stem in _stems(adapters):
        product = adapters[f"{stem}.lora_B.weight"] @ adapters[f"{stem}.lora_A.weight"]
        weights[f"{stem.removeprefix(PREFIX)}.weight"] += scale * product
    return weights


def _stems(adapters: dict[str, Tensor]) -> list[str]:
    end = ".lora_A.weight"
    return [name.removesuffix(end) for name in adapters if name.endswith(end)]


def _model_of(weights: dict[str, Tensor], base: Path, adapter: Path) -> Any:
    """A model of `transformers` in fp64, with these weights."""
    import transformers

    aside = adapter.with_name(f"{adapter.name}-merged")
    aside.mkdir(exist_ok=True)
    save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "config.json").write_text((base / "config.json").read_text())
    return transformers.AutoModelForCausalLM.from_pretrained(
        aside, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
    ).eval()


def _differentiate(model: Any, step: Step, base: Path) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Log-probs, the loss in fp64, and the gradients of the model's weights by their names in files."""
    rows, *_ = sampled_for(step, base.parent)
    logp = [of_row.double() for of_row in reference.log_probs(model, rows, TEMPERATURE)]
    loss = step.loss(reference.sample_of(rows, logp))
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), gradients, strict=True)
    full = {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}
    return torch.cat(logp).detach(), loss.item(), reference.as_in_file(full)


def _gradients_once(
    full: dict[str, Tensor], tensors: dict[str, Tensor], scale: float, shared: Shared
) -> dict[str, Tensor]:
    """The adapters' gradients, in which an A that layers share has the sum, under its first name alone."""
    once: dict[str, Tensor] = {}
    for stem in _stems(tensors):
        a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
        g = full[f"{stem.removeprefix(PREFIX)}.weight"]
        once[f"{stem}.lora_B.weight"] = scale * g @ a.T
        first = _shared_name(f"{stem}.lora_A.weight", shared)
        once[first] = once.get(first, 0) + scale * b.T @ g
    return once


def _shared_name(name: str, shared: Shared) -> str:
    """The name that has the tensor's gradient: of an A that layers share, the first one's."""
    stem = name.removesuffix(".lora_A.weight")
    return name if stem == name else f"{_first(stem, shared)}.lora_A.weight"
