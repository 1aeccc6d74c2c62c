"""From prompts to groups: seeds, the sharing of requests among ranks, and the exchange of results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from megatron_gvpo.config import SamplingConfig
from megatron_gvpo.exchange import all_gather_msgpack
from megatron_gvpo.rollout.engine import Engine, Request
from megatron_gvpo.types import Group, Prompt, Rollout


def generate_groups(
    engine: Engine, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int
) -> list[Group]:
    """`n` rollouts for each prompt, in order; every rank gets the same full list.

    Collective over the default process group where there is one: every rank holds an engine with the
    same weights, calls this with the same arguments, and generates a contiguous share of the prompts.
    Seeds belong to prompts, so the number of ranks changes results only through rounding.
    """
    requests = [Request(prompt.token_ids, n, prompt_seed(seed, i)) for i, prompt in enumerate(prompts)]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = requests[rank * len(requests) // world : (rank + 1) * len(requests) // world]
    mine = engine.generate(share, sampling)
    if world > 1:
        packed = [[_to_dict(rollout) for rollout in rollouts] for rollouts in mine]
        mine = [[Rollout(**r) for r in rollouts] for part in all_gather_msgpack(packed) for rollouts in part]
    return [Group(prompt, rollouts) for prompt, rollouts in zip(prompts, mine, strict=True)]


def prompt_seed(seed: int, position: int) -> int:
    """Seed of the prompt at `position`: the first 63 bits of BLAKE2b("seed/position").

    A hash, so that neighbouring seeds and positions share nothing; 63 bits, because engines take
    signed 64-bit seeds.
    """
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _to_dict(rollout: Rollout) -> dict[str, Any]:
    return {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
