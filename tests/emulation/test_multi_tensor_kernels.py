"""References of functions over lists of tensors against PyTorch's optimizers and norms in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_gvpo.emulation.transformer_engine import install  # noqa: F401 - it fills the table
from megatron_gvpo.emulation.transformer_engine.references import TABLE

Tensor = torch.Tensor
LR, BETAS, EPSILON, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def updated(weights: list[Tensor], gradients: list[list[Tensor]], is_adamw: bool) -> list[Tensor]:
    """By PyTorch, in fp64."""
    exact = [weight.double().requires_grad_() for weight in weights]
    kind = torch.optim.AdamW if is_adamw else torch.optim.Adam
    optimizer = kind(exact, lr=LR, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
    for step in gradients:
        for weight, gradient in zip(exact, step, strict=True):
            weight.grad = gradient.double()
        optimizer.step()
    return [weight.detach() for weight in exact]


@pytest.mark.parametrize("is_adamw", [False, True])
@pytest.mark.parametrize("has_masters", [False, True])
def test_adam(is_adamw: bool, has_masters: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5, 3), torch.randn(7)]
    gradients = [[torch.randn_like(weight) for weight in weights] for _ in range(3)]
    exact = updated(weights, gradients, is_adamw)
    masters = [weight.clone() for weight in weights]
    low = [weight.bfloat16() for weight in weights] if has_masters else masters
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    for number, step in enumerate(gradients, 1):
        lists = [step, low, *moments, *([masters] if has_masters else [])]
        options = (LR, *BETAS, EPSILON, number, int(is_adamw), 1, DECAY)
        TABLE["multi_tensor_adam"](None, 65536, torch.zeros(1), lists, *options)
    for master, weight, wanted in zip(masters, low, exact, strict=True):
        assert torch.allclose(master.double(), wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(weight, master.to(weight.dtype))


def test_adam_with_remainders_is_adam_with_masters() -> None:
    torch.manual_seed(0)
    master = torch.randn(2000)
    bits = master.view(torch.int32)
    remainder = bits.to(torch.int16)
    weight = ((bits >> 16) + (remainder < 0)).to(torch.int16).view(torch.bfloat16)
    moments = [torch.zeros(2000), torch.zeros(2000)]
    others = [one.clone() for one in moments]
    low = master.bfloat16()
    for step in (1, 2):
        gradient = torch.randn(2000)
        options = (LR, *BETAS, EPSILON, step, 1, 1, DECAY)
        lists = [[gradient], [low], *([one] for one in moments), [master]]
        TABLE["multi_tensor_adam"](None, 65536, None, lists, *options)
        lists = [[gradient], [weight], *([one] for one in others), [remainder]]
        TABLE["multi_tensor_adam_param_remainder"](None, 65536, None, lists, *options)
    high = weight.view(torch.int16).int() - (remainder < 0).int()
    assert torch.equal(((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32), master)
    assert (weight.float() - master).abs().max() <= master.abs().max() * 2.0**-8


def test_norms() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(50, 3), torch.randn(7)]
    exact = [tensor.double().norm().item() for tensor in tensors]
    total, each, flag = torch.empty(1), torch.empty(2), torch.zeros(1, dtype=torch.int32)
    TABLE["multi_tensor_l2norm"]((total, each), 65536, flag, [tensors], True)
    assert total.item() == pytest.approx(math.hypot(*exact), rel=1e-6)
    assert each.tolist() == pytest.approx(exact, rel=1e-6) and flag.item() == 0
    TABLE["multi_tensor_unscale_l2norm"]((total, each), 65536, flag, [tensors], torch.tensor([0.5]), False)
    assert total.item() == pytest.approx(math.hypot(*exact) / 2, rel=1e-6)
    TABLE["multi_tensor_l2norm"]((total, each), 65536, flag, [[torch.tensor([math.inf])]], False)
    assert flag.item() == 1


@pytest.mark.parametrize("name", ["multi_tensor_scale", "multi_tensor_scale_tensor"])
def test_scaling(name: str) -> None:
    source, target = torch.randn(9), torch.empty(9).bfloat16()
    flag = torch.zeros(1, dtype=torch.int32)
    TABLE[name](
        None, 65536, flag, [[source], [target]], 3.0 if name.endswith("scale") else torch.tensor([3.0])
    )
    assert torch.equal(target, (source * 3).bfloat16()) and flag.item() == 0
    TABLE["multi_tensor_scale"](None, 65536, flag, [[torch.tensor([math.nan])], [torch.empty(1)]], 1.0)
    assert flag.item() == 1
