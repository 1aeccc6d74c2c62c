"""Functions over lists of tensors: Adam, norms, scaling. Source: transformer_engine/common/multi_tensor.

`chunk_size` divides the work among a GPU's blocks and does not change the result. `noop_flag` [1] int32 is
set to 1 if a number is not finite; as in Transformer Engine, no kernel skips its work because of the flag.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_gvpo.emulation.transformer_engine.references import fill, read, reference
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor
_L2_DECAY = 0  # the mode in which Adam adds the weight decay to the gradient; the other mode is AdamW


class _Adam(NamedTuple):
    """The options of Adam's functions, in the order of their arguments."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    step: int
    mode: int
    bias_correction: int
    weight_decay: float

    def update(self, grad: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return the updated weights in fp32, and update the moments in place."""
        is_corrected = self.bias_correction == 1
        if self.mode == _L2_DECAY:
            grad = grad + self.weight_decay * weight
        mean = self.beta1 * read(first) + (1 - self.beta1) * grad
        square = self.beta2 * read(second) + (1 - self.beta2) * grad * grad
        fill(first, mean)
        fill(second, square)
        if is_corrected:
            mean = mean / (1 - self.beta1**self.step)
            square = square / (1 - self.beta2**self.step)
        update = mean / (square.sqrt() + self.epsilon)
        if self.mode != _L2_DECAY:
            update = update + self.weight_decay * weight
        return weight - self.lr * update


@reference
def multi_tensor_adam(
    result: None,
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    *options: Any,
) -> None:
    """Update in place. The lists: gradients, weights, first and second moments, and optional fp32 masters."""
    adam = _Adam(*options)
    for grad, weight, first, second, *masters in zip(*tensor_lists, strict=True):
        master = masters[0] if masters else weight
        updated = adam.update(read(grad), read(master), first, second)
        fill(master, updated)
        fill(weight, updated)


@reference
def multi_tensor_adam_param_remainder(
    result: None,
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    *options: Any,
) -> None:
    """Adam for bf16 weights whose fp32 master is stored as the weight and the 16 bits that rounding removed.

    The weight is the master rounded to nearest, with halves rounded up. So if the remainder is 0x8000 or
    more, the weight was rounded up.
    """
    adam = _Adam(*options)
    for grad, weight, first, second, remainder in zip(*tensor_lists, strict=True):
        low = alias(remainder).to(torch.int32)
        high = alias(weight).view(torch.int16).to(torch.int32) - (low < 0).int()
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        updated = adam.update(read(grad), master, first, second)
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
    """Compute the L2 norm [1] of all tensors together, and with `per_tensor` of each [tensors], in fp32."""
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
    """Compute the norm of the tensors times `inv_scale` [1]; the tensors themselves do not change."""
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
    """Write the tensors of the first list times `scale` into those of the second list."""
    for source, target in zip(*tensor_lists, strict=True):
        if not alias(source).isfinite().all():
            alias(is_infinite).fill_(1)
        fill(target, read(source) * scale)


@reference
def multi_tensor_scale_tensor(
    result: None, chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """Like `multi_tensor_scale`, with a scale [1] on the device."""
    multi_tensor_scale(None, chunk_size, is_infinite, tensor_lists, alias(scale).float().item())
