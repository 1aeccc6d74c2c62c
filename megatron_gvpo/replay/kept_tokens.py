"""The tokens that truncated sampling keeps, by the judge, and whether those that a run recorded are these.

Rounding can exchange tokens at the edge of a set. So a recorded set is wrong only where a token is missing
that no rounding loses, or one is there that no rounding keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_gvpo.supports import Support

_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
_MOSTLY = 0.9  # of the wrong tokens: their sets name an origin


def limits_of(sampling: Mapping[str, Any]) -> dict[str, float]:
    """The limits among these values that leave tokens out."""
    limits = {name: sampling.get(name) for name in _NEUTRAL}
    return {name: value for name, value in limits.items() if value and value != _NEUTRAL[name]}


def listed(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in limits.items())


def recorded_tokens(support: Support, vocabulary: int) -> Tensor:
    """The members of each token's support, bool [tokens, vocabulary]; all tokens where it has none."""
    counts, ids = support.arrays
    kept_tv = torch.from_numpy(counts == 0)[:, None].repeat(1, vocabulary)
    kept_tv[torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), torch.from_numpy(ids)] = True
    return kept_tv


def kept_tokens(logp_tv: Tensor, limits: Mapping[str, float], in_turn: bool, slack: float = 0.0) -> Tensor:
    """The tokens that `limits` keep of the probabilities exp(logp_tv), bool [tokens, vocabulary].

    `in_turn`: min-p, top-k and top-p each among what the former left, otherwise top-p of the whole
    distribution. A positive `slack` (nats) also keeps what rounding of each log-prob by it may keep; a
    negative one keeps only what rounding cannot lose.
    """
    falling, order = logp_tv.sort(-1, descending=True)
    p = falling.exp()
    ahead = _ahead(falling, slack)  # how many other tokens come before each
    is_kept = falling >= falling[:, :1] + np.log(limits.get("min_p") or 1e-300) - 2 * slack
    is_kept &= ahead < (limits.get("top_k") or falling.shape[1])
    if "top_p" in limits:
        total = p.masked_fill(~is_kept, 0.0).sum(-1, keepdim=True) if in_turn else p.sum(-1, keepdim=True)
        sums = torch.nn.functional.pad(p.cumsum(-1), (1, 0))
        before = sums.gather(1, ahead)
        if slack < 0:  # the token itself is among the first `ahead + 1`
            before = sums.gather(1, ahead + 1) - p
        is_kept &= before < (limits["top_p"] + slack) * total
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)


def _ahead(falling: Tensor, slack: float) -> Tensor:
    """How many other tokens come before each, int64 like `falling`, where rounding moves each by `slack`."""
    if slack == 0:
        return torch.arange(falling.shape[1]).expand(falling.shape)
    rising = (-falling).contiguous()
    if slack > 0:
        return torch.searchsorted(rising, rising - 2 * slack)
    return torch.searchsorted(rising, rising - 2 * slack, right=True) - 1


def wrong_sets(
    logp_tv: Tensor, recorded_tv: Tensor, limits: Mapping[str, float], in_turn: bool, slack: float
) -> Tensor:
    """The tokens, bool [tokens], whose recorded set rounding by `slack` nats does not make of the limits."""
    needed_tv = kept_tokens(logp_tv, limits, in_turn, -slack)
    possible_tv = kept_tokens(logp_tv, limits, in_turn, slack)
    return ((needed_tv & ~recorded_tv) | (recorded_tv & ~possible_tv)).any(-1)


def origin(
    logp_by_step: Sequence[tuple[int, Tensor]],
    recorded_tv: Tensor,
    limits: Mapping[str, float],
    in_turn: bool,
    slack: float,
) -> str | None:
    """Whose the recorded sets are that are wrong by the first step's log-probs; None if none is wrong.

    `logp_by_step`: by the weights that sampled, then by earlier ones.
    """
    (_, logp_tv), *earlier = logp_by_step
    is_wrong = wrong_sets(logp_tv, recorded_tv, limits, in_turn, slack)
    if not is_wrong.any():
        return None
    if recorded_tv[is_wrong].all(-1).double().mean() >= _MOSTLY:
        return "the whole vocabulary"
    for step, other_tv in earlier:
        fits = ~wrong_sets(other_tv, recorded_tv, limits, in_turn, slack)
        if fits[is_wrong].double().mean() >= _MOSTLY:
            return f"those of the weights of step {step}"
    return "others"
