"""Numbers that come from outside: from the user's code, from data, from files and from servers.

Python's integers have no bound, and `float`, `math.isfinite` and `statistics.fmean` raise OverflowError for
one of 309 digits or more. So every number from outside passes one of the functions here first.
"""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Real
from typing import Any

LARGEST = 3.4028234663852886e38  # a reward: rewards are trained on in single precision


class NoNumberError(Exception):
    """The user's code returned something that is not a number to train on; the message names it."""


def finite_number(value: Any, largest: float = math.inf) -> float | None:
    """A number of JSON, YAML or Parquet as a float; None for any other value.

    Numbers are `int` and `float`, without booleans, NaN, infinities, and what exceeds `largest` or a double.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) and abs(number) <= largest else None


def real_number(value: Any) -> float:
    """A real number of any type: Python's, numpy's and torch's scalars, fractions, decimals, booleans.

    Raises NoNumberError.
    """
    kind = type(value).__name__
    if (shape := getattr(value, "shape", None)) is not None and hasattr(value, "item"):
        if tuple(shape) != ():
            raise NoNumberError(f"{kind} of shape {tuple(shape)} instead of a number")
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise NoNumberError(f"{kind} instead of a number")
    try:
        number = float(value)
    except OverflowError:
        raise NoNumberError(f"{kind} beyond {LARGEST:.2g}, the largest reward") from None
    if not math.isfinite(number):
        raise NoNumberError(str(number))
    if abs(number) > LARGEST:
        raise NoNumberError(f"{number:g}, beyond {LARGEST:.2g}, the largest reward")
    return number
