"""Rows of the optimizer steps of gradient_cases.py, by the lengths of their prompts and responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.references import gradient_reference as reference
from megatron_gvpo.groups import Routing
from megatron_gvpo.supports import Support
from megatron_gvpo.types import TrainBatch

Groups = list[tuple[int, list[tuple[int, float]]]]  # (prompt tokens, (response tokens, reward) of every row)


def log_normal(groups: int, responses: int) -> Groups:
    """Responses with a long tail, as real ones have: a median of 5 tokens, and two cut off at 110."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(groups, responses).log_normal_(math.log(6), 1.2, generator=generator)
    rewards = torch.rand(groups, responses, generator=generator)
    rows = torch.stack([lengths.round().clamp(1, 110), rewards], dim=-1).tolist()
    return [(2 + g, [(int(length), reward) for length, reward in row]) for g, row in enumerate(rows)]


ROWS: dict[str, Groups] = {
    # A group of one, a group whose rewards are all equal, a prompt and two responses of one token.
    "ragged": [
        (3, [(4, 1.0), (1, 0.0), (9, 0.5)]),
        (1, [(20, 1.0), (6, 0.0)]),
        (7, [(5, 1.0)]),
        (5, [(8, 0.5), (3, 0.5), (6, 0.5), (2, 0.5)]),
        (2, [(1, 0.0), (12, 1.0), (7, 0.0)]),
    ],
    # On four ranks some ranks have only the long sequences, whose group has no signal.
    "long without signal": [
        (3, [(30, 1.0), (28, 1.0)]),
        (3, [(4, 1.0), (6, 0.0), (3, 0.0)]),
        (3, [(2, 0.0), (5, 0.0)]),
        (3, [(7, 1.0), (3, 0.0)]),
    ],
    "fewer than ranks": [(2, [(3, 1.0), (5, 0.0)])],
    "log-normal": log_normal(8, 4),
}


def make_rows(groups: Groups) -> TrainBatch:
    """Rows of random tokens; the groups' rows are mixed, and their numbers have gaps."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(reference.VOCABULARY, (count,), generator=generator).tolist()

    prompts = [tokens(length) for length, _ in groups]
    flat = [(g, *row) for g, (_, rows) in enumerate(groups) for row in rows]
    longest = max(length for _, length, _ in flat)
    rows = TrainBatch(
        prompt_ids=[prompts[g] for g, _, _ in flat],
        response_ids=[tokens(length) for _, length, _ in flat],
        group_n=torch.tensor([3 * g + 1 for g, _, _ in flat]),
        reward_n=torch.tensor([reward for _, _, reward in flat]),
        truncated_n=torch.tensor([length == longest for _, length, _ in flat]),
    )
    return rows.select(torch.randperm(len(rows), generator=generator).tolist())


def moved(rows: TrainBatch, logp: list[Tensor]) -> TrainBatch:
    """The rows as in a later mini-batch of a step: the policy differs from the old one and the reference."""
    generator = torch.Generator().manual_seed(1)
    logp_r = torch.cat(logp).detach().float()
    old_r, ref_r = (logp_r + scale * torch.randn(logp_r.shape, generator=generator) for scale in (0.2, 0.5))
    return rows.with_columns(old_logp_r=old_r, ref_logp_r=ref_r)


def by_another_engine(rows: TrainBatch, logp: list[Tensor]) -> TrainBatch:
    """The rows with log-probs of an engine that differs from the trainer in every token."""
    noise_r = torch.randn(sum(map(len, logp)), generator=torch.Generator().manual_seed(2))
    return rows.with_columns(engine_logp_r=torch.cat(logp).detach().float() + 0.4 * noise_r)


def supports_of(rows: TrainBatch) -> list[Support | None]:
    """Random supports of 1 to 64 tokens, and of the whole vocabulary; every fifth row has none."""
    generator = torch.Generator().manual_seed(4)

    def of(response: Sequence[int]) -> Support:
        members = []
        for token in response:
            order = torch.randperm(reference.VOCABULARY, generator=generator).tolist()
            size = (1, 2, 5, 17, 64, reference.VOCABULARY)[order[0] % 6]
            members.append(sorted({token, *order[: size - 1]}) if order[1] % 7 else [])
        return Support.of(members)

    return [None if i % 5 == 4 else of(response) for i, response in enumerate(rows.response_ids)]


def routing_of(rows: TrainBatch, model: Any) -> list[Routing | None]:
    """Random experts of every token, unlike any router's choice; every third row has none."""
    generator = torch.Generator().manual_seed(3)
    layers, per_token = model.num_hidden_layers, model.num_experts_per_tok
    count = getattr(model, "n_routed_experts", None) or model.num_experts

    def of(tokens: int) -> Routing:
        order = torch.rand(tokens - 1, layers, count, generator=generator).argsort(-1)
        ids = order[..., :per_token].to(torch.uint8).numpy().tobytes()
        return Routing(layers, per_token, 1, ids)

    pairs = zip(rows.prompt_ids, rows.response_ids, strict=True)
    return [None if i % 3 == 2 else of(len(p) + len(r)) for i, (p, r) in enumerate(pairs)]
