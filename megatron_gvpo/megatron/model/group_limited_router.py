"""Group-limited routing of DeepSeek's models: a token goes only to experts of its best groups.

The models score a group differently. DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) takes its best expert's
score. DeepSeek-V3's released code takes the sum of its best two experts' scores, with the balancing bias.
megatron-core (0.19.2) sums `topk // group_topk` scores, the average number of experts that a chosen group
gives. That is two for DeepSeek-V3 (8 experts of 4 groups), which is right, and also two for DeepSeek-V2 (6 of
3), which is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

Choose = Callable[..., tuple[Tensor, Tensor]]


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
