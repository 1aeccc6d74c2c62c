"""A reward that differs from response to response, for a step whose model was made at random."""

from __future__ import annotations

import zlib

from megatron_gvpo.groups import Prompt, Rollout


def reward(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1, by the tokens alone, so that a step can be repeated."""
    return float(zlib.crc32(repr(rollout.token_ids).encode()) % 2)
