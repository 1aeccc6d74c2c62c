"""The log-probs of given tokens, computed from hidden states without storing the logits.

With z = X W^T / T, logp = z[label] - logsumexp(z) and p = softmax(z), the gradient is (g, e: upstream
gradients of logp and entropy H)

    dL/dz_j = g (1[j = label] - p_j) - e p_j (log p_j + H),   dX = dZ W / T,   dW = dZ^T X / T.

The logits exist one tile at a time, in fp32. There are three modes to compute the gradient. The modes differ
in the time at which the weights g are known:

    weights_first  The forward gets g and computes the gradients: 6 r h v flops (`WeightsFirst`).
    stash          The backward gets g. The forward keeps e^(z - max), in bf16 if the operands are bf16:
                   6 r h v flops and r v bf16 numbers of memory (`WeightsLast`).
    recompute      The backward gets g and computes the logits again: 8 r h v flops, no memory
                   (`WeightsLast`).

docs/explanation/head.md has the mathematics, the cost of each mode, and how one is chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.kernels.head import Backend, Head, checked_vocabulary
from megatron_gvpo.kernels.head_autograd import WeightsFirst, WeightsLast
from megatron_gvpo.kernels.mathematics import accumulator, reference_logprobs
from megatron_gvpo.kernels.supports import Supports

Mode = Literal["weights_first", "stash", "recompute", "forward", "reference", "supports"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class LinearLogprob(NamedTuple):
    """The result of `linear_logprob`; tensors are fp32, or fp64 if the inputs are fp64."""

    logp_r: Tensor  # detached if the caller gave weights
    entropy_r: Tensor | None = None  # None unless requested; detached if the caller gave weights
    surrogate: Tensor | None = None  # scalar sum(weight_r * logp_r); None unless the caller gave weights
    mode: Mode = "forward"  # how the gradient is computed; "forward": no gradient
    stash_bytes: int = 0  # bytes that this rank keeps until the backward
    stash_share: float = 0.0  # share of the rows whose exponentials are kept
    # Set if the trainer adds a divergence (linear_divergence.py): each token's, in nats, detached; and a
    # scalar that carries the gradients of the divergence's part of the loss.
    divergence_r: Tensor | None = None
    divergence: Tensor | None = None


def linear_logprob(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    weight_r: Tensor | None = None,
    entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    stash_bytes: int = 0,
    stash_dtype: torch.dtype | None = None,
    logits_bytes: int | None = None,
    backend: Backend = "auto",
    supports: Supports | None = None,
    upstream: float | None = None,
) -> LinearLogprob:
    """Compute log softmax(hidden_rh @ weight_vh^T / temperature)[labels_r] without storing the logits.

    Without `weight_r`, `logp_r` (and `entropy_r`) are differentiable in `hidden_rh` and `weight_vh`.
    With `weight_r` = dL/dlogp, the forward computes both gradients, for 3/4 of the flops, and only
    `surrogate` carries them: add it to the scalar that you call backward on. It backpropagates once.
    If no gradient is wanted (no_grad, frozen inputs), none is computed.

    The gradient of `hidden_rh` is this rank's part: the sum over `tp_group` is the gradient. The caller
    reduces it (Megatron: copy_to_tensor_model_parallel_region, or the sequence-parallel gather). The
    gradient of `weight_vh` is added to its `main_grad` if Megatron's data parallelism gave it one: by the
    backward, or already by the forward if it gets `weight_r` and `upstream`.

    Args:
        hidden_rh: [r, h] fp32, bf16 or fp64, hidden states of the positions that predict the labels; equal
            on all ranks of `tp_group`. r = 0 is allowed.
        weight_vh: [v, h], same dtype. Rank i of `tp_group` holds rows i * v ... (i + 1) * v - 1.
        labels_r: int64 [r], global token ids. A label outside the vocabulary has logp -inf.
        temperature: divides the logits; one number, or [r], one number a row.
        weight_r: [r] fp32, dL/dlogp.
        entropy: compute the entropy of every row, in nats. Nothing is stashed then.
        tp_group: the tensor-parallel group; it exchanges 12 bytes a token (16 with entropy).
        vocab_size: rows of the whole vocabulary from here on are padding, and not part of the softmax.
        stash_bytes: the most bytes that this rank keeps from the forward to the backward, beyond two numbers
            a token; rows that do not fit are computed again. Equal on all ranks of `tp_group`.
        stash_dtype: default: the dtype of the products' operands (bf16 on a GPU with bf16 inputs).
        logits_bytes: the most bytes of one tile of logits (a tile has at least one row or column);
            default 288 MiB, 512 MiB on a GPU.
        backend: `reference`: all logits, under autograd. `chunked`: PyTorch's products, and between them
            PyTorch's operations or, on a GPU, Triton's kernels. `triton`: these kernels, also where Triton
            interprets them. `auto`: chunked.
        supports: the tokens that each label was sampled from, on hidden_rh's device: the softmax and the
            entropy are over these alone. All logits are computed (truncated_logprob.py computes fewer).
        upstream: the factor by which the loss that is differentiated multiplies `surrogate`, if it is known.
            None: any.

    Raises:
        ValueError: shapes, dtypes, sizes or backends that do not fit together.
        RuntimeError: in the backward, if `surrogate` has another factor than `upstream`.
    """
    _check(hidden_rh, weight_vh, labels_r, temperature, weight_r)
    differentiable = torch.is_grad_enabled() and (hidden_rh.requires_grad or weight_vh.requires_grad)
    weight_r = None if weight_r is None else weight_r.detach()
    if backend == "reference":
        _check_whole(tp_group)
        return _by_reference(
            hidden_rh,
            weight_vh,
            labels_r,
            temperature,
            weight_r,
            entropy,
            checked_vocabulary(vocab_size, weight_vh, None),
            supports,
        )

    can_stash = differentiable and weight_r is None and not entropy
    head = Head.of_shard(
        hidden_rh,
        weight_vh,
        temperature=temperature,
        tp_group=tp_group,
        vocab_size=vocab_size,
        logits_bytes=logits_bytes,
        entropy=entropy,
        stash_bytes=stash_bytes if can_stash else 0,
        stash_dtype=stash_dtype,
        backend=backend,
        supports=supports,
    )
    labels_r = labels_r - head.first_id
    if weight_r is not None and differentiable:
        logp_r, entropy_r, surrogate = WeightsFirst.apply(
            hidden_rh, weight_vh, labels_r, weight_r, head, upstream
        )
        return LinearLogprob(logp_r, entropy_r, surrogate, "weights_first")
    logp_r, entropy_r = WeightsLast.apply(hidden_rh, weight_vh, labels_r, head)
    surrogate = None if weight_r is None else (weight_r * logp_r).sum()
    mode: Mode = "recompute" if differentiable else "forward"
    if head.stash_rows:
        mode = "stash"
    share = head.stash_rows / max(len(hidden_rh), 1)
    kept_bytes = head.stash_rows * head.columns * head.stash_dtype.itemsize
    return LinearLogprob(logp_r, entropy_r, surrogate, mode, kept_bytes, share)


def _check_whole(tp_group: dist.ProcessGroup | None) -> None:
    if tp_group is not None and tp_group.size() > 1:
        raise ValueError(
            f"backend='reference' has no tensor parallelism, and tp_group has {tp_group.size()} ranks"
        )


def _by_reference(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    temperature: float | Tensor,
    weight_r: Tensor | None,
    entropy: bool,
    vocab_size: int,
    supports: Supports | None,
) -> LinearLogprob:
    """The log-probs of all logits at once, under autograd."""
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(accumulator(weight_vh.dtype))
    hide_ = None if supports is None else partial(supports.hide_, rows=slice(0, len(labels_r)))
    logp_r, entropy_r = reference_logprobs(
        hidden_rh, weight_vh, labels_r, temperature, entropy, vocab_size, hide_
    )
    surrogate = None if weight_r is None else (weight_r * logp_r).sum()
    return LinearLogprob(logp_r, entropy_r, surrogate, "reference")


def _check(
    hidden_rh: Tensor,
    weight_vh: Tensor,
    labels_r: Tensor,
    temperature: float | Tensor,
    weight_r: Tensor | None,
) -> None:
    if hidden_rh.dim() != 2 or weight_vh.dim() != 2 or hidden_rh.shape[1] != weight_vh.shape[1]:
        raise ValueError(
            f"hidden_rh {list(hidden_rh.shape)} and weight_vh {list(weight_vh.shape)}: want [r, h] and [v, h]"
        )
    if hidden_rh.dtype != weight_vh.dtype or hidden_rh.dtype not in _DTYPES:
        raise ValueError(
            f"hidden_rh is {hidden_rh.dtype} and weight_vh {weight_vh.dtype}: want the same, one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
    if labels_r.shape != hidden_rh.shape[:1] or labels_r.dtype != torch.int64:
        raise ValueError(
            f"labels_r is {labels_r.dtype} {list(labels_r.shape)}: want torch.int64 [{len(hidden_rh)}]"
        )
    if weight_r is not None and weight_r.shape != hidden_rh.shape[:1]:
        raise ValueError(f"weight_r is {list(weight_r.shape)}: want [{len(hidden_rh)}], one a label")
    if isinstance(temperature, Tensor):
        if temperature.shape != hidden_rh.shape[:1]:
            raise ValueError(
                f"temperature is {list(temperature.shape)}: want [{len(hidden_rh)}], one a label"
            )
    elif not temperature > 0:
        raise ValueError(f"temperature {temperature}: want a number above 0")
