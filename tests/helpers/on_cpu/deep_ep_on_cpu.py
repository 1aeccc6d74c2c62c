"""`deep_ep.Buffer` of DeepEP 1.2.1 on CPUs, over the ranks' process group, as far as megatron-core calls it.

By its documentation (`get_dispatch_layout`, `dispatch`, `combine`): a token goes once to every rank that has
some of its experts, with these experts' numbers on that rank, or -1 for others, whose weights are then 0;
`combine` adds up what the ranks return, and their gradients of the weights. Tokens come in the order of the
ranks that sent them. There are no streams: events are empty.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EventHandle:
    def current_stream_wait(self) -> None:
        pass


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


Handle = tuple[Tensor, list[int], list[int]]  # is_token_in_rank, tokens sent to and received from each rank


class Buffer:
    num_sms = 20
    dispatched = 0  # calls of `dispatch` in this process

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(number: int) -> None:
        assert number % 2 == 0
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        assert ranks in (2, 4, 8)
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Tokens for each rank and each expert, int32, and [tokens, ranks] whether a token goes to a rank."""
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        ranks = self.group.size()
        rank_of_choice = torch.where(topk_idx >= 0, topk_idx // (num_experts // ranks), ranks)
        is_in_rank = torch.zeros(len(topk_idx), ranks + 1).scatter(1, rank_of_choice, 1.0).bool()[:, :ranks]
        per_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts).int()
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, EventOverlap(EventHandle())

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Send tokens to the ranks of their experts; with a handle, in its layout again, and tokens alone."""
        assert x.is_contiguous()
        Buffer.dispatched += 1
        if handle is not None:
            is_in_rank, sent, received = handle
            x = self._exchange(_by_rank(x, is_in_rank), sent, received)
            return x, None, None, None, None, EventOverlap(EventHandle())
        assert num_tokens_per_rank is not None and is_token_in_rank is not None
        assert topk_idx is not None and topk_weights is not None and num_tokens_per_expert is not None
        assert topk_weights.dtype == torch.float32
        sent = num_tokens_per_rank.tolist()
        counts = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(counts, num_tokens_per_rank, group=self.group)
        received = counts.tolist()
        local = len(num_tokens_per_expert) // len(sent)
        numbers, weights = [], []
        for rank, is_in in enumerate(is_token_in_rank.T):
            number = topk_idx[is_in] - rank * local
            is_local = (number >= 0) & (number < local)
            numbers.append(number.masked_fill(~is_local, -1))
            weights.append(topk_weights[is_in].masked_fill(~is_local, 0.0))
        recv_x = self._exchange(_by_rank(x, is_token_in_rank), sent, received)
        recv_idx = self._exchange(torch.cat(numbers), sent, received)
        recv_weights = self._exchange(torch.cat(weights), sent, received)
        per_expert = recv_idx[recv_idx >= 0].bincount(minlength=local).tolist()
        handle = (is_token_in_rank, sent, received)
        return recv_x, recv_idx, recv_weights, per_expert, handle, EventOverlap(EventHandle())

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return the sums over ranks, [tokens, hidden], of `x`, the rows of the received tokens."""
        assert x.is_contiguous()
        combined = self._sum(x, handle)
        weights = None if topk_weights is None else self._sum(topk_weights, handle)
        return combined, weights, EventOverlap(EventHandle())

    def _sum(self, rows: Tensor, handle: Handle) -> Tensor:
        is_in_rank, sent, received = handle
        back = self._exchange(rows.contiguous(), received, sent)
        tokens = torch.cat([is_in.nonzero()[:, 0] for is_in in is_in_rank.T])
        total = torch.zeros(len(is_in_rank), rows.shape[1]).index_add(0, tokens, back.float())
        return total.to(rows.dtype)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows, received, sent, group=self.group)
        return result


def _by_rank(x: Tensor, is_in_rank: Tensor) -> Tensor:
    return torch.cat([x[is_in] for is_in in is_in_rank.T])


def install() -> None:
    """Let megatron-core's dispatcher find this module as DeepEP."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer = Buffer  # type: ignore[attr-defined]
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap  # type: ignore[attr-defined]
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    assert fused_a2a.HAVE_DEEP_EP
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
