"""The heads that linear_logprob.py compares: each returns the same scalar to differentiate, sum(g * logp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.kernels.linear_logprob import linear_logprob

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (hidden_th, weight_vh, labels_t, g_t) -> scalar

OURS = ("recompute", "weights_first", "stash", "stash_2gb", "stash_10gb", "stash_quack")
PEERS = ("compiled", "torch_linear_ce", "liger", "quack", "cce", "cce_exact")
NOTES = {
    "naive": "full logits, log_softmax, gather, autograd",
    "compiled": "naive under torch.compile",
    "torch_linear_ce": "torch.nn.functional.linear_cross_entropy, reduction none",
    "liger": "LigerFusedLinearScaledCrossEntropyFunction: per-token weights; recomputes",
    "quack": "QuACK's linear_cross_entropy_func, reduction none: all logits in bf16 (its chunked head sums)",
    "cce": "cut-cross-entropy, reduction none; drops small gradients",
    "cce_exact": "cut-cross-entropy, nothing dropped",
    "recompute": "linear_logprob, weights with the backward, which computes the logits again",
    "weights_first": "linear_logprob, weights with the forward",
    "stash": "linear_logprob, weights with the backward, exponentials kept (at most --stash-mib)",
    "stash_2gb": "stash, 2 GB at most",
    "stash_10gb": "stash, 10 GB at most",
    "stash_quack": "stash_10gb, with QuACK's product on Hopper",
}


def head(name: str, stash_bytes: int, logits_bytes: int | None) -> Loss:
    """Return the head of this name. Raises ImportError if its package is not installed."""
    weights_last = partial(_weights_last, logits_bytes=logits_bytes)
    match name:
        case "naive":
            return _naive
        case "compiled":
            return torch.compile(_naive, dynamic=False)
        case "recompute":
            return weights_last
        case "stash":
            return partial(weights_last, stash_bytes=stash_bytes)
        case "stash_2gb":
            return partial(weights_last, stash_bytes=2 * 10**9)
        case "stash_10gb":
            return partial(weights_last, stash_bytes=10 * 10**9)
        case "stash_quack":
            return partial(weights_last, stash_bytes=10 * 10**9, backend="quack")
        case "weights_first":
            return partial(_weights_first, logits_bytes=logits_bytes)
        case "torch_linear_ce":
            return _torch_linear_ce
        case "liger":
            return _liger()
        case "quack":
            return _quack()
        case "cce" | "cce_exact":
            return _cut_cross_entropy(name)
    raise ValueError(f"no head called {name!r}")


def _naive(x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor) -> Tensor:
    logp_tv = torch.log_softmax((x @ w.T).float(), -1)
    return (g_t * logp_tv.gather(1, labels_t[:, None])[:, 0]).sum()


def _weights_last(x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor, **options: Any) -> Tensor:
    return (g_t * linear_logprob(x, w, labels_t, **options).logp_r).sum()


def _weights_first(x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor, **options: Any) -> Tensor:
    surrogate = linear_logprob(x, w, labels_t, weight_r=g_t, **options).surrogate
    assert surrogate is not None
    return surrogate


def _torch_linear_ce(x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor) -> Tensor:
    nll_t = torch.nn.functional.linear_cross_entropy(x, w, labels_t, reduction="none")
    return -(g_t * nll_t).sum()


def _liger() -> Loss:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    def loss(x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor) -> Tensor:
        output = LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, labels_t, 1.0, -100, 1, False)
        nll_t = output[0] if isinstance(output, tuple) else output  # some versions also return the entropy
        return -(g_t * nll_t).sum()

    return loss


def _quack() -> Loss:
    from quack.linear_cross_entropy import linear_cross_entropy_func

    def loss(x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor) -> Tensor:
        nll_t = linear_cross_entropy_func(x, w, None, labels_t, reduction="none", inplace_backward=True)
        return -(g_t * nll_t).sum()

    return loss


def _cut_cross_entropy(name: str) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    def loss(x: Tensor, w: Tensor, labels_t: Tensor, g_t: Tensor) -> Tensor:
        return -(g_t * linear_cross_entropy(x, w, labels_t, reduction="none", impl=name)).sum()

    return loss
