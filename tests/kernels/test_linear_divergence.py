"""Divergences from a teacher, computed by tiles, against torch.nn.functional on all logits in fp64."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.references.divergence_reference import on_logits
from helpers.references.head_reference import error
from torch import Tensor
from torch.profiler import profile

from megatron_gvpo.kernels.divergence import Divergence
from megatron_gvpo.kernels.linear_divergence import LinearDivergence, TeacherLogits, linear_divergence
from megatron_gvpo.kernels.linear_logprob import linear_logprob

ALL = [Divergence("forward"), Divergence("reverse"), Divergence("js", 0.5), Divergence("js", 0.1)]
KINDS = [*ALL, *(Divergence(d.kind, d.beta, top_k=5) for d in ALL)]
each = pytest.mark.parametrize("kind", KINDS, ids=lambda d: f"{d.kind}-{d.beta}-{d.top_k}")


@dataclass
class Problem:
    """A student with 60 tokens and 4 rows of padding, and a teacher of another width with `teacher_vocab`."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels: Tensor
    g: Tensor
    vocab_size: int
    teacher_vocab: int

    @staticmethod
    def make(
        r: int = 37,
        teacher_vocab: int = 60,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
        vocab_size: int = 60,
    ) -> Problem:
        generator = torch.Generator().manual_seed(r)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        weight, teacher_weight = (
            normal(vocab_size + 4, 8) * scale,
            normal(teacher_vocab, 12) * scale,
        )
        weight[vocab_size:] = 1e3  # padding that would take the whole softmax if it were not masked
        labels = torch.randint(vocab_size, (r,), generator=generator)
        tensors = (normal(r, 8), weight, normal(r, 12), teacher_weight)
        return Problem(*(t.to(dtype) for t in tensors), labels, normal(r), vocab_size, teacher_vocab)

    def teacher(self) -> TeacherLogits:
        return TeacherLogits(self.teacher_hidden, self.teacher_weight, self.teacher_vocab)

    def fused(self, kind: Divergence, **options) -> tuple[LinearDivergence, Tensor, Tensor]:
        x, w = (t.detach().requires_grad_() for t in (self.hidden, self.weight))
        options = {"vocab_size": self.vocab_size} | options
        out = linear_divergence(x, w, self.teacher(), self.labels, self.g, kind, **options)
        return out, *torch.autograd.grad(out.surrogate, (x, w))

    def plain(self, kind: Divergence, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(D, logp, dX, dW) in fp64 on all logits."""
        x, w = (t.detach().double().requires_grad_() for t in (self.hidden, self.weight))
        z = (x @ w.T)[:, : self.vocab_size] / temperature
        y = self.teacher_hidden.double() @ self.teacher_weight.double().T / temperature
        common = min(self.vocab_size, self.teacher_vocab)
        divergence = on_logits(kind, z[:, :common], y[:, :common])
        logp = z.log_softmax(1).gather(1, self.labels[:, None])[:, 0]
        return divergence, logp, *torch.autograd.grad((self.g * divergence).sum(), (x, w))


@each
@pytest.mark.parametrize("teacher_vocab", [60, 64, 50])
@pytest.mark.parametrize("logits_bytes", [8 * 64 * 9, 1 << 20])
def test_equals_functional_in_fp64(kind: Divergence, teacher_vocab: int, logits_bytes: int):
    problem = Problem.make(teacher_vocab=teacher_vocab)
    out, *gradients = problem.fused(kind, temperature=0.7, logits_bytes=logits_bytes)
    divergence, logp, *expected = problem.plain(kind, 0.7)
    for got, want in zip(
        (out.divergence_r, out.logp_r, *gradients), (divergence, logp, *expected), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(out.surrogate, (problem.g * divergence).sum())


@each
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0], ids=["flat", "normal", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_in_fp32(kind: Divergence, scale: float, dtype: torch.dtype):
    problem = Problem.make(scale=scale, dtype=dtype)
    out, *gradients = problem.fused(kind)
    divergence, logp, *expected = problem.plain(kind)
    assert out.divergence_r.dtype == torch.float32
    assert float((out.divergence_r - divergence).abs().max()) < 1e-6 * max(1.0, float(divergence.max()))
    assert error(out.logp_r, logp) < 3e-6
    for got, want in zip(gradients, expected, strict=True):
        assert got.dtype == dtype
        # Log-ratios that are near 0, or far from it, are known to 1e-7 of 1, or of the largest.
        assert error(got, want) < (2**-7 if dtype == torch.bfloat16 else 1e-5 if scale == 1 else 1e-4)


@each
def test_a_teacher_that_is_the_student_has_no_divergence_and_no_gradient(kind: Divergence):
    problem = Problem.make(dtype=torch.float32)
    problem.teacher_hidden, problem.teacher_weight = problem.hidden, problem.weight[:60]
    out, dx, dw = problem.fused(kind)
    largest = 1e-6 if kind.kind == "js" or kind.top_k else 0.0  # log m rounds, and so does the rest
    for zero in (out.divergence_r, dx, dw):
        assert float(zero.abs().max()) <= largest


def test_top_k_of_all_tokens_is_all_and_fewer_are_less():
    problem = Problem.make()
    for kind in ALL:
        of_all_tokens = problem.fused(kind)[0].divergence_r
        parts = [
            problem.fused(Divergence(kind.kind, kind.beta, k))[0].divergence_r for k in (1, 5, 20, 60, 99)
        ]
        torch.testing.assert_close(parts[-1], of_all_tokens)
        torch.testing.assert_close(parts[-2], of_all_tokens)
        assert all((less <= more + 1e-12).all() for less, more in pairwise(parts))
        assert (parts[0] > 0).all() and (parts[2] < of_all_tokens).all()


def test_no_tokens_and_frozen_inputs():
    problem = Problem.make(r=0)
    out, dx, dw = problem.fused(Divergence("reverse"))
    assert out.divergence_r.shape == (0,) and dx.shape == (0, 8) and not dw.any()
    problem = Problem.make()
    with torch.no_grad():
        out = linear_divergence(
            problem.hidden,
            problem.weight,
            problem.teacher(),
            problem.labels,
            problem.g,
            ALL[0],
            vocab_size=60,
        )
    assert not out.surrogate.requires_grad
    torch.testing.assert_close(out.divergence_r, problem.plain(ALL[0])[0])


def test_a_teacher_that_does_not_fit_is_refused():
    problem = Problem.make()
    problem.teacher_weight = problem.teacher_weight[:59]
    with pytest.raises(ValueError, match=r"37 tokens and 59 rows .* want 37 tokens and at least 60 rows"):
        problem.fused(ALL[0])


def peak_bytes(run) -> int:
    """The most bytes that PyTorch's allocator held at once for what `run` allocated."""
    gc.collect()  # what is freed meanwhile must be what `run` allocated, and no garbage of other tests
    gc.disable()
    try:
        with profile(profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
    return peak


@pytest.mark.parametrize("kind", [ALL[0], ALL[2], KINDS[6]], ids=["forward", "js", "js, top_k"])
def test_memory_is_the_heads_and_one_tile(kind: Divergence):
    r, h, v, tile = 512, 4, 4096, 4 * 4096 * 64
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, h, generator=generator).requires_grad_() for n in (r, v))
    labels, g = torch.zeros(r, dtype=torch.int64), torch.ones(r)
    teacher = TeacherLogits(torch.randn(r, 2), torch.randn(v, 2), v)

    def head() -> None:
        linear_logprob(x, w, labels, weight_r=g, logits_bytes=tile).surrogate.backward()

    def divergence() -> None:
        linear_divergence(x, w, teacher, labels, g, kind, logits_bytes=tile).surrogate.backward()

    of_head, of_divergence = peak_bytes(head), peak_bytes(divergence)
    assert tile <= of_head < 1.5 * tile  # the instrument sees the head's one tile
    assert of_divergence < of_head + 1.4 * tile  # one tile, and a block of some rows in a few copies
    assert 2 * 4 * r * v > 4 * of_divergence  # two matrices of logits


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_tensor_parallel_equals_one_process(tmp_path, ranks: int):
    """The student has 64 rows with its padding, which four ranks do not all need; the teacher has others."""
    mp.spawn(_rank, (str(tmp_path / "store"), ranks), nprocs=ranks)


def _rank(rank: int, store: str, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        for vocab_size, teacher_vocab in ((60, 60), (60, 64), (60, 40), (44, 47)):
            for kind in (KINDS[1], KINDS[2], KINDS[4], KINDS[7]):
                _check(dist.group.WORLD, kind, vocab_size, teacher_vocab)
    finally:
        dist.destroy_process_group()


def _check(group: dist.ProcessGroup, kind: Divergence, vocab_size: int, teacher_vocab: int) -> None:
    problem = Problem.make(7, teacher_vocab, vocab_size=vocab_size)
    divergence, logp, dx, dw = problem.plain(kind, 0.8)
    shard = 64 // group.size()
    own_rows = slice(group.rank() * shard, (group.rank() + 1) * shard)
    padding = torch.full((64 - len(problem.weight), 8), 1e3, dtype=torch.float64)
    problem.weight = torch.cat((problem.weight, padding))[own_rows]
    problem.teacher_weight = problem.teacher_weight[own_rows]
    out, dx_, dw_ = problem.fused(kind, temperature=0.8, tp_group=group, logits_bytes=8 * 3 * shard)
    dist.all_reduce(dx_, group=group)
    dw = torch.cat((dw, torch.zeros(len(padding), 8, dtype=dw.dtype)))[own_rows]
    for got, want in ((out.divergence_r, divergence), (out.logp_r, logp), (dx_, dx), (dw_, dw)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
