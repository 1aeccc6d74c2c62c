"""M-GRPO: every agent's tokens are compared with those of the same role (arXiv 2511.13288, its abstract)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.advantages.estimator import component, normalised
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.runtime.lazy_torch import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class RoleEstimator(Advantage):
    """The tokens of a response's main agent and of its sub-agents have advantages of their own, fp32 [r].

    One trajectory is one response: a token of `open_ids` begins a sub-agent's segment, one of `close_ids`
    ends it (both are the sub-agent's), everything else is the main agent's. Main tokens have GRPO's advantage
    of the reward over the group. Sub-agents' have that of

        blend reward + (1 - blend) local,   local: the reward's component of this name,

    over the responses of the group that have a sub-agent. Groups are aligned to `segments` sub-agents a
    response: one with fewer counts as if they were repeated, so every response counts once; sub-agents
    beyond `segments` have advantage 0. Inspired by the abstract.
    """

    per_token: ClassVar[bool] = True

    name: Literal["roles"] = "roles"
    open_ids: tuple[int, ...] = Field(min_length=1)
    close_ids: tuple[int, ...] = Field(min_length=1)
    local: str
    blend: float = Field(0.5, ge=0, le=1)
    segments: PositiveInt = 4
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)  # added to the std, so that nothing is divided by 0

    @model_validator(mode="after")
    def _distinct(self) -> RoleEstimator:
        if both := set(self.open_ids) & set(self.close_ids):
            raise ValueError(f"token {min(both)} is among both open_ids and close_ids")
        return self

    @property
    def components_read(self) -> tuple[Component, ...]:
        return (self.local,)

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        local_n = component(rows, self.local, "local")
        segment_r = torch.tensor([s for ids in rows.response_ids for s in self.numbers(ids)])
        main_n = normalised(rows, rows.reward_n, self.ddof, self.eps)
        value_n = self.blend * rows.reward_n.double() + (1 - self.blend) * local_n
        has_n = rows.sequence_sum((segment_r > 0).double()) > 0
        sub_n = torch.zeros_like(main_n)
        if bool(has_n.any()):
            having = has_n.nonzero().flatten()
            sub_n[having] = normalised(rows.select(having.tolist()), value_n[having], self.ddof, self.eps)
        advantage_r = main_n[rows.seq_r].where(segment_r == 0, sub_n[rows.seq_r])
        advantage_r = advantage_r.where(segment_r <= self.segments, 0)
        return advantage_r.float(), {"sub_agent_tokens": (segment_r > 0).double().mean()}

    def numbers(self, ids: Sequence[int]) -> list[int]:
        """The number of each token's sub-agent, from 1; 0 for the main agent's tokens."""
        found, number, inside = [], 0, False
        for token in ids:
            if not inside and token in self.open_ids:
                inside, number = True, number + 1
            found.append(number if inside else 0)
            if token in self.close_ids:
                inside = False
        return found
