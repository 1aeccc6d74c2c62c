"""Exports gradients as weights are exported, so that they can be compared by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.megatron.model.model import Model

Export = Callable[[], Iterable[tuple[str, Tensor]]]


@torch.no_grad()
def export_gradients(model: Model, export: Export | None = None) -> dict[str, Tensor]:
    """Return the accumulated gradients under Hugging Face names. A collective.

    `export` yields the weights of a model that `model.export` cannot name completely, such as a critic. The
    gradients take the place of the weights for an export. Where Megatron-Bridge adds a constant to a weight,
    such as 1 to a norm, an export of zeros shows the constant, which is then subtracted.
    """
    for buffer in model.buffers():
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            # The distributed optimizer reduce-scatters: a rank has the sums of its own shard only.
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group)
    parameters: list[Any] = list(model.weights())
    weights = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.zero_()
    constants = _copied(export or model.export)
    for parameter in parameters:
        if parameter.requires_grad:  # other parameters have no buffer, and their gradient is 0
            parameter.copy_(parameter.main_grad)
    gradients = {name: tensor - constants[name] for name, tensor in _copied(export or model.export).items()}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return gradients


def _copied(export: Export) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in export()}
