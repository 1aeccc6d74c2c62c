"""References of Transformer Engine's dense functions against fp64 and autograd, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_gvpo.emulation.transformer_engine import install  # noqa: F401 - it fills the table
from megatron_gvpo.emulation.transformer_engine.references import TABLE

Tensor = torch.Tensor
# An error of rounding once to the dtype, and of sums in fp32.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


def assert_close(computed: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """Relative to the largest number, as sums of such numbers round."""
    error = (computed.double() - exact.double()).abs().max() / exact.double().abs().max()
    assert error <= BOUND[dtype or computed.dtype], error.item()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_rms_norm(dtype: torch.dtype, is_zero_centered: bool) -> None:
    x, weight, grad = random(3, 5, 48, dtype=dtype), random(48, dtype=dtype), random(3, 5, 48, dtype=dtype)
    out, rsigma = torch.empty_like(x), torch.empty(15)
    TABLE["rmsnorm_fwd"]([out, None, rsigma], x, weight, 1e-5, None, None, None, 0, is_zero_centered)
    exact_x, exact_weight = doubles(x, weight)
    exact = F.rms_norm(exact_x, (48,), exact_weight + is_zero_centered, 1e-5)
    exact.backward(grad.double())
    assert_close(out, exact)
    assert_close(rsigma, (x.double().square().mean(-1) + 1e-5).rsqrt().view(15))
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    TABLE["rmsnorm_bwd"]([dx, dweight], grad, x, rsigma, weight, 0, is_zero_centered)
    assert_close(dx, exact_x.grad)
    assert_close(dweight, exact_weight.grad)
    add = random(3, 5, 48, dtype=dtype)
    TABLE["rmsnorm_bwd_add"]([dx, dweight], grad, x, add, rsigma, weight, 0, is_zero_centered)
    assert_close(dx, exact_x.grad + add.double())


@pytest.mark.parametrize("dtype", BOUND)
def test_layer_norm(dtype: torch.dtype) -> None:
    x, grad = random(7, 48, dtype=dtype), random(7, 48, dtype=dtype)
    weight, bias = random(48, dtype=dtype), random(48, dtype=dtype)
    out, mu, rsigma = torch.empty_like(x), torch.empty(7), torch.empty(7)
    TABLE["layernorm_fwd"]([out, mu, rsigma], x, weight, bias, 1e-5, None, None, None, 0, False)
    exact_x, exact_weight, exact_bias = doubles(x, weight, bias)
    exact = F.layer_norm(exact_x, (48,), exact_weight, exact_bias, 1e-5)
    exact.backward(grad.double())
    assert_close(out, exact)
    assert_close(mu, x.double().mean(-1))
    made = [torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)]
    TABLE["layernorm_bwd"](made, grad, x, mu, rsigma, weight, 0, False)
    for gradient, exact_of in zip(made, (exact_x, exact_weight, exact_bias), strict=True):
        assert_close(gradient, exact_of.grad)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": quick_gelu,
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x) ** 2,
    "silu": F.silu,
}
GATED = {
    "glu": torch.sigmoid,
    "geglu": PLAIN["gelu"],
    "qgeglu": quick_gelu,
    "reglu": torch.relu,
    "sreglu": PLAIN["srelu"],
    "swiglu": F.silu,
}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", [*PLAIN, *GATED])
def test_activations(name: str, dtype: torch.dtype) -> None:
    x = random(6, 4, 32, dtype=dtype)
    [exact_x] = doubles(x)
    if name in PLAIN:
        exact = PLAIN[name](exact_x)
    else:
        act, gate = exact_x.chunk(2, -1)
        exact = GATED[name](act) * gate
    out, grad = torch.empty(exact.shape, dtype=dtype), random(*exact.shape, dtype=dtype)
    TABLE[name](out, x, None)
    assert_close(out, exact)
    exact.backward(grad.double())
    dx = torch.empty_like(x)
    TABLE[f"d{name}"](dx, grad, x, None)
    assert_close(dx, exact_x.grad)
    if name in PLAIN:
        dbias = torch.empty(32, dtype=dtype)
        TABLE[f"dbias_d{name}"]([dbias, dx], grad, x, None)
        assert_close(dbias, exact_x.grad.sum((0, 1)))
        assert_close(dx, exact_x.grad)


def test_clamped_swiglu() -> None:
    x, grad = 5 * random(9, 32), random(9, 16)
    [exact_x] = doubles(x)
    act, gate = exact_x.chunk(2, -1)
    act, gate = act.clamp(max=4), gate.clamp(-4, 4)
    exact = act * torch.sigmoid(1.5 * act) * (gate + 0.5)
    exact.backward(grad.double())
    out, dx = torch.empty(9, 16), torch.empty_like(x)
    TABLE["clamped_swiglu"](out, x, None, 4.0, 1.5, 0.5)
    TABLE["clamped_dswiglu"](dx, grad, x, None, 4.0, 1.5, 0.5)
    assert_close(out, exact)
    assert_close(dx, exact_x.grad)


def test_scaled_swiglu() -> None:
    x, scales, grad = random(9, 32), torch.rand(9), random(9, 16)
    exact_x, exact_scales = doubles(x, scales)
    act, gate = exact_x.chunk(2, -1)
    exact = F.silu(act) * gate * exact_scales[:, None]
    exact.backward(grad.double())
    out, dx, dscales = torch.empty(9, 16), torch.empty_like(x), torch.empty(9)
    TABLE["scaled_swiglu"](out, x, scales, None)
    TABLE["scaled_dswiglu"]((dx, dscales), grad, x, scales, None)
    for computed, wanted in ((out, exact), (dx, exact_x.grad), (dscales, exact_scales.grad)):
        assert_close(computed, wanted)


def gemm(result: list[Any], a: Tensor, trans_a: bool, b: Tensor, trans_b: bool, **options: Any) -> None:
    names = {"bias": None, "gelu": False, "gelu_in": None, "grad": False, "accumulate": False} | options
    TABLE["generic_gemm"](
        result,
        *(a, trans_a, b, trans_b, None, None, None),
        *(names["bias"], None, names["gelu"], names["gelu_in"], names["grad"]),
        *(None, 0, names["accumulate"], False),
    )


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("trans_a", "trans_b"), [(True, False), (False, False), (False, True)])
def test_products(dtype: torch.dtype, trans_a: bool, trans_b: bool) -> None:
    """The three products of a linear layer: its output, its input's gradient, its weight's."""
    a = random(24, 16, dtype=dtype) if trans_a or trans_b else random(16, 40, dtype=dtype)
    b = random(24, 32, dtype=dtype) if trans_b else random(3, 5, 16, dtype=dtype)
    left_operand = b.double().flatten(0, -2)
    exact = (left_operand.T if trans_b else left_operand) @ (a.double().T if trans_a else a.double())
    out = torch.empty(*([] if trans_b else [3, 5]), *exact.shape[-1 - trans_b :], dtype=dtype)
    gemm([out, None, None, None], a, trans_a, b, trans_b)
    assert_close(out.view(exact.shape), exact)
    main_grad = torch.ones(out.shape)
    gemm([main_grad, None, None, None], a, trans_a, b, trans_b, accumulate=True)
    assert_close(main_grad.view(exact.shape), exact + 1)


def test_a_products_epilogues() -> None:
    x, weight, bias, grad = random(7, 16), random(24, 16), random(24), random(7, 24)
    exact_x, exact_weight, exact_bias = doubles(x, weight, bias)
    exact_inner = F.linear(exact_x, exact_weight, exact_bias)
    exact = F.gelu(exact_inner, approximate="tanh")
    out, inner = torch.empty(7, 24), torch.empty(7, 24)
    gemm([out, None, inner, None], weight, True, x, False, bias=bias, gelu=True)
    assert_close(out, exact)
    assert_close(inner, exact_inner)
    # The backward of the next layer: its product with the derivative of GELU, and this layer's bias.
    following = random(12, 24)
    (exact @ following.double().T).backward(next_grad := random(7, 12).double())
    d_inner, d_bias = torch.empty(7, 24), torch.empty(24)
    options = {"bias": bias, "gelu": True, "gelu_in": inner, "grad": True}
    gemm([d_inner, d_bias, None, None], following, False, next_grad.float(), False, **options)
    assert_close(d_bias, exact_bias.grad)
    d_weight = torch.empty(24, 16)
    gemm([d_weight, d_bias, None, None], x, False, grad, True, bias=bias, grad=True)
    assert_close(d_weight, grad.double().T @ x.double())
    assert_close(d_bias, grad.double().sum(0))


@pytest.mark.parametrize("is_single", [True, False])
def test_grouped_products(is_single: bool) -> None:
    """Experts with 5, 0 and 3 tokens."""
    weights, parts = [random(24, 16) for _ in range(3)], [random(n, 16) for n in (5, 0, 3)]
    exact = [x.double() @ w.double().T for x, w in zip(parts, weights, strict=True)]
    out = [torch.empty(8, 24)] if is_single else [torch.empty(n, 24) for n in (5, 0, 3)]
    none = [torch.empty(0)] * 3
    flags = (False, [torch.empty(1)], 0, False, False, 0)
    TABLE["te_general_grouped_gemm"](
        None, weights, True, parts, False, out, None, [5, 0, 3], none, None, is_single, none, *flags
    )
    assert_close(torch.cat(out), torch.cat(exact))
    grads, main_grads = [random(n, 24) for n in (5, 0, 3)], [torch.ones(24, 16) for _ in range(3)]
    flags = (True, [torch.empty(1)], 0, True, False, 0)
    TABLE["te_general_grouped_gemm"](
        None, parts, False, grads, True, main_grads, None, [5, 0, 3], none, None, False, none, *flags
    )
    for main_grad, x, grad in zip(main_grads, parts, grads, strict=True):
        assert_close(main_grad, grad.double().T @ x.double() + 1)


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="the kernel reads a contiguous tensor"):
        gemm([torch.empty(7, 16), None, None, None], random(24, 16).T, False, random(7, 24), False)
