"""Hooks into megatron-core's routers: the rollout engine's choice of experts, and group-limited routing.

Router replay: the trainer sends tokens through the experts that the rollout engine chose. A router compares
nearly equal numbers. Engine and trainer round differently, so they send some tokens to different experts, and
those tokens' log-probs then differ by far more than rounding. With the engine's choice the trainer still
weighs the experts by its own scores, and differentiates these (R3, arXiv 2510.11370).

Group-limited routing of DeepSeek's models: a token goes only to experts of its best groups. The models score
a group differently. DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) takes its best expert's score.
DeepSeek-V3's released code takes the sum of its best two experts' scores, with the balancing bias. megatron-
core sums `topk // group_topk` scores (0.19.2), the average number of experts that a chosen group gives. That
is two for DeepSeek-V3 (8 experts of 4 groups), which is right, and also two for DeepSeek-V2 (6 of 3), which
is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
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
    recomputes. This class does not need that: a router that runs without gradient in a training pass will be
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


class GroupLimit:
    """Chooses experts by group; used as the `router_replay` hook of megatron-core's router."""

    def __init__(self, scores_per_group: int, replay: Any = None) -> None:
        """`scores_per_group`: how many of a group's best scores add up to the group's score. `replay`: the
        router's own hook, if any, which may override the choice.
        """
        self._scores_per_group, self._replay = scores_per_group, replay

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, _: Choose
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, experts] -> (scores, indices) of the chosen experts, both [tokens, topk]."""
        if self._replay is None:
            return self._choose(scores, topk, num_groups, group_topk)
        chosen: tuple[Tensor, Tensor] = self._replay.get_replay_topk(
            scores, topk, num_groups, group_topk, self._choose
        )
        return chosen

    def _choose(self, scores: Tensor, topk: int, num_groups: int, group_topk: int) -> tuple[Tensor, Tensor]:
        grouped = scores.unflatten(1, (num_groups, -1))
        group_scores = grouped.topk(self._scores_per_group, dim=2).values.sum(dim=2)
        best = group_scores.topk(group_topk, dim=1).indices
        excluded = group_scores.new_ones(group_scores.shape, dtype=torch.bool).scatter(1, best, False)
        allowed = grouped.masked_fill(excluded[:, :, None], float("-inf")).flatten(1)
        values, indices = allowed.topk(topk, dim=1)
        return values, indices


class GroupLimitedRouter(TopKRouter):
    """megatron-core's router with the group scores of DeepSeek's models."""

    router_replay: Any

    def __init__(self, *arguments: Any, scores_per_group: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.scores_per_group = scores_per_group

    def routing(self, *arguments: Any, **named: Any) -> Any:
        replay = self.router_replay
        self.router_replay = GroupLimit(self.scores_per_group, replay)
        try:
            return super().routing(*arguments, **named)
        finally:
            self.router_replay = replay


def scores_per_group(hf_config: Any) -> int | None:
    """Return how many scores add up to a group's, by a Hugging Face configuration; None without groups."""
    method = getattr(hf_config, "topk_method", None)  # transformers' configurations differ in their keys
    if (getattr(hf_config, "n_group", None) or 1) == 1 or method == "greedy":
        return None
    return 1 if method == "group_limited_greedy" else 2


def routing_settings(hf_config: Any) -> dict[str, Any]:
    """Return the TransformerConfig's fields that must differ from Megatron-Bridge's values."""
    count = scores_per_group(hf_config)
    if count is None:  # the choice ignores groups, even if the configuration gives their number
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    # The fused router has megatron-core's rule.
    return {} if _is_megatrons_rule(hf_config, count) else {"moe_router_fusion": False}


def limit_groups(hf_config: Any, spec_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `spec_of`, which returns the spec of a stage's layers, so that routers follow the model's rule.

    Returns `spec_of` itself if megatron-core's rule is the model's.
    """
    count = scores_per_group(hf_config)
    if count is None or _is_megatrons_rule(hf_config, count):
        return spec_of

    def limited(config: Any, vp_stage: int | None = None) -> Any:
        # Megatron-Bridge, already imported here, chooses by the class name how a layer's weights are split.
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        AutoMapping.register_module_type(GroupLimitedRouter.__name__, "replicated")
        block = spec_of(config, vp_stage=vp_stage)
        for layer in block.layer_specs:
            # Megatron gives an MLP as a partial or a ModuleSpec; only a mixture's has a router.
            submodules: Any = getattr(layer.submodules.mlp, "keywords", {}).get("submodules")
            if hasattr(submodules, "router"):
                submodules.router = partial(GroupLimitedRouter, scores_per_group=count)
        return block

    return limited


def _is_megatrons_rule(hf_config: Any, count: int) -> bool:
    """Return True if megatron-core sums as many scores as the model does."""
    return bool(hf_config.num_experts_per_tok // (hf_config.topk_group or 1) == count)
