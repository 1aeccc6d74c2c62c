"""Checks and packs the experts that servers routed tokens to, for the trainer's router replay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_gvpo.groups import Routing
from megatron_gvpo.huggingface.card import ModelCard


@dataclass(frozen=True)
class Routers:
    """The routers of a model, from its config.json."""

    layers: int  # decoder layers, dense ones included
    sparse: tuple[int, ...]  # numbers of the layers with experts
    per_token: int  # experts of one token in one layer
    experts: int

    @staticmethod
    def of(card: ModelCard) -> Routers:
        layers, step = card["num_hidden_layers"], card.get("decoder_sparse_step") or 1
        dense = {*range(card.dense_layers), *(card.get("mlp_only_layers") or [])}
        sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
        return Routers(layers, sparse, card["num_experts_per_tok"], card.experts)

    def pack(self, recorded: np.ndarray, tokens: int) -> Routing:
        """Pack the experts of a sequence of `tokens` tokens.

        `recorded` holds integers [tokens - 1, layers, per_token], in any shape. Raises ValueError if their
        number or one of them does not fit the model, and for a token without recorded experts.
        """
        shape = (tokens - 1, self.layers, self.per_token)
        if recorded.size != np.prod(shape):
            raise ValueError(
                f"{recorded.size} experts for {tokens} tokens: want {self.per_token} in each of "
                f"{self.layers} layers for every token but the last"
            )
        chosen = recorded.reshape(shape)
        width, kind = (1, "<u1") if self.experts <= 256 else (2, "<i2")
        routed = chosen[:, self.sparse]
        if routed.size and not 0 <= routed.min() <= routed.max() < self.experts:
            raise ValueError(f"expert {routed.max()} is out of range: the model has {self.experts} experts")
        # A server leaves zeros for a token that it did not record. Comparing all pairs of a token's experts
        # would take seconds a step.
        if self.per_token > 1 and (routed[..., 0] == routed[..., 1]).any():
            raise ValueError("some token has the same expert twice: the server recorded none for it")
        return Routing(self.layers, self.per_token, width, chosen.astype(kind).tobytes())


def routing_of(routers: Routers | None, recorded: np.ndarray | None, tokens: int) -> Routing:
    """Pack the experts that a server gave for a sequence of `tokens` tokens. Raises ValueError."""
    if routers is None or recorded is None:
        raise ValueError(
            "no experts: for rollout.router_replay servers are started with --enable-return-routed-experts"
        )
    return routers.pack(recorded, tokens)
