"""Checks that speculative rollouts are possible with the other settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import Config


def check_speculation(config: Config) -> None:
    """Raises ValueError, which names the keys, for a combination that cannot work or is not tested."""
    rollout, chosen = config.rollout, config.rollout.speculation
    for word in rollout.servers.args:
        if re.match(r"--spec|-sc(=|$)", word):
            raise ValueError(
                f"rollout.servers.args: {word.partition('=')[0]} could change what the policy samples: set "
                "rollout.speculation, which does not"
            )
    if chosen is None:
        return
    reason, transport = None, f"rollout.weights.transport={rollout.weights.transport}"
    if rollout.engine == "sglang" and chosen.method == "suffix":
        reason = "SGLang has no suffix decoding: use ngram, or rollout.engine=vllm"
    elif rollout.router_replay:
        reason = "rollout.router_replay=true: experts of rejected tokens would be among those told"
    elif rollout.weights.traits.sends_adapter:
        reason = f"{transport}: not tested; use broadcast, which sends the merged model"
    elif chosen.own_weights and rollout.engine == "sglang" and rollout.weights.traits.sends_files:
        reason = f"{transport}: SGLang would load the policy's files into the draft, too"
    if reason is not None:
        raise ValueError(f"rollout.speculation.method={chosen.method} is not possible with {reason}")
