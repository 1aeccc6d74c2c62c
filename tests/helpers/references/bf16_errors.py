"""The error of a gradient in bf16: that of transformers' model, from which a bound for others is derived."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.cases.gradient_cases import TEMPERATURE, Step, sampled_for
from helpers.references import gradient_reference as reference


def round_weights(directory: Path) -> None:
    """Round the weights of the models and adapters in `directory` to bf16: all precisions have one fp64
    gradient.
    """
    for file in directory.glob("*/*model.safetensors"):
        save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file, {"format": "pt"})


def errors(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each parameter's error, over the norm of its gradient; names as in a checkpoint."""
    return relative_errors(gradients, reference.as_in_file(exact))


def relative_errors(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {key: ((gradients[key] - exact[key]).norm() / exact[key].norm()).item() for key in exact}


def transformers_in_bf16(step: Step, directory: Path) -> dict[str, Tensor]:
    """The step's gradient by transformers' model in bf16, with the loss in fp64."""
    rows, *_ = sampled_for(step, directory)
    temperature = 1.0 if step.algorithm["recipe"] == "sft" else TEMPERATURE
    model = reference.load(directory / step.model).bfloat16()
    logp = [logp.double() for logp in reference.log_probs(model, rows, temperature)]
    step.loss(reference.sample_of(rows, logp)).backward()
    named = dict(model.named_parameters())
    zeros = {key: torch.zeros_like(parameter) for key, parameter in named.items()}
    gradients = {key: (zeros[key] if p.grad is None else p.grad).double() for key, p in named.items()}
    return reference.as_in_file(gradients)
