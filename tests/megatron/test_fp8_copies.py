"""Lending the weights' memory drops the FP8 copies that Transformer Engine's layers keep.

A stand-in for such a layer: without a GPU there is no real one. That its attribute has this name is checked
against Transformer Engine's sources by tests/shipping/test_gpu_interfaces.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_gvpo.megatron.device_memory import DeviceMemory
from megatron_gvpo.megatron.model.model import Model


def test_a_release_of_the_weights_frees_their_fp8_copies() -> None:
    layer = torch.nn.Linear(4, 4)
    layer._fp8_workspaces = {"weight": torch.empty(16)}
    model = SimpleNamespace(
        chunks=[torch.nn.Sequential(layer)],
        finish_background_work=lambda: None,
        finish_param_gather=lambda: None,
        weights=layer.parameters,
    )
    model.drop_fp8_copies = lambda: Model.drop_fp8_copies(model)
    memory, before = DeviceMemory((model, None)), layer.weight.detach().clone()
    memory.release("training")
    assert layer._fp8_workspaces
    memory.release("weights")
    assert not layer._fp8_workspaces and not layer.weight.untyped_storage().nbytes()
    memory.restore("weights")
    assert torch.equal(layer.weight, before)
