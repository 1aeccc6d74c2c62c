"""Group-limited routing against the routers of transformers, on scores that tell the rules apart."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megatron_gvpo.megatron import parallel  # before megatron.core
from megatron_gvpo.megatron.model.routers import (
    GroupLimit,
    limit_groups,
    routing_settings,
    scores_per_group,
)

TOKENS, HIDDEN, EXPERTS = 512, 8, 16
V2 = (transformers.DeepseekV2Config, DeepseekV2TopkRouter, "group_limited_greedy")
V3 = (transformers.DeepseekV3Config, DeepseekV3TopkRouter, None)


def config_of(kind: Any, groups: int, best: int, chosen: int, method: str | None) -> Any:
    return kind(
        hidden_size=HIDDEN,
        num_attention_heads=1,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=chosen,
        n_group=groups,
        topk_group=best,
        routed_scaling_factor=1.5,
        **({} if method is None else {"topk_method": method}),
    )


def routed_by_megatron(config: Any, logits: torch.Tensor, bias: torch.Tensor | None, replay: Any) -> Any:
    """(weights, mask of the chosen experts), both [tokens, experts]."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    with parallel.megatron_device():
        return topk_routing_with_score_function(
            logits,
            config.num_experts_per_tok,
            use_pre_softmax=True,
            num_groups=config.n_group,
            group_topk=config.topk_group,
            scaling_factor=config.routed_scaling_factor,
            score_function="softmax" if bias is None else "sigmoid",
            expert_bias=bias,
            router_replay=replay,
        )


@pytest.mark.parametrize("version", [V2, V3], ids=["V2", "V3"])
@pytest.mark.parametrize(
    ("groups", "best", "chosen"),
    [(8, 3, 6), (8, 4, 8), (4, 2, 2), (4, 2, 3), (4, 2, 4), (4, 2, 8), (4, 3, 2), (2, 1, 5), (2, 2, 16)],
)
def test_experts_and_weights_are_those_of_transformers(
    version: Any, groups: int, best: int, chosen: int
) -> None:
    kind, router_kind, method = version
    config = config_of(kind, groups, best, chosen, method)
    torch.manual_seed(0)
    router = router_kind(config)
    router.weight.data.normal_(std=0.3)
    bias = None
    if method is None:
        bias = router.e_score_correction_bias = torch.nn.Buffer(0.3 * torch.randn(EXPERTS))
    logits, weights, indices = router(torch.randn(TOKENS, HIDDEN))
    wanted = torch.zeros(TOKENS, EXPERTS).scatter(1, indices, weights)
    got, mapped = routed_by_megatron(config, logits, bias, GroupLimit(scores_per_group(config)))
    torch.testing.assert_close(got, wanted)
    assert torch.equal(mapped, torch.zeros(TOKENS, EXPERTS).scatter(1, indices, 1).bool())
    own, _ = routed_by_megatron(config, logits, bias, None)
    same = torch.allclose(own, wanted)
    assert same or routing_settings(config) == {"moe_router_fusion": False}, "megatron-core's rule is another"
    decisive = chosen // best != scores_per_group(config) and best < groups
    assert same == (not decisive), "and it shows"


def test_without_groups_and_with_megatrons_own_rule_nothing_is_replaced() -> None:
    def spec(config: Any, vp_stage: int | None = None) -> Any:
        raise AssertionError("not called here")

    for (kind, _, method), numbers in product([V2, V3], [(1, 1, 2), (8, 4, 8), (8, 4, 4)]):
        config = config_of(kind, *numbers, method)
        own = scores_per_group(config) in (None, numbers[2] // numbers[1])
        assert (limit_groups(config, spec) is spec) == own
    greedy = config_of(transformers.DeepseekV2Config, 8, 3, 6, "greedy")
    assert routing_settings(greedy) == {"moe_router_num_groups": None, "moe_router_group_topk": None}
    assert routing_settings(transformers.LlamaConfig())["moe_router_num_groups"] is None


def test_a_replayed_choice_still_has_the_rule_for_what_it_does_not_give() -> None:
    """Megatron's RouterReplay records the rule's choice, and replays a choice under any rule."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    config = config_of(transformers.DeepseekV2Config, 8, 3, 6, "group_limited_greedy")
    logits = torch.randn(TOKENS, EXPERTS)
    wanted = routed_by_megatron(config, logits, None, GroupLimit(1))
    replay = RouterReplay()
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    for got in (routed_by_megatron(config, logits, None, GroupLimit(1, replay)), wanted):
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    replay.set_target_indices(replay.get_recorded_indices())
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    other = torch.randn(TOKENS, EXPERTS)
    assert torch.equal(routed_by_megatron(config, other, None, GroupLimit(1, replay))[1], wanted[1])
    RouterReplay.clear_global_router_replay_instances()
