"""The fused log-prob head against log_softmax + gather in fp64 under plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.references.head_reference import (
    SMALL_TILE,
    error,
    fused_stash,
    fused_weights_first,
    fused_weights_last,
    naive,
    on_tensor_parallel_ranks,
    own_shard,
    problem,
    problem_at_edges,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gvpo.kernels.linear_logprob import linear_logprob


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0], ids=["flat", "normal", "peaked"])
@pytest.mark.parametrize(
    ("r", "vocab_size"), [(1, None), (37, None), (37, 290)], ids=["one", "all", "padded"]
)
@pytest.mark.parametrize("logits_bytes", [1, SMALL_TILE, 1 << 20])
def test_weights_last_matches_fp64(
    r: int, vocab_size: int | None, scale: float, temperature: float, logits_bytes: int
):
    hidden, weight, labels, g, e = problem(r, 16, 301, scale, vocab_size=vocab_size)
    options = {"temperature": temperature, "vocab_size": vocab_size}
    logp, entropy, dx, dw = naive(hidden, weight, labels, g, e, **options)
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, e, logits_bytes=logits_bytes, **options)
    assert out.logp_r.dtype == dx_.dtype == dw_.dtype == torch.float32
    assert max(error(out.logp_r, logp), error(dx_, dx), error(dw_, dw)) < 3e-6
    assert float((out.entropy_r - entropy).abs().max()) < 1e-5
    assert out.surrogate is None


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0], ids=["flat", "normal", "peaked"])
@pytest.mark.parametrize("logits_bytes", [1, SMALL_TILE * 5, 1 << 20])
def test_weights_first_matches_fp64(scale: float, logits_bytes: int):
    hidden, weight, labels, g, _ = problem(37, 16, 301, scale, vocab_size=290)
    options = {"temperature": 0.6, "vocab_size": 290}
    logp, entropy, dx, dw = naive(hidden, weight, labels, g, **options)
    out, dx_, dw_ = fused_weights_first(
        hidden, weight, labels, g, entropy=True, logits_bytes=logits_bytes, **options
    )
    assert max(error(out.logp_r, logp), error(dx_, dx), error(dw_, dw)) < 3e-6
    assert float((out.entropy_r - entropy).abs().max()) < 1e-5
    assert error(out.surrogate, (g.double() * logp).sum()) < 1e-5


def test_confident_policy_keeps_relative_accuracy():
    """log p is about -3e-4 at logits near 80, where a stored fp32 logsumexp, accurate to 4e-6, would err by 1
    %.
    """
    noise = 0.001 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    hidden = torch.cat((torch.eye(8) * 80, torch.full((8, 1), 700.0)), 1)
    weight = torch.cat((torch.eye(8) * 0.125 + noise, torch.full((8, 1), 0.1)), 1)
    labels, g = torch.arange(8), torch.ones(8)
    logp, _, dx, dw = naive(hidden, weight, labels, g)
    assert -1e-3 < float(logp.mean()) < -1e-4
    for fused in (fused_weights_last, fused_weights_first, fused_stash):
        out, dx_, dw_ = fused(hidden, weight, labels, g)
        assert error(out.logp_r, logp) < 1e-3
        assert max(error(dx_, dx), error(dw_, dw)) < 5e-3


@pytest.mark.parametrize("fused", [fused_weights_last, fused_weights_first, fused_stash])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0], ids=["flat", "normal", "peaked"])
def test_bf16_inputs_are_computed_in_fp32(fused, scale: float):
    hidden, weight, labels, g, _ = problem(50, 32, 301, scale, torch.bfloat16)
    logp, _, dx, dw = naive(hidden, weight, labels, g)
    out, dx_, dw_ = fused(hidden, weight, labels, g, logits_bytes=SMALL_TILE * 10)
    assert out.logp_r.dtype == torch.float32
    assert dx_.dtype == dw_.dtype == torch.bfloat16
    assert error(out.logp_r, logp) < 3e-6
    assert max(error(dx_, dx), error(dw_, dw)) < 2**-8  # one rounding of the result


def test_many_accumulations_in_bf16_do_not_lose_the_small_ones():
    """256 tiles contribute equally: accumulated in bf16, dW would stall at a fraction of the sum."""
    r = 256
    hidden, weight = torch.ones(r, 4, dtype=torch.bfloat16), torch.zeros(5, 4, dtype=torch.bfloat16)
    labels, g = torch.zeros(r, dtype=torch.int64), torch.full((r,), 1.0)
    *_, dw = naive(hidden, weight, labels, g)
    assert error(fused_weights_first(hidden, weight, labels, g, logits_bytes=1)[2], dw) < 2**-8
    assert error(fused_weights_last(hidden, weight, labels, g, logits_bytes=1)[2], dw) < 2**-8


def test_gradcheck_in_fp64():
    hidden, weight, labels, *_ = problem(5, 4, 11, dtype=torch.float64, vocab_size=10)
    hidden.requires_grad_(), weight.requires_grad_()

    def weights_last(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_logprob(x, w, labels, temperature=0.7, entropy=True, vocab_size=10, logits_bytes=200)[
            :2
        ]

    assert torch.autograd.gradcheck(weights_last, (hidden, weight))


@settings(max_examples=60, deadline=None)
@given(
    r=st.integers(0, 20),
    h=st.integers(1, 9),
    v=st.integers(1, 40),
    padding=st.integers(0, 39),
    logits_bytes=st.integers(1, 8000),
    stash_bytes=st.integers(0, 6000),
    temperature=st.floats(0.2, 3),
    per_row=st.booleans(),
)
def test_any_shape(
    r: int,
    h: int,
    v: int,
    padding: int,
    logits_bytes: int,
    stash_bytes: int,
    temperature: float | Tensor,
    per_row: bool,
):
    vocab_size = max(1, v - padding)
    hidden, weight, labels, g, e = problem(r, h, v, 2.0, torch.float64, vocab_size)
    if per_row:
        temperature = temperature * (1 + torch.arange(r) / 7)
    options = {"temperature": temperature, "vocab_size": vocab_size}
    logp, entropy, dx, dw = naive(hidden, weight, labels, g, e, **options)
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, e, logits_bytes=logits_bytes, **options)
    for got, want in ((out.logp_r, logp), (out.entropy_r, entropy), (dx_, dx), (dw_, dw)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    *_, dx, dw = naive(hidden, weight, labels, g, **options)
    options["logits_bytes"] = logits_bytes
    first = fused_weights_first(hidden, weight, labels, g, **options)
    stash = fused_weights_last(hidden, weight, labels, g, stash_bytes=stash_bytes, **options)
    for out, dx_, dw_ in (first, stash):
        for got, want in ((out.logp_r, logp), (dx_, dx), (dw_, dw)):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [fused_weights_last, fused_weights_first, fused_stash])
def test_no_tokens_gives_connected_zero_gradients(fused):
    hidden, weight, labels, g, _ = problem(0, 4, 11)
    out, dx, dw = fused(hidden, weight, labels, g)
    assert out.logp_r.shape == (0,)
    assert dx.shape == (0, 4)
    assert torch.equal(dw, torch.zeros(11, 4))


def test_gradients_only_where_wanted():
    hidden, weight, labels, g, _ = problem(6, 4, 11)
    logp, _, dx, dw = naive(hidden, weight, labels, g)
    for weight_r in (None, g):
        with torch.no_grad():
            out = linear_logprob(hidden, weight.requires_grad_(), labels, weight_r=weight_r)
        assert not out.logp_r.requires_grad
        assert error(out.logp_r, logp) < 1e-6
        if weight_r is not None:
            assert error(out.surrogate, (g.double() * logp).sum()) < 1e-6
            assert not out.surrogate.requires_grad

        x = hidden.clone().requires_grad_()
        out = linear_logprob(x, weight.detach(), labels, weight_r=weight_r)
        (out.surrogate if weight_r is not None else (g * out.logp_r).sum()).backward()
        assert error(x.grad, dx) < 1e-6

        w = weight.detach().clone().requires_grad_()
        out = linear_logprob(hidden, w, labels, weight_r=weight_r)
        (out.surrogate if weight_r is not None else (g * out.logp_r).sum()).backward()
        assert error(w.grad, dw) < 1e-6


def test_entropy_alone_and_logp_alone_backpropagate():
    hidden, weight, labels, g, e = problem(6, 4, 11)
    for g_, e_ in ((g, torch.zeros(6)), (torch.zeros(6), e)):
        *_, dx, dw = naive(hidden, weight, labels, g_, e_)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_logprob(x, w, labels, entropy=True)
        ((g * out.logp_r) if g_ is g else (e * out.entropy_r)).sum().backward()
        assert max(error(x.grad, dx), error(w.grad, dw)) < 1e-6


def test_surrogate_is_the_only_way_back_with_weights_first():
    hidden, weight, labels, g, _ = problem(6, 4, 11)
    x, w = hidden.requires_grad_(), weight.requires_grad_()
    out = linear_logprob(x, w, labels, weight_r=g, entropy=True)
    assert not out.logp_r.requires_grad
    assert not out.entropy_r.requires_grad
    *_, dx, dw = naive(hidden, weight, labels, -3 * g)
    (-3 * out.surrogate).backward(retain_graph=True)
    assert max(error(x.grad, dx), error(w.grad, dw)) < 1e-6
    with pytest.raises(RuntimeError, match="once"):
        out.surrogate.backward()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fused", [fused_weights_last, fused_weights_first, fused_stash])
def test_non_finite_hidden_states_show(fused, bad: float):
    hidden, weight, labels, g, _ = problem(6, 4, 11)
    hidden[2, 1] = bad
    logp, _, dx, _ = naive(hidden, weight, labels, g)
    out, dx_, dw_ = fused(hidden, weight, labels, g, logits_bytes=4 * 6 * 3)
    assert torch.equal(out.logp_r.isfinite(), logp.isfinite())
    assert not out.logp_r[2].isfinite()
    assert torch.equal(dx_.isfinite().all(1), dx.isfinite().all(1))
    assert not dw_.isfinite().all()


def test_label_in_the_padding_is_impossible_not_wrong():
    hidden, weight, labels, *_ = problem(3, 4, 11)
    labels[1] = 10
    logp_r = linear_logprob(hidden, weight, labels, vocab_size=10).logp_r
    assert torch.equal(logp_r.isneginf(), labels == 10)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self.numel = max(self.numel, item.numel())
        return result


@pytest.mark.parametrize("fused", [fused_weights_last, fused_weights_first])
def test_full_logits_never_exist(fused):
    r, h, v = 600, 8, 500
    hidden, weight, labels, g, e = problem(r, h, v)
    entropy = {"e_r": e} if fused is fused_weights_last else {"entropy": True}
    with LargestTensor() as largest:
        fused(hidden, weight, labels, g, logits_bytes=4 * v * 20, **entropy)
    assert largest.numel <= v * 20

    with LargestTensor() as largest:  # the instrument sees full logits where they do exist
        naive(hidden, weight, labels, g)
    assert largest.numel == r * v


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_rh": torch.zeros(3, 5)}, r"\[3, 5\] and weight_vh \[11, 4\]"),
        ({"hidden_rh": torch.zeros(3, 4, dtype=torch.bfloat16)}, "want the same"),
        ({"labels_r": torch.zeros(2, dtype=torch.int64)}, r"want torch.int64 \[3\]"),
        ({"labels_r": torch.zeros(3)}, r"torch.float32 \[3\]: want torch.int64"),
        ({"weight_r": torch.zeros(2)}, r"want \[3\]"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": torch.ones(2)}, r"temperature is \[2\]: want \[3\]"),
        ({"backend": "fast"}, "backend 'fast'"),
        ({"vocab_size": 12}, "vocab_size 12: weight_vh has 1 x 11 rows"),
    ],
)
def test_what_does_not_fit_is_said(change: dict, message: str):
    arguments = {"hidden_rh": torch.zeros(3, 4), "weight_vh": torch.zeros(11, 4)}
    arguments |= {"labels_r": torch.zeros(3, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)


def test_tensor_parallel_equals_one_process(tmp_path):
    """Four ranks are one group (shards of 5 columns) and two groups (shards of 10): without padding, with
    part of a shard and with a whole shard of padding. Labels lie on both sides of every shard's edge.
    """
    vocab_sizes = {2: [20, 17, 13], 4: [20, 17, 13]}
    on_tensor_parallel_ranks(_check_tensor_parallel, tmp_path, vocab_sizes)


def _check_tensor_parallel(group: dist.ProcessGroup, vocab_size: int) -> None:
    hidden, weight, labels, g, e = problem_at_edges(group, 20, vocab_size, torch.float64)
    weight[:7] -= 200 * hidden.sign().mean(0)  # some shards are hopeless for some tokens, labels or not
    shard = own_shard(group, 20)
    own_weight, columns = weight[shard], 20 // group.size()

    options = {"temperature": 0.8, "vocab_size": vocab_size}
    parallel = {**options, "tp_group": group, "logits_bytes": 8 * 3 * columns}
    for mode in ("recompute", "stash", "partly stashed", "weights_first"):
        e_r = e if mode == "recompute" else None
        logp, entropy, dx, dw = naive(hidden, weight, labels, g, e_r, **options)
        if mode == "weights_first":
            out, dx_, dw_ = fused_weights_first(hidden, own_weight, labels, g, entropy=True, **parallel)
        else:
            stash = {"recompute": 0, "stash": 1 << 20, "partly stashed": 8 * columns * 3}[mode]
            out, dx_, dw_ = fused_weights_last(
                hidden, own_weight, labels, g, e_r, stash_bytes=stash, **parallel
            )
            assert out.mode == ("recompute" if mode == "recompute" else "stash")
        dist.all_reduce(dx_, group=group)
        expected = [(out.logp_r, logp), (dx_, dx), (dw_, dw[shard])]
        if out.entropy_r is not None:
            expected.append((out.entropy_r, entropy))
        for got, want in expected:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        nothing = (fused_weights_first if mode == "weights_first" else fused_stash)(
            hidden[:0], own_weight, labels[:0], g[:0], **parallel
        )
        assert torch.equal(nothing[2], torch.zeros_like(own_weight))
