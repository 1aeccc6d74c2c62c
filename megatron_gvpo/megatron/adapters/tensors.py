"""Exports adapters' tensors under Hugging Face names from a sharded model, and imports them into one.

Megatron-Bridge (0.6.2) exports adapters and imports none. To avoid repeating its rules, the import uses the
export: each rank exports unique numbers in place of the adapters' values, and the position of a number in the
exported tensor shows where its element belongs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

MARK = ".adapter."  # is part of the names of all adapters' parameters, and of no others
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def is_adapter(name: str) -> bool:
    """Return True for the Megatron name of an adapter's parameter."""
    return MARK in name


def layer_of(name: str) -> str:
    """Return the linear layer, such as q_proj, of the name of an adapter's tensor."""
    return name.split(".")[-3]


def export_tensors(bridge: Any, chunks: list[Any], on_host: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face's name of the layer + `.lora_A.weight` or `.lora_B.weight`, full tensor).

    The order is fixed. A collective: every rank must iterate to the end, and gets every tensor.
    """
    group = parallel_state.get_expert_model_parallel_group()
    config = chunks[0].module.config if hasattr(chunks[0], "module") else chunks[0].config
    own = (config.num_moe_experts or 0) // group.size()
    # Without grouped matrix products, Megatron-Bridge exports each rank's own experts by their local numbers.
    gathers = group.size() > 1 and any(
        ".local_experts." in name for chunk in chunks for name, _ in chunk.named_parameters()
    )
    stream = bridge.export_adapter_weights(chunks, cpu=on_host, show_progress=False)
    for name, tensor in stream:
        expert = _EXPERT.search(name)
        tensor = tensor.detach()
        if not gathers or expert is None:
            yield name, tensor.contiguous()
            continue
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group)
        for rank, part in enumerate(parts):
            number = rank * own + int(expert[1])
            yield f"{name[: expert.start(1)]}{number}{name[expert.end(1) :]}", part


@torch.no_grad()
def place_tensors(
    bridge: Any, chunks: list[Any], value: Callable[[str, tuple[int, ...]], Tensor | None], is_drawn: bool
) -> str | None:
    """Fill this rank's adapters with its parts of the tensors that `value` returns for (name, shape).

    `chunks` are not wrapped yet. `value` returns None for a tensor that it does not have, and the adapter
    keeps what it has. Layers that share an adapter's tensor get the first layer's tensor if the values are
    drawn (`is_drawn`), and must have equal values otherwise. A collective. Returns the problem with a tensor
    of another shape, or with two that should be the same, or None.
    """
    adapters = [p for c in chunks for name, p in c.named_parameters() if is_adapter(name)]
    own = OwnElements(adapters, dist.get_rank())
    problems: list[str] = []
    with own.numbered():
        for name, numbers in export_tensors(bridge, chunks, on_host=True):
            tensor = value(name, tuple(numbers.shape))
            if tensor is None:
                continue
            if tensor.shape != numbers.shape:
                problems.append(
                    f"{name} has shape {list(tensor.shape)}, and the model's is {list(numbers.shape)}"
                )
            elif not own.take(tensor, numbers, is_drawn):
                problems.append(
                    f"{name} differs from that of a layer with which it shares one under type=lora: use "
                    "type=canonical_lora; gate and up of experts share one on GPUs under every type"
                )
    if not own.fill():
        problems.append("only a part of an adapter's tensor is given")
    return next(iter(problems), None)


class OwnElements:
    """The elements of this rank's adapters, numbered one after the other, and the values that they get."""

    def __init__(self, adapters: Sequence[torch.nn.Parameter], rank: int) -> None:
        self._adapters, self._weights = adapters, [parameter.data for parameter in adapters]
        # Float64, which every collective takes, holds the numbers of 2**17 ranks of 2**36 elements exactly.
        self._first = rank << 36
        count = sum(weight.numel() for weight in self._weights)
        self._value = torch.zeros(count, dtype=torch.float32)
        self._has_value = torch.zeros(count, dtype=torch.bool)

    @contextmanager
    def numbered(self) -> Iterator[None]:
        """Context in which the adapters have the numbers of their elements in place of their weights."""
        try:
            first = self._first
            for parameter, weight in zip(self._adapters, self._weights, strict=True):
                end = first + weight.numel()
                numbers = torch.arange(first, end, dtype=torch.float64, device=weight.device)
                parameter.data, first = numbers.view(weight.shape), end
            yield
        finally:
            for parameter, weight in zip(self._adapters, self._weights, strict=True):
                parameter.data = weight

    def take(self, tensor: Tensor, numbers: Tensor, is_drawn: bool) -> bool:
        """Take this rank's elements of a tensor; `numbers` are those of its elements, on all ranks.

        An element keeps its first value. False if it has another one, unless the values are drawn.
        """
        is_own = (numbers >= self._first) & (numbers < self._first + len(self._value))
        index, values = (numbers[is_own] - self._first).long(), tensor[is_own].float()
        is_known = self._has_value[index]
        is_same = is_drawn or torch.equal(self._value[index][is_known], values[is_known])
        self._value[index[~is_known]], self._has_value[index] = values[~is_known], True
        return is_same

    def fill(self) -> bool:
        """Give the weights of which all elements have a value their values; False if one has only a part."""
        sizes = [weight.numel() for weight in self._weights]
        is_complete = True
        columns = self._value.split(sizes), self._has_value.split(sizes)
        for weight, values, has_value in zip(self._weights, *columns, strict=True):
            if has_value.all():
                weight.copy_(values.view(weight.shape))
            elif has_value.any():
                is_complete = False
        return is_complete


LEAST = 0.9  # share of the change below which a warning is due

log = logging.getLogger(__name__)


class MergeRounding:
    """Measures the part of the adapters' change that rounding leaves when they are merged into bf16 weights.

    A merged weight is rounded to bf16, so that a change smaller than half a step vanishes, while the trainer
    computes with it. The sums go over all merged weights of an export.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # |D|^2, <D, D'>, |D' - D|^2 for D' after rounding

    def add(self, base: Tensor, merged: Tensor, change: Tensor) -> None:
        """`base` and `merged` [out, in] in the model's dtype; `change` [out, in], fp32, before rounding."""
        arrived = merged.float() - base.float()
        sums = change.pow(2).sum(), (arrived * change).sum(), (arrived - change).pow(2).sum()
        self._sums = self._sums.to(base.device) + torch.stack(sums).double()

    @property
    def share(self) -> float:
        """Return the share of the change that survives rounding, by projection; 1 without a change."""
        change, arrived, _ = self._sums.tolist()
        return arrived / change if change else 1.0

    @property
    def error(self) -> float:
        """Return the relative error of the rounded change; 0 without a change."""
        change, _, lost = self._sums.tolist()
        return float((lost / change) ** 0.5) if change else 0.0

    def warn(self) -> bool:
        """Log a warning if little of the change is left; returns True if it did."""
        if self.share >= LEAST:
            return False
        log.warning(
            "model.dtype=bfloat16: merged weights have %.0f %% of the adapters' change (relative error %.2f) "
            "because rounding takes the rest, so rollouts come from another policy than the one that trains. "
            "It grows with the change: use a larger optimizer.lr, or rollout.weights.transport=adapter",
            100 * self.share,
            self.error,
        )
        return True
