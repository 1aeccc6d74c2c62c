"""A user's own weights of responses for GVPO++, which a configuration names as `module:function`."""

from __future__ import annotations

from torch import Tensor

from megatron_gvpo.types import TrainBatch


def by_reward(rows: TrainBatch, power: float) -> Tensor:
    """(1 + R)^power of every response, [n]."""
    return (1 + rows.reward_n) ** power
