"""Products by oneDNN equal fp64's to fp32's rounding, and are used where they are faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_gvpo.kernels import onednn

NAME = "mkldnn::_linear_pointwise"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def calls(function: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result, and how many products went to oneDNN."""
    with torch.profiler.profile() as profile:
        out = function()
    return out, sum(event.count for event in profile.key_averages() if event.key == NAME)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (drawn(500, 24), drawn(24, 40, seed=1)),
        (drawn(500, 24), drawn(40, 24, seed=1).t()),
        (drawn(300, 1, 24), drawn(24, 40, seed=1)),  # [tokens, 1, hidden], as Megatron has it
        (drawn(2, 300, 24).transpose(0, 1), drawn(24, 40, seed=1)),
        (drawn(500, 40).t(), drawn(500, 24, seed=1)),  # gradients of weights: wide outputs,
        (drawn(500, 64).t(), drawn(500, 80, seed=1)),  # and narrow ones
        (drawn(500, 80)[:, 8:48], drawn(40, 24, seed=1)),
        (drawn(32, 1), drawn(1, 1, seed=1)),
    ],
)
def test_a_product_is_fp64s_to_the_rounding_of_fp32(a: Tensor, b: Tensor) -> None:
    out, went = calls(lambda: onednn.matmul(a, b))
    expected = torch.matmul(a.double(), b.double())
    assert went == 1 and out.dtype == torch.float32 and out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [None, drawn(40, seed=2)])
def test_a_linear_layer_is_fp64s(bias: Tensor | None) -> None:
    x, weight = drawn(4, 100, 24), drawn(40, 24, seed=1)
    out, went = calls(lambda: onednn.linear(x, weight, bias))
    expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert went == 1
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_other_products_stay_with_pytorch() -> None:
    a, b = drawn(500, 24), drawn(24, 40, seed=1)
    gradient = a.clone().requires_grad_()
    others: list[tuple[Tensor, Tensor]] = [
        (a.double(), b.double()),
        (a.bfloat16(), b.bfloat16()),
        (a[:4], b),  # few rows
        (a[:0], b),
        (a, b[:, 0]),
        (a[0], b),
        (a.view(5, 100, 24), b.expand(5, 24, 40)),
        (gradient, b),
    ]
    for x, y in others:
        out, went = calls(lambda x=x, y=y: onednn.matmul(x, y))  # type: ignore[misc]
        assert went == 0
        torch.testing.assert_close(out, torch.matmul(x, y), rtol=0, atol=0)
    onednn.matmul(gradient, b).sum().backward()
    assert gradient.grad is not None
    buffer = torch.empty(500, 40)
    assert onednn.matmul(a, b, out=buffer) is buffer
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        onednn.matmul(a, b.t())


@pytest.mark.parametrize("faster", [True, False])
def test_the_engines_linear_layers_go_to_onednn(
    faster: bool, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    ids = torch.arange(40)[None] % model.config.vocab_size
    with torch.inference_mode():
        before, none = calls(lambda: model(ids).logits)
        monkeypatch.setattr(onednn, "is_faster", lambda: faster)
        onednn.use_in(model)
        after, went = calls(lambda: model(ids).logits)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert none == 0 and went == (layers if faster else 0) and layers > 0
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_megatrons_layers_go_to_onednn_in_both_passes(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_the_process_group: None
) -> None:
    from helpers.tiny_run import GVPO, configure, fit

    from megatron_gvpo.megatron.cpu import device

    for function, replacement in onednn.REPLACEMENTS.items():  # also where MKL is as fast
        monkeypatch.setitem(device._replacements, function, replacement)
    product, passes = onednn._product, {"forward": 0, "backward": 0}

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        passes["forward" if torch._C._current_graph_task_id() == -1 else "backward"] += 1
        return product(x, weight, bias)

    monkeypatch.setattr(onednn, "_product", counted)
    fit(configure(task, tmp_path, *GVPO, "train.steps=1"))
    assert passes["forward"] > 0 and passes["backward"] > 0
