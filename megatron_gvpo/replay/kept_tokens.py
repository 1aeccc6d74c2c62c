"""Computes the tokens that truncated sampling keeps, and compares a run's recorded sets with them.

Rounding can add or remove tokens that are close to a limit. So a recorded set is wrong only if it lacks a
token that rounding cannot remove, or has a token that rounding cannot add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_gvpo.supports import Support

_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
_MOSTLY = 0.9  # an origin is named if it explains this share of the wrong sets


def limits_of(sampling: Mapping[str, Any]) -> dict[str, float]:
    """Return those of the options top_p, top_k and min_p that exclude tokens."""
    limits = {name: sampling.get(name) for name in _NEUTRAL}
    return {name: value for name, value in limits.items() if value and value != _NEUTRAL[name]}


def listed(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in limits.items())


def recorded_tokens(support: Support, vocabulary: int) -> Tensor:
    """Return each token's recorded set as bool [tokens, vocabulary]; all true where none is recorded."""
    counts, ids = support.arrays
    kept_tv = torch.from_numpy(counts == 0)[:, None].repeat(1, vocabulary)
    kept_tv[torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), torch.from_numpy(ids)] = True
    return kept_tv


def kept_tokens(logp_tv: Tensor, limits: Mapping[str, float], in_turn: bool, slack: float = 0.0) -> Tensor:
    """Return the tokens that `limits` keep of the probabilities exp(logp_tv), bool [tokens, vocabulary].

    If `in_turn`, min-p, top-k and top-p each apply to the tokens that the limit before left; otherwise top-p
    applies to the complete distribution. `slack` is a rounding error of the log-probs, in nats. A positive
    slack also keeps tokens that such an error may keep; a negative one keeps only tokens that such an error
    cannot remove.
    """
    falling, order = logp_tv.sort(-1, descending=True)
    p = falling.exp()
    ahead = _ahead(falling, slack)  # the number of tokens that are more probable than each
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
    """Return how many tokens are more probable than each, if rounding changes each log-prob by `slack`."""
    if slack == 0:
        return torch.arange(falling.shape[1]).expand(falling.shape)
    rising = (-falling).contiguous()
    if slack > 0:
        return torch.searchsorted(rising, rising - 2 * slack)
    return torch.searchsorted(rising, rising - 2 * slack, right=True) - 1


def wrong_sets(
    logp_tv: Tensor, recorded_tv: Tensor, limits: Mapping[str, float], in_turn: bool, slack: float
) -> Tensor:
    """Return true for tokens whose recorded set contradicts the limits, with `slack` nats of tolerance."""
    needed_tv = kept_tokens(logp_tv, limits, in_turn, -slack)
    possible_tv = kept_tokens(logp_tv, limits, in_turn, slack)
    return ((needed_tv & ~recorded_tv) | (recorded_tv & ~possible_tv)).any(-1)


def origin(
    logp_by_step: Iterator[tuple[int, Tensor]],
    recorded: Support,
    limits: Mapping[str, float],
    in_turn: bool,
    slack: float,
) -> str | None:
    """Name the origin of recorded sets that contradict the first log-probs; None if none contradicts them.

    `logp_by_step`: steps and log-probs, first for the weights that sampled, then for earlier weights, which
    are computed only if they are read.
    """
    _, logp_tv = next(logp_by_step)
    recorded_tv = recorded_tokens(recorded, logp_tv.shape[1])
    is_wrong = wrong_sets(logp_tv, recorded_tv, limits, in_turn, slack)
    if not is_wrong.any():
        return None
    if recorded_tv[is_wrong].all(-1).double().mean() >= _MOSTLY:
        return "the whole vocabulary"
    for step, other_tv in logp_by_step:
        fits = ~wrong_sets(other_tv, recorded_tv, limits, in_turn, slack)
        if fits[is_wrong].double().mean() >= _MOSTLY:
            return f"those of the weights of step {step}"
    return "others"
