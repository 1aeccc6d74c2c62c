"""FlashAttention-2 as a partial attention, by the kernels that PyTorch brings for GPUs.

PyTorch's own context parallelism passes merged outputs and statistics to the same backward kernel. So this
needs no package beside PyTorch. The kernels take bf16 and fp16 and head dimensions that are multiples of 8 up
to 256. `torch.use_deterministic_algorithms` makes the backward kernel deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.megatron.attention.merged import Spans

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class FlashAttention:
    """See `PartialAttention`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Spans,
        columns: Spans,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        spans = (rows.ends, columns.ends, rows.longest, columns.longest)
        out, lse, *_ = _forward(query, key, value, *spans, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Spans,
        columns: Spans,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spans = (rows.ends, columns.ends, rows.longest, columns.longest)
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout that there is not
        # The kernel reads `lse` without its strides.
        results = (grad, query, key, value, out, lse.contiguous())
        dq, dk, dv = _backward(*results, *spans, 0.0, causal, seed, seed, scale=scale)
        return dq, dk, dv
