"""Router replay: the trainer sends tokens through the experts that the rollout engine chose.

A router compares nearly equal numbers. Engine and trainer round differently, so they send some tokens to
different experts, and those tokens' log-probs then differ by far more than rounding. With the engine's choice
the trainer still weighs the experts by its own scores, and differentiates these (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

Choose = Callable[..., tuple[Tensor, Tensor]]  # a router's choice: scores -> (values, experts)


class TokenReplay(RouterReplay):
    """Megatron's hook into one router, for packs in which only some tokens' experts are set.

    Megatron's own class replays all tokens of a pass, and its caller must say which micro-batch a backward
    recomputes. This class needs no such word: a router that runs without gradient in a training pass will be
    recomputed with gradient, and in all of Megatron's schedules the micro-batches of a chunk go backward in
    the order in which they went forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin(training=False)

    def begin(self, *, training: bool) -> None:
        """Start a new pass over micro-batches, and drop the state of an interrupted pass."""
        self._training = training
        self._experts_tk: Tensor | None = None
        self._to_recompute: deque[Tensor | None] = deque()

    def set_experts(self, experts_tk: Tensor | None) -> None:
        """Set the next micro-batch's experts: int16 [t, experts a token], -1 for the router's own choice."""
        self._experts_tk = experts_tk

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (values, experts) [t, topk] of `scores` [t, all experts]. Megatron's router calls this."""
        assert default_compute_topk is not None, "megatron-core's router passes its own choice"
        experts_tk = self._experts_tk
        if self._training and not torch.is_grad_enabled():
            self._to_recompute.append(experts_tk)
        elif self._to_recompute:
            experts_tk = self._to_recompute.popleft()
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if experts_tk is None:
            return values, own
        chosen = torch.where(experts_tk >= 0, experts_tk.to(own.dtype), own)
        return scores.gather(1, chosen), chosen


class RouterHooks:
    """The hooks in all routers of a model's chunks on this rank."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        # id of a chunk -> [(layer number from 0, its router's hook)]
        self._hooks: dict[int, list[tuple[int, TokenReplay]]] = {}
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                router.router_replay = TokenReplay()
            self._hooks[id(chunk)] = [(router.layer_number - 1, router.router_replay) for router in routers]

    def begin(self, *, training: bool) -> None:
        """Start a new pass over micro-batches."""
        for hooks in self._hooks.values():
            for _, hook in hooks:
                hook.begin(training=training)

    def set_experts(self, chunk: Any, experts_t: Tensor | None, *, sequence_parallel: bool) -> None:
        """Set the experts of the next pack of `chunk`: int16 [t, layers, experts a token], or None."""
        if experts_t is not None and sequence_parallel:
            parts = parallel_state.get_tensor_model_parallel_world_size()
            experts_t = experts_t.chunk(parts)[parallel_state.get_tensor_model_parallel_rank()]
        for layer, hook in self._hooks[id(chunk)]:
            hook.set_experts(None if experts_t is None else experts_t[:, layer])
