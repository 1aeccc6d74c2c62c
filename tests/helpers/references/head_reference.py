"""The head in fp64 with plain autograd, the fused head in its modes, and problems for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron_gvpo.kernels.linear_logprob import LinearLogprob, linear_logprob

SMALL_TILE = 4 * 64 * 7  # bytes: a few columns or a token at a time


def problem(
    r: int,
    h: int,
    v: int,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(hidden, weight, labels, upstream of logp, upstream of entropy); logits have a spread of `scale`."""
    generator = torch.Generator().manual_seed(r * 7919 + h * 31 + v)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden_rh, weight_vh = normal(r, h).to(dtype), (normal(v, h) * scale / h**0.5).to(dtype)
    labels_r = torch.randint(vocab_size or v, (r,), generator=generator)
    return hidden_rh, weight_vh, labels_r, normal(r).float(), normal(r).float()


def naive(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    g_r: Tensor,
    e_r: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, dX and dW of sum(g * logp + e * entropy), all in fp64 on full logits."""
    x, w = (t.detach().double().requires_grad_() for t in (hidden_rh, weight_vh))
    scale = temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature
    logp_rv = torch.log_softmax((x @ w.T)[:, :vocab_size] / scale, -1)
    entropy_r = -(logp_rv.exp() * logp_rv).sum(-1)
    logp_r = logp_rv.gather(1, labels_r[:, None])[:, 0]
    loss = (g_r * logp_r).sum() + (0 if e_r is None else (e_r * entropy_r).sum())
    return logp_r.detach(), entropy_r.detach(), *torch.autograd.grad(loss, (x, w))


def fused_weights_last(
    hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, g_r: Tensor, e_r: Tensor | None = None, **options
) -> tuple[LinearLogprob, Tensor, Tensor]:
    x, w = (t.detach().requires_grad_() for t in (hidden_rh, weight_vh))
    out = linear_logprob(x, w, labels_r, entropy=e_r is not None, **options)
    loss = (g_r * out.logp_r).sum() + (0 if e_r is None else (e_r * out.entropy_r).sum())
    return out, *torch.autograd.grad(loss, (x, w))


def fused_weights_first(
    hidden_rh: Tensor, weight_vh: Tensor, labels_r: Tensor, g_r: Tensor, **options
) -> tuple[LinearLogprob, Tensor, Tensor]:
    x, w = (t.detach().requires_grad_() for t in (hidden_rh, weight_vh))
    out = linear_logprob(x, w, labels_r, weight_r=g_r, **options)
    return out, *torch.autograd.grad(out.surrogate, (x, w))


def fused_stash(*inputs: Tensor, **options) -> tuple[LinearLogprob, Tensor, Tensor]:
    """`fused_weights_last` with room for all exponentials."""
    return fused_weights_last(*inputs, stash_bytes=1 << 30, **options)


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest magnitude of the expected values."""
    assert got.shape == want.shape
    if not want.numel():
        return 0.0
    return float((got.detach().double() - want).abs().max() / want.abs().max().clamp(min=1e-30))


Check = Callable[[dist.ProcessGroup, int], None]  # of a tensor-parallel group and a vocabulary's size
Prepare = Callable[[Callable[..., None]], None]  # gets `setattr`, for functions and constants of kernels


def on_tensor_parallel_ranks(
    check: Check, directory: Path, vocab_sizes: dict[int, list[int]], prepare: Prepare | None = None
) -> None:
    """Run `check` on four processes, with the vocabularies for groups of 2 ranks and for one of 4 ranks.

    Every process calls `prepare` first.
    """
    mp.spawn(_tensor_parallel_rank, (str(directory / "store"), check, vocab_sizes, prepare), nprocs=4)


def _tensor_parallel_rank(
    rank: int, store: str, check: Check, vocab_sizes: dict[int, list[int]], prepare: Prepare | None
) -> None:
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(setattr)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    try:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
        for size, vocab_sizes_of_group in vocab_sizes.items():
            for vocab_size in vocab_sizes_of_group:
                check(groups[size], vocab_size)
    finally:
        dist.destroy_process_group()


def own_shard(group: dist.ProcessGroup, v: int) -> slice:
    """The rows of a weight of `v` rows that this rank of the tensor-parallel group has."""
    shard = v // group.size()
    return slice(group.rank() * shard, (group.rank() + 1) * shard)


def problem_at_edges(
    group: dist.ProcessGroup, v: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A problem with labels on both sides of every shard's edge; rows from `vocab_size` on are padding."""
    shard = v // group.size()
    edges = {i * shard + side for i in range(group.size() + 1) for side in (-1, 0)}
    labels = torch.tensor(sorted({*edges, 0, vocab_size - 1} & set(range(vocab_size))))
    hidden, weight, _, g, e = problem(len(labels), 6, v, 3.0, dtype)
    weight[vocab_size:] = 1e3  # padding that would take the whole softmax if it were not masked
    return hidden, weight, labels, g, e
