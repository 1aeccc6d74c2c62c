"""Rank-GRPO: a list is judged item by item (arXiv 2510.20150)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.advantages.estimator import component, normalised
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class RankEstimator(Advantage):
    """A of the tokens of item p: (r_ip - mean_p) / (std_p + eps) over the group; fp32 [r].

    A response is a list of `items` items, which end with a token of `separator_ids`; r_ip is the reward's
    component `component_p`, p from 1. Tokens after the last item have `overflow` as their advantage. The end
    token is judged by the length of the list: `complete` in the last item, `overflow` behind it, `early`
    before. Also numbers the items of every token, for the loss ppo with `ratio: item`.
    """

    per_token: ClassVar[bool] = True
    finds_items: ClassVar[bool] = True
    by_components: ClassVar[bool] = True

    name: Literal["rank"] = "rank"
    items: PositiveInt
    separator_ids: tuple[int, ...] = Field(min_length=1)
    component: str = "rank"
    overflow: float = -0.1
    complete: float = 0.1
    early: float = -0.1
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-4, ge=0)

    @property
    def components_read(self) -> tuple[Component, ...]:
        return self._names

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"{self.component}_{p}" for p in range(1, self.items + 1))

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        values = [component(rows, name, "component") for name in self._names]
        columns = [normalised(rows, value_n, self.ddof, self.eps) for value_n in values]
        overflow_n = torch.full((len(rows),), self.overflow, dtype=torch.float64)
        advantage_pn = torch.stack([*columns, overflow_n])
        item_r = self.item_numbers(rows)
        advantage_r = advantage_pn[item_r, rows.seq_r]
        of_end_p = torch.tensor([*[self.early] * (self.items - 1), self.complete, self.overflow])
        end_r = torch.tensor(rows.offsets[1:])[~rows.truncated_n & (rows.length_n > 0)] - 1
        advantage_r[end_r] = of_end_p[item_r[end_r]].double()
        return advantage_r.float(), {"overflow": (item_r == self.items).double().mean()}

    def item_numbers(self, rows: TrainBatch) -> Tensor:
        """The item of every token from 0, at most `items`; a separator belongs to the item it ends."""
        tokens = torch.tensor([t for ids in rows.response_ids for t in ids], dtype=torch.int64)
        ends_r = torch.isin(tokens, torch.tensor(self.separator_ids)).long()
        before_r = ends_r.cumsum(0) - ends_r
        first_n = torch.tensor(rows.offsets[:-1])
        started_r = before_r[first_n.clamp(max=max(len(before_r) - 1, 0))][rows.seq_r]
        return (before_r - started_r).clamp(max=self.items)

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]:
        rows, metrics = super().fill(rows)
        return rows.with_columns(item_r=self.item_numbers(rows)), metrics
