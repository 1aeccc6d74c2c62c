"""Router replay: tokens go through the experts that the rollout engine sent them through.

A router compares nearly equal numbers: engine and trainer, which round differently, send some tokens through
different experts, and those tokens' log-probs then differ by far more than rounding. Under the engine's
choice the trainer still weighs the experts by its own scores, and differentiates these (R3, arXiv
2510.11370).
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

Choose = Callable[..., tuple[Tensor, Tensor]]  # a router's own way from scores to (values, experts)


class TokenReplay(RouterReplay):
    """Megatron's hook into one router, for packs in which some tokens have experts given and others have not.

    Megatron's own class replays all tokens of a pass, and has to be told from outside which micro-batch a
    backward computes again. Here a router that runs without gradient in a training pass is one that will be
    computed again, with gradient; and in all of Megatron's schedules the micro-batches of a chunk go backward
    in the order in which they went forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin(training=False)

    def begin(self, *, training: bool) -> None:
        """A new pass over micro-batches; what an interrupted one left is forgotten."""
        self._training = training
        self._given: Tensor | None = None
        self._again: deque[Tensor | None] = deque()

    def take(self, experts_tk: Tensor | None) -> None:
        """Of the micro-batch that comes next: int16 [t, experts a token], -1 for the router's own choice."""
        self._given = experts_tk

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(values, experts) [t, topk] of `scores` [t, all experts]: called by Megatron's router."""
        assert default_compute_topk is not None, "megatron-core's router gives its own choice"
        given = self._given
        if self._training and not torch.is_grad_enabled():
            self._again.append(given)
        elif self._again:
            given = self._again.popleft()
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if given is None:
            return values, own
        chosen = torch.where(given >= 0, given.to(own.dtype), own)
        return scores.gather(1, chosen), chosen


class Replay:
    """The hooks in all routers of a model's chunks on this rank."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        # By chunk: (layer, from 0; its hook).
        self._hooks: dict[int, list[tuple[int, TokenReplay]]] = {}
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                router.router_replay = TokenReplay()
            self._hooks[id(chunk)] = [(router.layer_number - 1, router.router_replay) for router in routers]

    def begin(self, *, training: bool) -> None:
        for hooks in self._hooks.values():
            for _, hook in hooks:
                hook.begin(training=training)

    def take(self, chunk: Any, experts_t: Tensor | None, *, sequence_parallel: bool) -> None:
        """Before `chunk` runs forward: int16 [t, layers, experts a token] of its pack, or None."""
        if experts_t is not None and sequence_parallel:
            parts = parallel_state.get_tensor_model_parallel_world_size()
            experts_t = experts_t.chunk(parts)[parallel_state.get_tensor_model_parallel_rank()]
        for layer, hook in self._hooks[id(chunk)]:
            hook.take(None if experts_t is None else experts_t[:, layer])
