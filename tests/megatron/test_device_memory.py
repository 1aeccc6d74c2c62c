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


@pytest.mark.parametrize(("is_constant", "copied_again"), [(True, 0), (False, 2)])
def test_weights_that_never_change_are_copied_to_the_host_once(is_constant: bool, copied_again: int) -> None:
    """A teacher's: on a GPU each of its uses copied all of them to the host, and waited for each tensor."""
    layer = torch.nn.Linear(4, 4)
    model: Any = SimpleNamespace(
        finish_background_work=lambda: None, drop_fp8_copies=lambda: None, weights=layer.parameters
    )
    memory = DeviceMemory((model, None), is_constant=is_constant)
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
