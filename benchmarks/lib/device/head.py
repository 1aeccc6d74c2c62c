"""Errors against fp64, and seconds, of the fused head on this device in all its modes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.core.gpu_packages import REHEARSAL
from megatron_gvpo.kernels.linear_logprob import LinearLogprob, linear_logprob
from megatron_gvpo.megatron.parallel import device

Ways = Callable[[Tensor], Iterator[tuple[str, dict[str, Any]]]]  # of the tokens' weights

EVERYTHING = 1 << 40  # bytes of stash
TEMPERATURE = 0.7


def ways(weight_r: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of linear_logprob) of every mode."""
    yield "weights_first", {"weight_r": weight_r}
    yield "stash", {"stash_bytes": EVERYTHING}
    yield "recompute", {}


def head(smoke: bool) -> dict[str, Any]:
    """Return the largest errors of a forward and backward, relative to the largest value, and GPU memory."""
    sizes = (64, 32, 500) if smoke else (4096, 1536, 32_768)
    result = _errors(
        {"float32": (torch.float32, sizes, 1e-4), "bfloat16": (torch.bfloat16, sizes, 2e-2)}, ways
    )
    if torch.cuda.is_available():  # the peak is this head's, because nothing has used the GPU before
        result["memory_gib"] = {"peak": torch.cuda.max_memory_allocated() / 2**30}
    return result


# Vocabularies whose largest divisors among a tile's columns (kernels/quack_tiles.py) are 192, 128 and 64.
QUACK_VOCABULARIES = {True: (1152, 896, 832), False: (49_152, 32_768, 32_704)}


def quack(smoke: bool) -> dict[str, Any]:
    """Return the errors of the backend `quack`; the last tile of rows is ragged."""
    tokens, hidden = (83, 32) if smoke else (5001, 1536)
    cases = {
        f"{vocab} tokens": (torch.bfloat16, (tokens, hidden, vocab), 2e-2)
        for vocab in QUACK_VOCABULARIES[smoke]
    }

    def with_quack(weight_r: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
        options = {"backend": "quack", "stash_dtype": torch.bfloat16, "temperature": TEMPERATURE}
        return ((way, arguments | options) for way, arguments in ways(weight_r) if way != "recompute")

    return _errors(cases, with_quack, TEMPERATURE)


def no_quack() -> str:
    """Return the reason why the backend `quack` cannot run here, or an empty string if it can."""
    if not torch.cuda.is_available() or os.environ.get(REHEARSAL):
        return "no GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the GPU is not of compute capability 9.0 (Hopper)"
    return "" if find_spec("quack") else "QuACK is not installed: pip install 'megatron-gvpo[quack]'"


def _errors(
    cases: dict[str, tuple[torch.dtype, tuple[int, int, int], float]], ways: Ways, temperature: float = 1.0
) -> dict[str, Any]:
    """Compare with fp64. `cases`: dtype, (tokens, hidden size, vocabulary) and limit of the errors."""
    where = device()
    result: dict[str, Any] = {"right": True}
    for case, (dtype, (tokens, hidden, vocab), limit) in cases.items():
        torch.manual_seed(0)
        x = torch.randn(tokens, hidden, dtype=dtype, device=where).requires_grad_()
        w = (torch.randn(vocab, hidden, dtype=dtype, device=where) / hidden**0.5).requires_grad_()
        labels, weight = torch.randint(vocab, (tokens,), device=where), torch.randn(tokens, device=where)
        x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
        exact = torch.log_softmax(x64 @ w64.T / temperature, -1).gather(1, labels[:, None])[:, 0]
        reference = (exact.detach(), *torch.autograd.grad((weight.double() * exact).sum(), (x64, w64)))
        for way, arguments in ways(weight):
            out = linear_logprob(x, w, labels, **arguments)
            trained = (weight * out.logp_r).sum() if out.surrogate is None else out.surrogate
            computed = (out.logp_r.detach(), *torch.autograd.grad(trained, (x, w)))
            errors = {
                name: float((a.double() - b).abs().max() / b.abs().max())
                for name, a, b in zip(("logp", "d_hidden", "d_weight"), computed, reference, strict=True)
            }
            result[f"{case} {way}"] = errors
            result["right"] = result["right"] and max(errors.values()) < limit
    return result


@contextmanager
def naive_head() -> Iterator[None]:
    """Context in which updates use the simplest head, which stores all logits for autograd."""
    from megatron_gvpo.megatron import forward

    fused = forward.linear_logprob
    forward.linear_logprob = _naive  # type: ignore[assignment]
    try:
        yield
    finally:
        forward.linear_logprob = fused


def _naive(
    x: Tensor, w: Tensor, labels_r: Tensor, *, temperature: float, weight_r: Tensor | None, **_: Any
) -> LinearLogprob:
    logp_rv = torch.log_softmax((x @ w.T).float() / temperature, -1)
    logp_r = logp_rv.gather(1, labels_r[:, None])[:, 0]
    return LinearLogprob(logp_r, None, None if weight_r is None else (weight_r * logp_r).sum(), "reference")


def head_seconds(policy: Any, rows: Any, dtype: str) -> dict[str, float]:
    """Return seconds of a forward and backward on all response tokens, in packs; the fastest of three."""
    count, config = int(rows.length_n.sum()), policy.model.config
    where, kind = device(), getattr(torch, dtype)
    weight_vh = torch.randn(policy.model.vocab_size, config.hidden_size, dtype=kind, device=where)
    weight_vh.requires_grad_()
    packs = [min(8192, count - begin) for begin in range(0, count, 8192)]
    return {
        way: min(_seconds(weight_vh, packs, number) for _ in range(3))
        for number, (way, _) in enumerate(ways(weight_vh[0]))
    }


def _seconds(weight_vh: Tensor, packs: list[int], number: int) -> float:
    total = 0.0
    for size in packs:
        hidden_rh = torch.randn(size, weight_vh.shape[1], dtype=weight_vh.dtype, device=weight_vh.device)
        labels_r = torch.randint(len(weight_vh), (size,), device=weight_vh.device)
        weight_r = torch.randn(size, device=weight_vh.device)
        _, arguments = list(ways(weight_r))[number]
        begin = now()
        out = linear_logprob(hidden_rh.requires_grad_(), weight_vh, labels_r, **arguments)
        trained = (weight_r * out.logp_r).sum() if out.surrogate is None else out.surrogate
        trained.backward()
        total += now() - begin
        weight_vh.grad = None
    return total


def now() -> float:
    """Return the time in seconds after the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
