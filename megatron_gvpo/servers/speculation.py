"""Speculative decoding on a run's servers: checks of the draft, and counts of drafted and accepted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.complete_weights import has_heads, stored_tensors
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.servers.server import Drafts, Server
from megatron_gvpo.settings.servers import SpeculationConfig

TIMEOUT = 30.0  # seconds for a server's counts
MOST_LAYERS = 2  # of an EAGLE head


class DraftCounter:
    """Counts the tokens that the servers of a run draft and accept from one call to the next."""

    def __init__(self) -> None:
        self._seen: dict[str, Drafts] = {}  # last counters, by the server's URL

    async def take(self, servers: Iterable[Server]) -> Drafts:
        """The counts of all servers since the last call. A server that does not answer is left out."""
        return sum(await asyncio.gather(*map(self._take, servers)), Drafts())

    async def _take(self, server: Server) -> Drafts:
        try:
            counts = await server.drafts(TIMEOUT)
        except (ServerGone, ServerRefused):
            return Drafts()
        earlier, self._seen[server.url] = self._seen.get(server.url, Drafts()), counts
        return counts.since(earlier)


def check_draft(chosen: SpeculationConfig | None, cards: ModelCards) -> None:
    """Raise ConfigError for a draft that servers cannot run with the policy's model."""
    if chosen is None:
        return
    policy = cards.served
    if chosen.method == "mtp" and not has_heads(Path(cards.served_path), policy):
        raise ConfigError(
            f"rollout.speculation.method=mtp: {cards.served_path} has no weights of heads for further "
            "tokens (multi-token prediction): use ngram, suffix or draft"
        )
    if chosen.model is None:
        return
    key = "rollout.speculation.model"
    draft_size, policy_size = cards.draft.get("vocab_size"), policy.get("vocab_size")
    tensors = stored_tensors(Path(chosen.model), key)
    if chosen.method == "draft" and draft_size != policy_size:
        raise ConfigError(
            f"{key}={chosen.model} has vocab_size={draft_size}, and the policy {policy_size}: a draft needs "
            "the policy's tokenizer"
        )
    layers = cards.draft.get("num_hidden_layers")
    if chosen.method != "eagle" or layers is None or layers != policy.get("num_hidden_layers"):
        return
    # A policy may have as few layers as a head; only the head has a tensor that joins states and embeddings.
    of_policy = stored_tensors(Path(cards.served_path), cards.served_key)
    if layers > MOST_LAYERS or tensors.keys() <= of_policy.keys():
        raise ConfigError(
            f"{key}={chosen.model} has num_hidden_layers={layers}, as the policy has: it is a whole model "
            "and not an EAGLE head, which has a layer or two; method: draft takes a model"
        )


def eagle_kind(head: ModelCard) -> str:
    """The engines' name of a head that drafts, eagle3 or eagle."""
    return "eagle3" if any("eagle3" in name.lower() for name in head.architectures) else "eagle"
