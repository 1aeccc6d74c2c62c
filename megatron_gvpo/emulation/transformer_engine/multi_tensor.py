"""Functions over lists of tensors: Adam, norms, scaling. Source: transformer_engine/common/multi_tensor.

The chunk size only divides the work among a GPU's blocks. `noop_flag` [1] int32 is set where numbers are not
finite; the kernels that could skip their work for it do not.
"""

from __future__ import annotations

import torch

from megatron_gvpo.emulation.memory import alias
from megatron_gvpo.emulation.transformer_engine.memory import fill, read
from megatron_gvpo.emulation.transformer_engine.references import reference

Tensor = torch.Tensor
_L2_DECAY = 0  # Adam's mode that adds the decay to the gradient; the other one is AdamW


@reference
def multi_tensor_adam(
    result: None,
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """An update in place. Lists: gradients, weights, first and second moments, and maybe masters."""
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction == 1 else (1.0, 1.0)
    betas = (beta1, beta2)
    for grad, weight, first, second, *masters in zip(*tensor_lists, strict=True):
        master = masters[0] if masters else weight
        moments = (first, second)
        updated = _adam_update(
            read(grad), read(master), moments, lr, betas, epsilon, corrections, mode, weight_decay
        )
        fill(master, updated)
        fill(weight, updated)


def _adam_update(
    grad: Tensor,
    weight: Tensor,
    moments: tuple[Tensor, Tensor],
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    corrections: tuple[float, float],
    mode: int,
    decay: float,
) -> Tensor:
    """The updated weights in fp32; the moments change in their memory."""
    if mode == _L2_DECAY:
        grad = grad + decay * weight
    first = betas[0] * read(moments[0]) + (1 - betas[0]) * grad
    second = betas[1] * read(moments[1]) + (1 - betas[1]) * grad * grad
    update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + epsilon)
    if mode != _L2_DECAY:
        update = update + decay * weight
    fill(moments[0], first)
    fill(moments[1], second)
    return weight - lr * update


@reference
def multi_tensor_adam_param_remainder(
    result: None,
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam for bf16 weights whose fp32 masters are kept as the weight and the 16 bits that rounding took off.

    The weight is the master rounded to nearest, halves upwards, so a remainder of 0x8000 or more belongs to a
    weight that was rounded up.
    """
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction == 1 else (1.0, 1.0)
    betas = (beta1, beta2)
    for grad, weight, first, second, remainder in zip(*tensor_lists, strict=True):
        low = alias(remainder).to(torch.int32)
        high = alias(weight).view(torch.int16).to(torch.int32) - (low < 0).int()
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        moments = (first, second)
        updated = _adam_update(
            read(grad), master, moments, lr, betas, epsilon, corrections, mode, weight_decay
        )
        bits = updated.view(torch.int32)
        low = bits.to(torch.int16)
        alias(remainder).copy_(low)
        alias(weight).view(torch.int16).copy_((bits >> 16).to(torch.int16) + (low < 0).to(torch.int16))


@reference
def multi_tensor_l2norm(
    result: tuple[Tensor, Tensor],
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor: bool | None = None,
) -> None:
    """The L2 norm [1] of all tensors together, and maybe of each [tensors], in fp32."""
    _norms(result, noop_flag, [read(tensor) for tensor in tensor_lists[0]], per_tensor)


@reference
def multi_tensor_unscale_l2norm(
    result: tuple[Tensor, Tensor],
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> None:
    """The norm of the tensors times `inv_scale` [1]; the tensors stay."""
    scale = read(inv_scale)
    _norms(result, noop_flag, [read(tensor) * scale for tensor in tensor_lists[0]], per_tensor)


def _norms(
    result: tuple[Tensor, Tensor], noop_flag: Tensor, tensors: list[Tensor], per_tensor: bool | None
) -> None:
    norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors])
    total = torch.linalg.vector_norm(norms)
    fill(result[0], total[None])
    if per_tensor:
        fill(result[1], norms)
    if not total.isfinite():
        alias(noop_flag).fill_(1)


@reference
def multi_tensor_scale(
    result: None, chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    """Write the first list's tensors times `scale` into the second's."""
    for source, target in zip(*tensor_lists, strict=True):
        if not alias(source).isfinite().all():
            alias(is_infinite).fill_(1)
        fill(target, read(source) * scale)


@reference
def multi_tensor_scale_tensor(
    result: None, chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """The same with a scale [1] on the device."""
    multi_tensor_scale(None, chunk_size, is_infinite, tensor_lists, alias(scale).float().item())
