"""Cases of the head's Triton kernels under Triton's interpreter; test_triton_head.py runs them.

The interpreter runs the kernels' own code on a CPU. It shows nothing about speed, and nothing about products
in bf16, which it lacks: products are in fp32 here.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.references.head_reference import (
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
from helpers.references.support_reference import made_supports, masked
from megatron_gvpo.kernels import triton_tiles
from megatron_gvpo.kernels.linear_logprob import linear_logprob
from megatron_gvpo.kernels.truncated_logprob import truncated_logprob

TRITON = {"backend": "triton"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small shapes several blocks of columns."""
    set_small_blocks(monkeypatch.setattr)


def set_small_blocks(setattr) -> None:
    setattr(triton_tiles, "ROW_BLOCK", 32)


FLAT, PEAKED = (pytest.param(s, marks=pytest.mark.proof, id=n) for s, n in ((0.01, "flat"), (8.0, "peaked")))
ONE = pytest.param(1, None, marks=pytest.mark.proof, id="one")


@pytest.mark.parametrize("scale", [FLAT, pytest.param(1.0, id="normal"), PEAKED])
@pytest.mark.parametrize(("r", "vocab_size"), [ONE, pytest.param(37, 97, id="padded")])
def test_every_mode_matches_fp64(r: int, vocab_size: int | None, scale: float):
    hidden, weight, labels, g, e = problem(r, 24, 101, scale, vocab_size=vocab_size)
    options = {"temperature": 0.6, "vocab_size": vocab_size}
    triton = {**options, **TRITON, "logits_bytes": 4 * 101 * 10}
    logp, entropy, dx, dw = naive(hidden, weight, labels, g, e, **options)
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, e, **triton)
    assert max(error(out.logp_r, logp), error(dx_, dx), error(dw_, dw)) < 1e-5
    assert float((out.entropy_r - entropy).abs().max()) < 1e-5

    *_, dx, dw = naive(hidden, weight, labels, g, **options)
    partly = {"stash_bytes": 20 * 101 * 4}
    results = [
        fused(hidden, weight, labels, g, **triton)
        for fused in (fused_weights_last, fused_weights_first, fused_stash)
    ]
    for out, dx_, dw_ in (*results, fused_weights_last(hidden, weight, labels, g, **partly, **triton)):
        assert max(error(out.logp_r, logp), error(dx_, dx), error(dw_, dw)) < 1e-5
    out, dx_, dw_ = fused_stash(hidden, weight, labels, g, stash_dtype=torch.bfloat16, **triton)
    assert error(out.logp_r, logp) < 1e-5
    assert 1e-5 < max(error(dx_, dx), error(dw_, dw)) < 2**-7


@settings(max_examples=8, deadline=None)
@given(
    r=st.integers(0, 20),
    h=st.integers(1, 20),
    v=st.integers(1, 70),
    padding=st.integers(0, 69),
    stash_rows=st.integers(0, 20),
    per_row=st.booleans(),
)
def test_any_shape(r: int, h: int, v: int, padding: int, stash_rows: int, per_row: bool):
    vocab_size = max(1, v - padding)
    hidden, weight, labels, g, e = problem(r, h, v, 2.0, vocab_size=vocab_size)
    options = {"temperature": 0.5 + torch.arange(r) / 20 if per_row else 0.7, "vocab_size": vocab_size}
    logp, entropy, dx, dw = naive(hidden, weight, labels, g, e, **options)
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, e, **options, **TRITON)
    for got, want in ((out.logp_r, logp), (out.entropy_r, entropy), (dx_, dx), (dw_, dw)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-5)
    *_, dx, dw = naive(hidden, weight, labels, g, **options)
    stash = fused_weights_last(hidden, weight, labels, g, stash_bytes=stash_rows * v * 4, **options, **TRITON)
    first = fused_weights_first(hidden, weight, labels, g, **options, **TRITON)
    for out, dx_, dw_ in (stash, first):
        for got, want in ((out.logp_r, logp), (dx_, dx), (dw_, dw)):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-5)


def test_tokens_outside_the_supports_are_hidden_from_the_kernels():
    hidden, weight, labels, g, e = problem(23, 8, 61, 3.0)
    supports = made_supports(labels, 61, [1, 2, 9, 40, 0])
    for entropy, weight_r, stash_bytes in ((True, None, 0), (False, None, 61 * 4 * 9), (False, g, 0)):
        logp, _, dx, dw = masked(hidden, weight, labels, supports, g, e * entropy, 0.7)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options = {"entropy": entropy, "weight_r": weight_r, "stash_bytes": stash_bytes, "narrow": 0}
        out = truncated_logprob(x, w, labels, supports, temperature=0.7, **options, **TRITON)
        loss = (g * out.logp_r).sum() if weight_r is None else out.surrogate
        (loss + (e * out.entropy_r).sum() if entropy else loss).backward()
        for got, want in ((out.logp_r, logp), (x.grad, dx), (w.grad, dw)):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fused", [fused_weights_last, fused_weights_first, fused_stash])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
def test_non_finite_hidden_states_show(fused, bad: float):
    hidden, weight, labels, g, _ = problem(6, 4, 11)
    hidden[2, 1] = bad
    logp, _, dx, _ = naive(hidden, weight, labels, g)
    out, dx_, dw_ = fused(hidden, weight, labels, g, **TRITON)
    assert torch.equal(out.logp_r.isfinite(), logp.isfinite())
    assert not out.logp_r[2].isfinite()
    assert torch.equal(dx_.isfinite().all(1), dx.isfinite().all(1))
    assert not dw_.isfinite().all()


def test_fp64_is_refused():
    hidden, weight, labels, *_ = problem(3, 4, 11, 1.0, torch.float64)
    with pytest.raises(ValueError, match="fp64: use 'chunked'"):
        linear_logprob(hidden, weight, labels, **TRITON)


def test_tensor_parallel_equals_one_process(tmp_path):
    """Four ranks are one group and two groups. Shards are ragged: another shard's label meets columns that
    are padding here, and must not match one.
    """
    vocab_sizes = {2: [61], 4: [53, 41]}  # of four shards, the last has some columns, or none
    on_tensor_parallel_ranks(_check_tensor_parallel, tmp_path, vocab_sizes, set_small_blocks)


def _check_tensor_parallel(group: dist.ProcessGroup, vocab_size: int) -> None:
    hidden, weight, labels, g, e = problem_at_edges(group, 80, vocab_size)
    shard = own_shard(group, 80)
    own, columns = weight[shard], 80 // group.size()
    options = {"temperature": 0.8, "vocab_size": vocab_size}
    parallel = {**options, **TRITON, "tp_group": group, "logits_bytes": 4 * 5 * columns}
    for mode in ("recompute", "stash", "partly stashed", "weights_first"):
        e_r = e if mode == "recompute" else None
        logp, _, dx, dw = naive(hidden, weight, labels, g, e_r, **options)
        stash = {"recompute": 0, "stash": 1 << 20, "partly stashed": 4 * columns * 3}
        if mode == "weights_first":
            out, dx_, dw_ = fused_weights_first(hidden, own, labels, g, **parallel)
        else:
            out, dx_, dw_ = fused_weights_last(
                hidden, own, labels, g, e_r, stash_bytes=stash[mode], **parallel
            )
        dist.all_reduce(dx_, group=group)
        for got, want in ((out.logp_r, logp), (dx_, dx), (dw_, dw[shard])):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
