"""Rank function on CPUs: the data that other ranks send, and the data that a rehearsal assumes they send."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.rehearsal import stand_ins
from megatron_gvpo.settings.config import load_config


def run(file: str, out: str, *overrides: str) -> None:
    """Writes `out`/RANK.json: {what: [real, stand-in]}."""
    config = load_config([file], overrides)
    policy = Policy.of(config)
    results: dict[str, Any] = {}
    if config.parallel.ep > 1:
        results |= _experts(policy)
    results["parts"] = _parts(policy)
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(results))


def _experts(policy: Policy, tokens: int = 52) -> dict[str, Any]:
    """Tokens take the experts in turn, which loads them as evenly as possible, also with a remainder."""
    layers = (module for chunk in policy.model.chunks for module in chunk.modules())
    [dispatcher, *_] = (layer.token_dispatcher for layer in layers if hasattr(layer, "token_dispatcher"))
    experts, chosen = dispatcher.num_experts, dispatcher.config.moe_router_topk
    in_turn = torch.arange(tokens * chosen).view(tokens, chosen) % experts
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, in_turn, True)
    real = _sent(dispatcher, routing_map)
    own = Dispatcher.preprocess
    stand_ins._balance_experts()
    try:
        made_up = _sent(dispatcher, torch.zeros_like(routing_map))
    finally:
        Dispatcher.preprocess = own
    return {name: [real[name], made_up[name]] for name in real}


def _sent(dispatcher: Any, routing_map: torch.Tensor) -> dict[str, Any]:
    with megatron_device():
        received = dispatcher.preprocess(routing_map)
    splits = {
        name: getattr(dispatcher, name) for name in ("input_splits", "output_splits", "output_splits_tp")
    }
    by_rank = dispatcher.num_global_tokens_per_local_expert
    return {
        name: value.tolist() for name, value in {**splits, "experts": received, "by_rank": by_rank}.items()
    }


def _parts(policy: Policy) -> list[Any]:
    """This rank's parts of the Hugging Face tensors, as the conversion over all ranks finds them."""
    real = policy.own_weights().parts
    policy.model._own = None
    with stand_ins.positions_of_all_ranks():
        made_up = policy.own_weights().parts
    return [[asdict(part) for part in parts] for parts in (real, made_up)]
