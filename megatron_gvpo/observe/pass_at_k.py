"""Correct samples, and the unbiased estimator of pass@k from their number."""

from __future__ import annotations

import math


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is correct), given that c of n samples are correct.

    The estimate is `1 - C(n-c, k) / C(n, k)`, computed as a product of factors in [0, 1] (Chen et al. 2021,
    equation 1 and figure 3). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of n={n} samples with c={c} correct: needs 1 <= k <= n and 0 <= c <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def is_correct(score: float, right_at: float) -> bool:
    """Returns True if the score of a rollout reaches `right_at`, up to rounding."""
    return score >= right_at - 1e-6 * max(1.0, abs(right_at))
