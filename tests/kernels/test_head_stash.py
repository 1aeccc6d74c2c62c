"""The head's stash: its contents, its precision, and dW in Megatron's own buffer."""

from __future__ import annotations

import pytest
import torch
from helpers.references.head_reference import (
    error,
    fused_stash,
    fused_weights_first,
    fused_weights_last,
    naive,
    problem,
)
from torch import Tensor
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode

from megatron_gvpo.kernels import head
from megatron_gvpo.kernels.linear_logprob import linear_logprob


def test_what_is_kept_fits_the_cap_and_is_reported():
    hidden, weight, labels, g, _ = problem(10, 4, 30)
    for cap, rows in {0: 0, 119: 0, 120: 1, 599: 4, 9999: 10}.items():
        mode = "stash" if rows else "recompute"
        out = linear_logprob(hidden.requires_grad_(), weight, labels, stash_bytes=cap)
        assert (out.mode, out.stash_bytes, out.stash_share) == (mode, rows * 30 * 4, rows / 10)
        stash_rv = out.logp_r.grad_fn.saved_tensors[4]
        assert stash_rv.nbytes == out.stash_bytes <= cap
    assert linear_logprob(hidden, weight, labels, stash_bytes=9999, entropy=True).mode == "recompute"
    assert linear_logprob(hidden, weight, labels, stash_bytes=9999, weight_r=g).mode == "weights_first"
    assert linear_logprob(hidden.detach(), weight, labels, stash_bytes=9999).mode == "forward"


def peaked(bias: float, r: int = 64, v: int = 97) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A policy that favours its samples by `bias` logits, as reinforcement learning produces."""
    hidden, weight, labels, g, _ = problem(r, 32, v, 1.0)
    return hidden + bias * weight[labels] / weight[labels].square().sum(1, keepdim=True), weight, labels, g


@pytest.mark.parametrize(("bias", "mean"), [(5, -1.3), (9, -0.1), (13, -7e-3), (19, -2.4e-4)])
def test_bf16_stash_of_peaked_policies(bias: float, mean: float):
    """Errors are those of rounding to bf16 (steps of 0.4 to 0.8 %), however small the label's 1 - p is."""
    hidden, weight, labels, g = peaked(bias)
    logp, _, dx, dw = naive(hidden, weight, labels, g)
    assert 0.5 < float(logp.mean()) / mean < 2
    out, dx_, dw_ = fused_stash(hidden, weight, labels, g, stash_dtype=torch.bfloat16)
    assert out.stash_bytes == 64 * 97 * 2
    assert error(out.logp_r, logp) < 1e-6 + 1e-6 / abs(mean)  # read from fp32, not from the stash
    assert max(error(dx_, dx), error(dw_, dw)) < 2**-7


def test_bf16_stash_beside_recomputed_rows():
    hidden, weight, labels, g, _ = problem(40, 32, 97, 3.0, torch.bfloat16)
    logp, _, dx, dw = naive(hidden, weight, labels, g)
    options = {"stash_dtype": torch.bfloat16, "stash_bytes": 97 * 2 * 25, "logits_bytes": 4 * 97 * 8}
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, **options)
    assert out.stash_share == 25 / 40
    assert error(out.logp_r, logp) < 3e-6
    assert max(error(dx_, dx), error(dw_, dw)) < 2**-7


def test_the_stash_serves_more_than_one_backward():
    hidden, weight, labels, g, e = problem(6, 4, 11)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    logp_r = linear_logprob(x, w, labels, stash_bytes=1 << 20).logp_r
    for upstream_r in (g, e):
        *_, dx, dw = naive(hidden, weight, labels, upstream_r)
        got = torch.autograd.grad(logp_r, (x, w), upstream_r, retain_graph=True)
        assert max(error(got[0], dx), error(got[1], dw)) < 1e-6


def test_a_hopeless_label_does_not_overflow_the_stash():
    """The label's p underflows, so this rank's part of the row is one number, the label's -g."""
    hidden, weight, labels, g, _ = problem(4, 4, 11)
    weight[labels[0]] = -90 * hidden[0] / hidden[0].square().sum()
    for dtype in (torch.float32, torch.bfloat16):
        logp, _, dx, dw = naive(hidden, weight, labels, g)
        out, dx_, dw_ = fused_stash(hidden, weight, labels, g, stash_dtype=dtype)
        assert float(logp.min()) < -85
        tolerance = 1e-5 if dtype == torch.float32 else 5e-3
        assert max(error(out.logp_r, logp), error(dx_, dx), error(dw_, dw)) < tolerance


class Megatron(torch.nn.Parameter):
    """A weight as Megatron's data parallelism prepares it, with the hook that clears `.grad`."""

    def prepare(self, tied: bool) -> None:
        self.main_grad = torch.full(self.shape, 0.5)
        self.grad_added_to_main_grad = False
        if tied:
            self.zero_out_wgrad = True
        self.register_post_accumulate_grad_hook(Megatron.hook)

    def hook(self) -> None:  # megatron-core 0.19.2, distributed_data_parallel.py
        if self.grad is not None and (
            not self.grad_added_to_main_grad or getattr(self, "zero_out_wgrad", False)
        ):
            self.main_grad.add_(self.grad.data)
        self.grad = None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["weights_first", "upstream", "stash", "partly", "recompute"])
def test_main_grad_gets_dw_in_fp32(mode: str, dtype: torch.dtype, tied: bool):
    """Two micro-batches add to an existing gradient: nothing is lost, counted twice, or rounded to bf16."""
    hidden, weight, labels, g, _ = problem(20, 8, 30, 1.0, dtype)
    parameter = Megatron(weight)
    parameter.prepare(tied)
    want = torch.full((30, 8), 0.5, dtype=torch.float64)
    stash = {"stash": 1 << 20, "partly": 7 * 30 * 4}.get(mode, 0)
    for rows, factor in ((slice(0, 12), 1.0), (slice(12, 20), -0.25)):
        x_rh = hidden[rows]
        if tied:  # the embedding's use, whose gradient is 1 a token
            used = embedding(labels[rows], parameter).sum()
            want.index_add_(0, labels[rows], torch.ones(len(x_rh), 8, dtype=torch.float64))
        else:
            used = torch.zeros(())
        options = {
            "weights_first": {"weight_r": factor * g[rows]},
            "upstream": {"weight_r": g[rows], "upstream": factor},
        }.get(mode, {"stash_bytes": stash})
        before = parameter.main_grad.clone()
        out = linear_logprob(x_rh.clone().requires_grad_(), parameter, labels[rows], **options)
        assert torch.equal(parameter.main_grad, before) != (mode == "upstream")
        if out.surrogate is None:
            loss = (factor * g[rows] * out.logp_r).sum()
        else:
            loss = out.surrogate * options.get("upstream", 1.0)
        (loss + used).backward()
        want += naive(x_rh, weight, labels[rows], factor * g[rows])[3]
    assert parameter.grad_added_to_main_grad
    assert error(parameter.main_grad, want) < 2e-6


@pytest.mark.parametrize("tied", [False, True])
def test_the_hook_of_a_weight_runs_once_a_micro_batch(tied: bool):
    """Megatron counts on it: it reduces a bucket's gradients when the hooks of all its weights have run.

    A tied weight has no gradient but its embedding's: zeros of its size need not be made and added.
    """
    hidden, weight, labels, g, _ = problem(20, 8, 30)
    parameter, calls = Megatron(weight), []
    parameter.prepare(tied)
    parameter.register_post_accumulate_grad_hook(calls.append)
    for options in ({"upstream": 1.0}, {}):
        out = linear_logprob(hidden.clone().requires_grad_(), parameter, labels, weight_r=g, **options)
        [alone] = torch.autograd.grad(out.surrogate, parameter, retain_graph=True, allow_unused=True)
        assert (alone is None) == tied and not calls
        out = linear_logprob(hidden.clone().requires_grad_(), parameter, labels, weight_r=g, **options)
        (out.surrogate + (embedding(labels, parameter).sum() if tied else 0)).backward()
        assert len(calls) == 1
        calls.clear()


@pytest.mark.parametrize("has_main_grad", [False, True])
def test_another_factor_than_the_announced_one_is_an_error(has_main_grad: bool):
    hidden, weight, labels, g, _ = problem(20, 8, 30)
    parameter = Megatron(weight)
    if has_main_grad:
        parameter.prepare(tied=False)
    options = {"weight_r": g, "upstream": 2.0}
    out = linear_logprob(hidden.clone().requires_grad_(), parameter, labels, **options)
    with pytest.raises(RuntimeError, match=r"would be 2\.0: another arrived"):
        out.surrogate.backward()
    rounded = 2 / torch.tensor(3.0) * 3
    linear_logprob(hidden, parameter, labels, **options).surrogate.mul(rounded).backward()


@pytest.mark.parametrize("wanted", ["both", "states", "weight"])
def test_a_known_upstream_gradient_is_applied_in_the_forward(wanted: str):
    """Also without Megatron's buffer, and where a head or all layers below it are frozen."""
    hidden, weight, labels, g, _ = problem(20, 8, 30)
    *_, dx, dw = naive(hidden, weight, labels, -0.7 * g)
    x, w = (
        t.clone().requires_grad_(wanted in ("both", n)) for t, n in ((hidden, "states"), (weight, "weight"))
    )
    (-0.7 * linear_logprob(x, w, labels, weight_r=g, upstream=-0.7).surrogate).backward()
    for leaf, want in ((x, dx), (w, dw)):
        assert (leaf.grad is None) != leaf.requires_grad
        assert leaf.grad is None or error(leaf.grad, want) < 2e-6


class Products(TorchFunctionMode):
    """Records the shape of each product's result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.addmm:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.7, "by row"])
@pytest.mark.parametrize("upstream", [None, 3.0])
def test_chunks_in_bf16_have_many_rows(
    upstream: float | None, temperature: float | str, monkeypatch: pytest.MonkeyPatch
):
    """Three chunks of 16, 16 and 8 rows, in tiles of 5 rows: dW is one product a chunk, not one a tile."""
    monkeypatch.setattr(head, "CHUNK_ROWS", 16)
    hidden, weight, labels, g, _ = problem(40, 32, 97, 3.0)
    options = {"temperature": temperature, "vocab_size": 90}
    if temperature == "by row":
        options["temperature"] = torch.linspace(0.5, 2, 40)
    labels.clamp_(max=89)
    logp, _, dx, dw = naive(hidden, weight, labels, g * (upstream or 1.0), **options)
    x, w = hidden.requires_grad_(), Megatron(weight)
    w.prepare(tied=False)
    tile = 4 * 97 * 5
    with Products() as products:
        out = linear_logprob(
            x,
            w,
            labels,
            weight_r=g,
            upstream=upstream,
            stash_dtype=torch.bfloat16,
            logits_bytes=tile,
            **options,
        )
    (out.surrogate * (upstream or 1.0)).backward()
    assert products.shapes.count((90, 32)) == 3
    assert [s for s in products.shapes if s[1] == 90] == [
        *[(5, 90), (5, 90), (5, 90), (1, 90)] * 2,
        (5, 90),
        (3, 90),
    ]
    assert error(out.logp_r, logp) < 3e-6
    assert max(error(x.grad, dx), error(w.main_grad - 0.5, dw)) < 2**-7


def test_a_main_grad_in_the_wrong_dtype_is_left_to_megatron():
    hidden, weight, labels, g, _ = problem(20, 8, 30, 1.0, torch.bfloat16)
    parameter = Megatron(weight)
    parameter.prepare(tied=False)
    parameter.main_grad = torch.zeros(30, 8, dtype=torch.bfloat16)
    for fused in (fused_weights_first, fused_stash):
        *_, dw = naive(hidden, weight, labels, g)
        assert error(fused(hidden, weight, labels, g)[2], dw) < 2**-8
        options = {"weight_r": g} if fused is fused_weights_first else {}
        out = linear_logprob(hidden, parameter, labels, **options)
        (out.surrogate if options else (g * out.logp_r).sum()).backward()
        assert error(parameter.main_grad, dw) < 2**-7
        parameter.main_grad.zero_()


def test_backend_reference_is_autograd_itself():
    hidden, weight, labels, g, e = problem(9, 4, 13, 1.0, torch.float64)
    options = {"temperature": torch.linspace(0.5, 2, 9), "vocab_size": 12}
    labels[3] = 5
    labels.clamp_(max=11)
    logp, entropy, dx, dw = naive(hidden, weight, labels, g, e, **options)
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, e, backend="reference", **options)
    assert out.mode == "reference"
    for got, want in ((out.logp_r, logp), (out.entropy_r, entropy), (dx_, dx), (dw_, dw)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
