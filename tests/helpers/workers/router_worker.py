"""Rank function of test_router_fusion.py: one update with the fused router, and the same one without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from helpers.workers.gradient_worker import Case, Layout, Outcome, config_of, gradients_of


@dataclass(frozen=True)
class Routed:
    """Results with one kind of router. `maps`: of every pass of a router, [tokens, experts]."""

    logp_r: Tensor
    outcome: Outcome
    maps: list[Tensor]
    fused_calls: int


def run(directory: str) -> None:
    """Write results.pt: {whether the router was fused: Routed}."""
    from megatron.core.transformer.moe import moe_utils

    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    case: Case = torch.load(folder / "work.pt", weights_only=False)
    config = config_of(case, Layout(1), folder)
    policy = Policy.of(config)
    assert policy.model.config.moe_router_fusion, "it is the default"
    kernel = moe_utils.fused_topk_with_score_function
    results: dict[bool, Routed] = {}
    for is_fused in (True, False):
        policy.model.config.moe_router_fusion = is_fused
        with mock.patch.object(moe_utils, "fused_topk_with_score_function", wraps=kernel) as calls:
            results[is_fused] = _routed(policy, case, config, calls)
    torch.save(results, folder / "results.pt")


def _routed(policy: Any, case: Case, config: Any, calls: mock.Mock) -> Routed:
    from megatron.core.transformer.moe.router import TopKRouter

    maps: list[Tensor] = []

    def keep(_: Any, __: Any, result: tuple[Tensor, Tensor]) -> None:
        maps.append(result[1].bool().cpu())

    routers = [m for chunk in policy.model.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
    hooks = [router.register_forward_hook(keep) for router in routers]
    logp_r = policy.score(case.rows).cpu()
    outcome = gradients_of(policy, case, config)
    for hook in hooks:
        hook.remove()
    return Routed(logp_r, outcome, maps, calls.call_count)
