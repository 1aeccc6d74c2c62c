"""Row-parallel linear layers that megatron-core has only with Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from megatron_gvpo.megatron.cpu.norm import LocalRMSNorm


class LocalRowParallelLinear(RowParallelLinear):
    """Returns a tensor of its own, because megatron-core's experts add their bias to it in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(x)
        return out.clone(), bias


class LocalRowParallelLinearLayerNorm(RowParallelLinear):
    """Has a norm behind it, as Megatron-Bridge's TERowParallelLinearLayerNorm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **named: Any) -> None:
        super().__init__(input_size, output_size, config=config, **named)
        self.post_layernorm = LocalRMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out, _ = super().forward(x)
        return self.post_layernorm(out), None
