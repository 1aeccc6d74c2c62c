"""A reference policy's weights: lent and given back bit for bit; a moving average that bf16 does not stop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_gvpo.megatron.reference_weights import ReferenceWeights


def model(dtype: torch.dtype) -> SimpleNamespace:
    """A stand-in for a model: its chunks, and the callbacks that hear of a change."""
    torch.manual_seed(0)
    chunk = torch.nn.Linear(32, 32).to(dtype)
    return SimpleNamespace(
        chunks=[chunk], finish_param_gather=lambda: None, finish_background_work=lambda: None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slow_average_moves_as_in_fp64(dtype):
    policy, decay, steps = model(dtype), 0.9995, 200
    reference = ReferenceWeights(policy, decay)
    weight = policy.chunks[0].weight
    exact = start = weight.detach().double().clone()
    with torch.no_grad():
        weight.add_(0.25)
    for _ in range(steps):
        reference.update_average()
        exact = decay * exact + (1 - decay) * weight.detach().double()
    own = weight.detach().clone()
    with reference.swapped_in():
        lent = weight.detach().double()
    assert torch.equal(weight, own)
    moved = (exact - start).mean()
    assert moved > 0.02
    torch.testing.assert_close((lent - start).mean(), moved, rtol=1e-2, atol=0)
    with reference.swapped_in():
        assert torch.equal(weight.double(), lent), "lending costs no precision"


def test_a_fixed_reference_stays_bit_for_bit():
    policy = model(torch.bfloat16)
    reference, weight = ReferenceWeights(policy, None), policy.chunks[0].weight
    first = weight.detach().clone()
    for _ in range(2):
        with torch.no_grad():
            weight.mul_(1.1)
        reference.update_average()
        own = weight.detach().clone()
        with reference.swapped_in():
            assert torch.equal(weight, first)
        assert torch.equal(weight, own)
