"""Group-limited routing as DeepSeek's models have it: a token goes to experts of its best groups only.

How good a group is differs. DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) takes its best expert's score,
DeepSeek-V3's released code its best two experts' sum, with the bias of its balancing. megatron-core (0.19.2)
sums as many as a chosen group gives on average, `topk // group_topk`: two for DeepSeek-V3's own numbers, 8
experts of 4 groups, but two for DeepSeek-V2's, 6 of 3, too, whose groups it would confuse.
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
    """Chooses experts in the place that megatron-core's router has for a routing that is replayed."""

    def __init__(self, counted: int, replay: Any = None) -> None:
        """`counted`: so many of a group's best scores make up the group's. `replay`: what is in that place,
        and gives another choice where it has one.
        """
        self._counted, self._replay = counted, replay

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, _: Choose
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, experts] -> those of the chosen experts and their numbers, both [tokens, topk]."""
        if self._replay is None:
            return self._choose(scores, topk, num_groups, group_topk)
        found: tuple[Tensor, Tensor] = self._replay.get_replay_topk(
            scores, topk, num_groups, group_topk, self._choose
        )
        return found

    def _choose(self, scores: Tensor, topk: int, num_groups: int, group_topk: int) -> tuple[Tensor, Tensor]:
        grouped = scores.unflatten(1, (num_groups, -1))
        of_group = grouped.topk(self._counted, dim=2).values.sum(dim=2)
        best = of_group.topk(group_topk, dim=1).indices
        closed = of_group.new_ones(of_group.shape, dtype=torch.bool).scatter(1, best, False)
        allowed = grouped.masked_fill(closed[:, :, None], float("-inf")).flatten(1)
        values, indices = allowed.topk(topk, dim=1)
        return values, indices


class GroupLimitedRouter(TopKRouter):
    """megatron-core's router with another rule."""

    router_replay: Any

    def __init__(self, *arguments: Any, counted: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.counted = counted

    def routing(self, *arguments: Any, **named: Any) -> Any:
        replay = self.router_replay
        self.router_replay = GroupLimit(self.counted, replay)
        try:
            return super().routing(*arguments, **named)
        finally:
            self.router_replay = replay


def limit_of(hf_config: Any) -> int | None:
    """How many scores a group is judged by, of a Hugging Face configuration; None without groups."""
    method = getattr(hf_config, "topk_method", None)
    if (getattr(hf_config, "n_group", None) or 1) == 1 or method == "greedy":
        return None
    return 1 if method == "group_limited_greedy" else 2


def routing_settings(hf_config: Any) -> dict[str, Any]:
    """Fields of the TransformerConfig that differ from what Megatron-Bridge makes of it."""
    counted = limit_of(hf_config)
    if counted is None:  # a greedy choice, whatever numbers of groups stand beside it
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return {} if _own(hf_config, counted) else {"moe_router_fusion": False}  # which has megatron-core's rule


def limit_groups(hf_config: Any, spec_of: Callable[..., Any]) -> Callable[..., Any]:
    """`spec_of` makes the specification of a stage's layers; so does what is returned, with routers of the
    model's rule where megatron-core's is another.
    """
    counted = limit_of(hf_config)
    if counted is None or _own(hf_config, counted):
        return spec_of

    def limited(config: Any, vp_stage: int | None = None) -> Any:
        # Where a model is built, Megatron-Bridge is there; it tells by a layer's name how weights are split.
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        AutoMapping.register_module_type(GroupLimitedRouter.__name__, "replicated")
        block = spec_of(config, vp_stage=vp_stage)
        for layer in block.layer_specs:
            submodules: Any = getattr(layer.submodules.mlp, "keywords", {}).get("submodules")
            if hasattr(submodules, "router"):  # a mixture's
                submodules.router = partial(GroupLimitedRouter, counted=counted)
        return block

    return limited


def _own(hf_config: Any, counted: int) -> bool:
    """Whether the rule is megatron-core's own."""
    return bool(hf_config.num_experts_per_tok // (hf_config.topk_group or 1) == counted)
