"""Numbers that the user's code returns, as rewards or counts."""

from __future__ import annotations

from decimal import Decimal
from numbers import Real
from typing import Any

LARGEST = 3.4028234663852886e38  # a reward: rewards are trained on in single precision


class NoNumberError(Exception):
    """The user's code has returned no number that can be trained on; the message names what it returned."""


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
    if number != number or number in (float("inf"), -float("inf")):
        raise NoNumberError(str(number))
    if abs(number) > LARGEST:
        raise NoNumberError(f"{number:g}, beyond {LARGEST:.2g}, the largest reward")
    return number
