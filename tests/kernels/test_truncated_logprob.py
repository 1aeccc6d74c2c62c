"""Log-probs over supports against the softmax of masked logits in fp64 under plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.references.head_reference import error, on_tensor_parallel_ranks, own_shard, problem
from helpers.references.support_reference import made_supports, masked
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.kernels.supports import Supports
from megatron_gvpo.kernels.truncated_logprob import truncated_logprob

MODES = ["entropy", "stash", "recompute", "weights_first"]


def fused(
    mode: str, x: Tensor, w: Tensor, labels: Tensor, supports: Supports, g: Tensor, e: Tensor, **options
) -> tuple[LinearLogprob, Tensor, Tensor]:
    x, w = (t.detach().requires_grad_() for t in (x, w))
    if mode == "weights_first":
        out = truncated_logprob(x, w, labels, supports, weight_r=g, entropy=True, **options)
        return out, *torch.autograd.grad(out.surrogate, (x, w))
    options["stash_bytes"] = 1 << 30 if mode == "stash" else 0
    out = truncated_logprob(x, w, labels, supports, entropy=mode == "entropy", **options)
    loss = (g * out.logp_r).sum() + ((e * out.entropy_r).sum() if mode == "entropy" else 0)
    return out, *torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("narrow", [0, 3, 400], ids=["in tiles", "mixed", "members alone"])
@pytest.mark.parametrize("logits_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("per_row", [False, True], ids=["one temperature", "several"])
def test_masked_softmax_in_fp64(mode: str, narrow: int, logits_bytes: int, per_row: bool):
    x, w, labels, g, e = problem(41, 16, 301, 3.0, torch.float64, 290)
    supports = made_supports(labels, 290, [1, 2, 9, 290, 0])
    temperature = 0.5 + torch.arange(41) / 20 if per_row else 0.7
    logp, entropy, dx, dw = masked(x, w, labels, supports, g, e * (mode == "entropy"), temperature, 290)
    options = {"temperature": temperature, "vocab_size": 290, "narrow": narrow}
    out, dx_, dw_ = fused(mode, x, w, labels, supports, g, e, logits_bytes=logits_bytes, **options)
    pairs = [(out.logp_r, logp), (dx_, dx), (dw_, dw)]
    pairs += [(out.entropy_r, entropy)] if mode in ("entropy", "weights_first") else []
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("narrow", [0, 400])
def test_one_member_has_log_prob_zero_and_no_gradient(mode: str, narrow: int):
    x, w, labels, g, e = problem(7, 8, 50, 3.0)
    supports = Supports(labels.clone(), torch.ones(7, dtype=torch.int64))
    out, dx, dw = fused(mode, x, w, labels, supports, g, e, narrow=narrow)
    assert out.logp_r.tolist() == [0.0] * 7
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("narrow", [0, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_computed_in_fp32(mode: str, narrow: int, dtype: torch.dtype):
    x, w, labels, g, e = problem(60, 32, 301, 3.0, dtype)
    supports = made_supports(labels, 301, [1, 3, 20, 150])
    logp, _, dx, dw = masked(x, w, labels, supports, g, e * (mode == "entropy"), 0.9)
    out, dx_, dw_ = fused(mode, x, w, labels, supports, g, e, temperature=0.9, narrow=narrow)
    assert out.logp_r.dtype == torch.float32
    assert dx_.dtype == dw_.dtype == dtype
    assert error(out.logp_r, logp) < 3e-6
    assert max(error(dx_, dx), error(dw_, dw)) < (2**-8 if dtype == torch.bfloat16 else 4e-6)


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens(mode: str):
    x, w, labels, g, e = problem(0, 4, 11)
    out, dx, dw = fused(mode, x, w, labels, made_supports(labels, 11, [1]), g, e)
    assert out.logp_r.shape == (0,)
    assert dx.shape == (0, 4)
    assert torch.equal(dw, torch.zeros(11, 4))


@pytest.mark.parametrize("narrow", [0, 400])
def test_megatrons_gradient_buffer_gets_the_sum(narrow: int):
    x, w, labels, g, e = problem(30, 8, 60, 3.0)
    supports = made_supports(labels, 60, [1, 4, 30, 0])
    *_, dw = masked(x, w, labels, supports, g, 0 * e, 1.0)
    for mode in ("stash", "weights_first"):
        weight = torch.nn.Parameter(w.clone())
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(w), False
        weight.zero_out_wgrad = True
        weight_r = g if mode == "weights_first" else None
        out = truncated_logprob(x, weight, labels, supports, weight_r=weight_r, narrow=narrow)
        (out.surrogate if weight_r is not None else (g * out.logp_r).sum()).backward()
        assert weight.grad_added_to_main_grad
        assert weight.grad is None
        assert error(weight.main_grad - 1, dw) < 1e-5


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    r=st.integers(0, 12),
    v=st.integers(1, 40),
    narrow=st.integers(0, 40),
    logits_bytes=st.integers(1, 4000),
    mode=st.sampled_from(MODES),
)
def test_any_shape(data: st.DataObject, r: int, v: int, narrow: int, logits_bytes: int, mode: str):
    sizes = data.draw(st.lists(st.integers(0, v), min_size=1, max_size=5))
    x, w, labels, g, e = problem(r, 5, v, 2.0, torch.float64)
    supports = made_supports(labels, v, sizes)
    logp, _, dx, dw = masked(x, w, labels, supports, g, e * (mode == "entropy"), 0.8)
    options = {"temperature": 0.8, "narrow": narrow, "logits_bytes": logits_bytes}
    out, dx_, dw_ = fused(mode, x, w, labels, supports, g, e, **options)
    for got, want in ((out.logp_r, logp), (dx_, dx), (dw_, dw)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_the_reference_backend_computes_the_same():
    x, w, labels, g, e = problem(20, 8, 60, 3.0, torch.float64)
    supports = made_supports(labels, 60, [2, 9, 0])
    logp, entropy, dx, dw = masked(x, w, labels, supports, g, e, 1.0)
    out, dx_, dw_ = fused("entropy", x, w, labels, supports, g, e, narrow=0, backend="reference")
    for got, want in ((out.logp_r, logp), (out.entropy_r, entropy), (dx_, dx), (dw_, dw)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_as_many_supports_as_labels_are_wanted():
    x, w, labels, *_ = problem(3, 4, 11)
    supports = made_supports(labels, 11, [2])
    with pytest.raises(ValueError, match="3 supports for 2 labels"):
        truncated_logprob(x[:2], w, labels[:2], supports)


def test_tensor_parallel_equals_one_process(tmp_path):
    """Four ranks are one group and two groups; supports lie within one shard and across all of them."""
    vocab_sizes = {2: [20, 17, 13], 4: [20, 17, 13]}
    on_tensor_parallel_ranks(_check_tensor_parallel, tmp_path, vocab_sizes)


def _check_tensor_parallel(group: dist.ProcessGroup, vocab_size: int) -> None:
    for narrow in (0, 3, 20):
        _check_narrow(group, vocab_size, narrow)


def _check_narrow(group: dist.ProcessGroup, vocab_size: int, narrow: int) -> None:
    shard = own_shard(group, 20)
    logits_bytes = 8 * 3 * 20 // group.size()
    labels = torch.arange(vocab_size)
    x, w, _, g, e = problem(vocab_size, 6, 20, 3.0, torch.float64)
    w[vocab_size:] = 1e3  # padding that would take the whole softmax if it were not masked
    supports = made_supports(labels, vocab_size, [1, 2, 5, 13, 0])
    options = {"temperature": 0.8, "vocab_size": vocab_size, "tp_group": group, "narrow": narrow}
    for mode in MODES:
        logp, entropy, dx, dw = masked(x, w, labels, supports, g, e * (mode == "entropy"), 0.8, vocab_size)
        out, dx_, dw_ = fused(mode, x, w[shard], labels, supports, g, e, logits_bytes=logits_bytes, **options)
        dist.all_reduce(dx_, group=group)
        pairs = [(out.logp_r, logp), (dx_, dx), (dw_, dw[shard])]
        pairs += [(out.entropy_r, entropy)] if mode == "entropy" else []
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
