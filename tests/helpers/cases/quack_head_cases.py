"""Cases of the head's backend `quack` with a transcription of its product; test_quack_head.py runs them.

The rest is the backend's own code: Triton's interpreter runs the kernel that rescales the exponentials.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from helpers.paths import ROOT
from helpers.references import quack_transcription
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
from megatron_gvpo.kernels import head, quack_tiles
from megatron_gvpo.kernels.linear_logprob import linear_logprob
from megatron_gvpo.kernels.truncated_logprob import truncated_logprob

QUACK = {"backend": "quack", "stash_dtype": torch.bfloat16}
ROUNDED = 2**-7  # as the stash in bf16: tests/kernels/test_head_stash.py


@pytest.fixture(autouse=True)
def transcribed(monkeypatch: pytest.MonkeyPatch) -> None:
    transcribe(monkeypatch.setattr)


def transcribe(setattr: Callable[..., None]) -> None:
    """Replace the product of a GPU, and give small problems several products."""
    setattr(head, "_quack_tiles", lambda _: quack_tiles.QuackTiles(quack_transcription.product))
    setattr(quack_tiles, "_ROWS", 16)


@pytest.mark.parametrize("temperature", [0.6, "by row"])
@pytest.mark.parametrize(("v", "tile"), [(384, 192), (256, 128), (320, 64)])
def test_weights_first_and_last_match_fp64(v: int, tile: int, temperature: float | str):
    hidden, weight, labels, g, _ = problem(37, 24, v + 64, 3.0, vocab_size=v)
    weight[v:] = 1e3  # padding
    options = {"temperature": temperature, "vocab_size": v}
    if temperature == "by row":
        options["temperature"] = torch.linspace(0.5, 2, 37)
    assert quack_tiles.tile_columns(v) == tile
    logp, _, dx, dw = naive(hidden, weight, labels, g, **options)
    partly = {"stash_bytes": 2 * (v + 64) * 20}
    for fused in (fused_stash, fused_weights_first):
        out, dx_, dw_ = fused(hidden, weight, labels, g, **options, **QUACK)
        assert error(out.logp_r, logp) < 1e-6
        assert 1e-5 < max(error(dx_, dx), error(dw_, dw)) < ROUNDED
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, **partly, **options, **QUACK)
    assert out.stash_share == 20 / 37
    assert error(out.logp_r, logp) < 1e-6
    assert max(error(dx_, dx), error(dw_, dw)) < ROUNDED


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_logits_of_any_size(size: float):
    """Tiles whose largest logits are far apart: some vanish beside others, and nothing overflows."""
    hidden, weight, labels, g, _ = problem(40, 24, 384, 1.0)
    weight *= torch.linspace(-size, size, 384)[:, None]
    logp, _, dx, dw = naive(hidden, weight, labels, g)
    out, dx_, dw_ = fused_stash(hidden, weight, labels, g, **QUACK)
    assert error(out.logp_r, logp) < 1e-6
    assert max(error(dx_, dx), error(dw_, dw)) < ROUNDED


@pytest.mark.parametrize(
    ("bias", "mean"), [(5, -1.5), (9, -0.17), (13, -1.6e-2), (19, -1.2e-3), (25, -1.8e-4)]
)
def test_peaked_policies(bias: float, mean: float):
    """Gradients have the error of one rounding to bf16, however small the label's 1 - p is."""
    hidden, weight, labels, g, _ = problem(64, 32, 192, 1.0)
    hidden += bias * weight[labels] / weight[labels].square().sum(1, keepdim=True)
    logp, _, dx, dw = naive(hidden, weight, labels, g)
    assert 0.5 < float(logp.mean()) / mean < 2
    out, dx_, dw_ = fused_stash(hidden, weight, labels, g, **QUACK)
    assert error(out.logp_r, logp) < 1e-6 + 1e-6 / abs(mean)
    assert max(error(dx_, dx), error(dw_, dw)) < ROUNDED


def test_a_common_summand_of_all_logits_changes_nothing():
    """At logits of 200 an fp32 number is 1e-5 from the next, and log p near 0 has a much smaller error."""
    hidden, weight, labels, *_ = problem(64, 32, 192, 1.0)
    hidden += 25 * weight[labels] / weight[labels].square().sum(1, keepdim=True)
    hidden, weight = (
        torch.cat((hidden, hidden.new_full((64, 1), 200)), 1),
        torch.cat((weight, weight.new_ones(192, 1)), 1),
    )
    want = naive(hidden, weight, labels, torch.ones(64))[0]
    out = linear_logprob(hidden, weight.requires_grad_(), labels, stash_bytes=1 << 20, **QUACK)
    assert -0.1 < float(want.min()) < -1e-3
    assert float((out.logp_r - want).abs().max()) < 1e-6


def test_entropies_and_supports_take_the_ordinary_tiles():
    hidden, weight, labels, g, e = problem(23, 8, 192, 3.0)
    logp, entropy, dx, dw = naive(hidden, weight, labels, g, e)
    out, dx_, dw_ = fused_weights_last(hidden, weight, labels, g, e, **QUACK)
    for got, want in ((out.logp_r, logp), (out.entropy_r, entropy), (dx_, dx), (dw_, dw)):
        assert error(got, want) < 1e-5
    out = linear_logprob(hidden.requires_grad_(), weight, labels, weight_r=g, entropy=True, **QUACK)
    assert error(out.entropy_r, entropy) < 1e-5
    supports = made_supports(labels, 192, [1, 2, 9, 40, 0])
    logp, _, dx, _ = masked(hidden.detach(), weight, labels, supports, g, 0 * g, 0.7)
    options = {"stash_bytes": 1 << 20, "narrow": 0, "temperature": 0.7, "backend": "quack"}
    out = truncated_logprob(hidden, weight, labels, supports, **options)
    assert error(out.logp_r, logp) < 1e-5
    assert error(torch.autograd.grad((g * out.logp_r).sum(), hidden)[0], dx) < ROUNDED


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fused", [fused_weights_first, fused_stash])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
def test_non_finite_hidden_states_show(fused, bad: float):
    hidden, weight, labels, g, _ = problem(6, 4, 128)
    hidden[2, 1] = bad
    logp, _, dx, _ = naive(hidden, weight, labels, g)
    out, dx_, dw_ = fused(hidden, weight, labels, g, **QUACK)
    assert torch.equal(out.logp_r.isfinite(), logp.isfinite())
    assert not out.logp_r[2].isfinite()
    assert torch.equal(dx_.isfinite().all(1), dx.isfinite().all(1))
    assert not dw_.isfinite().all()


def test_the_check_of_a_gpu_has_every_tile():
    """benchmarks/device_check.py, whose limits the transcription keeps."""
    sys.path.append(str(ROOT / "benchmarks"))
    from lib.device import head as check

    for vocabularies in check.QUACK_VOCABULARIES.values():
        assert [quack_tiles.tile_columns(vocab) for vocab in vocabularies] == [192, 128, 64]
    result = check.quack(smoke=True)
    assert result.pop("right") and len(result) == 6
    assert check.no_quack() == "no GPU"


def test_a_vocabulary_that_no_tile_divides_is_refused():
    hidden, weight, labels, *_ = problem(3, 4, 100)
    with pytest.raises(ValueError, match="multiple of 64 tokens on each rank, and one has 100: use 'auto'"):
        linear_logprob(hidden.requires_grad_(), weight, labels, stash_bytes=1 << 20, **QUACK)


def test_tensor_parallel_equals_one_process(tmp_path):
    """Four ranks are one group and two groups. The last shard has all columns, some, or none."""
    vocab_sizes = {2: [512], 4: [512, 448, 384]}
    on_tensor_parallel_ranks(_check_tensor_parallel, tmp_path, vocab_sizes, transcribe)


def _check_tensor_parallel(group: dist.ProcessGroup, vocab_size: int) -> None:
    """Statistics are merged after the first product, and weights come after that."""
    hidden, weight, labels, g, _ = problem_at_edges(group, 512, vocab_size)
    shard = own_shard(group, 512)
    options = {"temperature": 0.8, "vocab_size": vocab_size}
    logp, _, dx, dw = naive(hidden, weight, labels, g, **options)
    for fused in (fused_stash, fused_weights_first):
        out, dx_, dw_ = fused(hidden, weight[shard], labels, g, tp_group=group, **options, **QUACK)
        dist.all_reduce(dx_, group=group)
        assert error(out.logp_r, logp) < 1e-6
        assert error(dx_, dx) < ROUNDED
        assert float((dw_ - dw[shard]).abs().max() / dw.abs().max()) < ROUNDED
