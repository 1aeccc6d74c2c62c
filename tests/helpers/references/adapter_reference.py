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
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    tensors = {name: t.double() for name, t in load_file(adapter / "adapter_model.safetensors").items()}
    rows, *_ = sampled_for(step, base.parent)
    stored = load_file(base / "model.safetensors")

    def merged(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = {name: weight.double() for name, weight in stored.items()}
        for name in (name for name in adapters if name.endswith(".lora_A.weight")):
            stem = name.removesuffix(".lora_A.weight")
            weights[f"{stem.removeprefix(PREFIX)}.weight"] += (
                scale * adapters[f"{stem}.lora_B.weight"] @ adapters[name]
            )
        return weights

    def model_of(weights: dict[str, Tensor]) -> Any:
        aside = adapter.with_name(f"{adapter.name}-merged")
        aside.mkdir(exist_ok=True)
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text((base / "config.json").read_text())
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(
            aside, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
        ).eval()

    model = model_of(merged(tensors))
    logp = reference.log_probs(model, rows, TEMPERATURE)
    loss = step.loss(reference.sample_of(rows, logp))
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    full = reference.as_in_file(
        {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(named.items(), gradients, strict=True)
        }
    )
    by_name: dict[str, Tensor] = {}
    for name in (name for name in tensors if name.endswith(".lora_A.weight")):
        stem = name.removesuffix(".lora_A.weight")
        a, b = tensors[name], tensors[f"{stem}.lora_B.weight"]
        g = full[f"{stem.removeprefix(PREFIX)}.weight"]
        by_name[name], by_name[f"{stem}.lora_B.weight"] = scale * b.T @ g, scale * g @ a.T
    once = dict(by_name)
    for name in [name for name in by_name if name.endswith(".lora_A.weight")]:
        first = f"{_first(name.removesuffix('.lora_A.weight'), shared)}.lora_A.weight"
        if first != name:  # a layer's gradient by the A that it shares is the sum of all
            once[first] = once[first] + once.pop(name)
    for name in (name for name in by_name if name.endswith(".lora_A.weight")):
        by_name[name] = once[f"{_first(name.removesuffix('.lora_A.weight'), shared)}.lora_A.weight"]
    norm = torch.stack([g.norm() for g in once.values()]).norm().item()
    moved = {name: t.clone() for name, t in tensors.items()}
    for name, tensor in moved.items():
        tensor.grad = by_name[name] * min(1.0, UPDATE["clip_grad"] / norm)
    torch.optim.AdamW(
        list(moved.values()), **{key: UPDATE[key] for key in ("lr", "eps", "betas", "weight_decay")}
    ).step()
    updated = {name: t.detach() for name, t in moved.items()}
    with torch.no_grad():
        updated_logp = reference.log_probs(model_of(merged(updated)), rows, TEMPERATURE)
        base_logp = reference.log_probs(reference.load(base), rows, TEMPERATURE)
    return Expected(
        torch.cat(logp).detach(),
        torch.cat(base_logp),
        loss.item(),
        by_name,
        norm,
        merged(tensors),
        updated,
        torch.cat(updated_logp),
    )
