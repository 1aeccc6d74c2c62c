"""Weights that leave a device and come back; on a CPU, its memory and the host's are the same kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gvpo.megatron.device_memory import DeviceMemory


class CountedCopies(TorchDispatchMode):
    """Counts the tensors that are copied into another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def a_model(layer: torch.nn.Module) -> Any:
    return SimpleNamespace(
        finish_background_work=lambda: None,
        finish_param_gather=lambda: None,
        drop_fp8_copies=lambda: None,
        weights=layer.parameters,
    )


@pytest.mark.parametrize(("is_constant", "copied_again"), [(True, 0), (False, 2)])
def test_weights_that_never_change_are_copied_to_the_host_once(is_constant: bool, copied_again: int) -> None:
    """A teacher's: on a GPU each of its uses copied all of them to the host, and waited for each tensor."""
    layer = torch.nn.Linear(4, 4)
    memory = DeviceMemory((a_model(layer), None), is_constant=is_constant)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    copies = []
    for _ in range(2):
        with CountedCopies() as counted:
            memory.release("weights")
        copies.append(counted.count)
        assert not any(parameter.untyped_storage().nbytes() for parameter in layer.parameters())
        memory.restore("weights")
        assert all(map(torch.equal, layer.parameters(), before))
    assert copies == [2, copied_again]


def test_weights_copied_beside_a_push_are_not_copied_when_they_are_released() -> None:
    layer = torch.nn.Linear(4, 4)
    memory = DeviceMemory((a_model(layer), None))
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    copies = []
    for part_of_the_push in (memory.copy_weights_ahead, lambda: memory.release("weights")):
        with CountedCopies() as counted:
            part_of_the_push()
        copies.append(counted.count)
    assert copies == [2, 0]
    memory.restore("weights")
    assert all(map(torch.equal, layer.parameters(), before))


def test_copies_of_a_push_that_failed_are_not_taken_for_later_weights() -> None:
    layer = torch.nn.Linear(4, 4)
    memory = DeviceMemory((a_model(layer), None))
    memory.copy_weights_ahead()
    memory.restore("weights")  # as after a push that failed: the weights were never released
    with torch.no_grad():
        layer.weight += 1
    updated = layer.weight.detach().clone()
    memory.release("weights")
    memory.restore("weights")
    assert torch.equal(layer.weight, updated)
