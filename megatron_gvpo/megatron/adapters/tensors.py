"""Exports adapters' tensors under Hugging Face names from a sharded model, and imports them into one.

Megatron-Bridge (0.6.2) exports adapters and imports none. To avoid repeating its rules, the import uses the
export: each rank exports unique numbers in place of the adapters' values, and the position of a number in the
exported tensor shows where its element belongs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
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
    weights = [p.data for p in adapters]
    # Float64 holds these numbers exactly, and every collective takes it.
    first, sizes = dist.get_rank() << 40, [w.numel() for w in weights]
    new = torch.zeros(sum(sizes), dtype=torch.float32)
    done = torch.zeros(sum(sizes), dtype=torch.bool)
    problem = None
    try:
        _number(adapters, first)
        for name, numbers in export_tensors(bridge, chunks, on_host=True):
            tensor = value(name, tuple(numbers.shape))
            if tensor is None:
                continue
            if tensor.shape != numbers.shape:
                problem = problem or (
                    f"{name} has shape {list(tensor.shape)}, and the model's is {list(numbers.shape)}"
                )
                continue
            is_local = (numbers >= first) & (numbers < first + len(new))
            index, values = (numbers[is_local] - first).long(), tensor[is_local].float()
            is_done = done[index]
            if not is_drawn and not torch.equal(new[index][is_done], values[is_done]):
                problem = problem or (
                    f"{name} differs from that of a layer with which it shares one under type=lora: use "
                    "type=canonical_lora; gate and up of experts share one on GPUs under every type"
                )
            new[index[~is_done]], done[index] = values[~is_done], True
    finally:
        for parameter, weight in zip(adapters, weights, strict=True):
            parameter.data = weight
    at = 0
    for weight in weights:
        part, known = new[at : at + weight.numel()], done[at : at + weight.numel()]
        if known.all():
            weight.copy_(part.view(weight.shape))
        elif known.any():
            problem = problem or "only a part of an adapter's tensor is given"
        at += weight.numel()
    return problem


def _number(adapters: Sequence[torch.nn.Parameter], first: int) -> None:
    """Number the elements of the adapters from `first` on, in place of their values."""
    for parameter in adapters:
        weight = parameter.data
        numbers = torch.arange(first, first + weight.numel(), dtype=torch.float64, device=weight.device)
        parameter.data = numbers.view(weight.shape)
        first += weight.numel()


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
