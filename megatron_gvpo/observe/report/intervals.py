"""Confidence intervals of pass@k, from the saved responses of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

Z = 1.96  # of a normal distribution's central 95 %


def interval(value_p: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of values in [0, 1], one of each prompt.

    The samples of one prompt are not independent, so prompts are what is counted: Miller 2024, "Adding Error
    Bars to Evals" (arXiv 2411.00640), equation 4. The interval is Wilson's with the number of yes-or-no
    questions that would have the same standard error, which stays inside [0, 1] and has a width also where
    all values are equal. Raises ValueError without values.
    """
    if not value_p:
        raise ValueError("no prompts: their mean has no interval")
    count, mean = len(value_p), fmean(value_p)
    squares = sum((value - mean) ** 2 for value in value_p)
    effective = max(count, mean * (1 - mean) * count**2 / squares) if squares else float(count)
    centre = (mean + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    spread = mean * (1 - mean) / effective + Z**2 / (4 * effective**2)
    half = Z * math.sqrt(max(0.0, spread)) / (1 + Z**2 / effective)
    return max(0.0, centre - half), min(1.0, centre + half)
