"""RMSNorm for layer specs without Transformer Engine, with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class LocalRMSNorm(torch.nn.Module):
    """RMSNorm computed in fp32, under the call contract of megatron-core's norm modules.

    megatron-core's own torch norm refuses sequence parallelism; this one marks its weight so that
    `finalize_model_grads` sums its gradient over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)
