"""Checks of values that come from outside: from the user's code, from settings, data, files and servers.

Python's integers have no bound, and `float`, `math.isfinite` and `statistics.fmean` raise OverflowError for
one of 309 digits or more. So every number from outside passes `finite_number` or `real_number` first.
Settings are plain values: text, numbers, booleans, null, lists and mappings of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

LARGEST = 3.4028234663852886e38  # the largest reward, because training reads rewards in single precision


class NoNumberError(Exception):
    """The user's code returned a value that is not a number to train on; the message names it."""


def finite_number(value: Any, largest: float = math.inf) -> float | None:
    """A number of JSON, YAML or Parquet as a float; None for any other value.

    Numbers are `int` and `float`, without booleans, NaN, infinities, and numbers that exceed `largest` or a
    double.
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
        if bool(getattr(value, "mask", False)):  # numpy.ma.masked has the item 0.0
            raise NoNumberError(f"{kind}, a masked value, instead of a number")
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


DEPTH = 50  # the most levels of lists and mappings
COUNT = 100_000  # the most values, each counted as often as aliases repeat it


def check_plain(values: Any, finite: bool = True) -> None:
    """Raises ValueError, which begins with the key, for a value that no configuration can have.

    These are values that JSON cannot express, text that no file name or UTF-8 file can contain, and lists and
    mappings that are too deep or too many to be intended: YAML's aliases can repeat or contain themselves.
    `finite`: refuse infinite numbers and NaN, too.
    """
    todo: list[Iterator[tuple[str, Any]]] = [iter([("", values)])]
    count = 0
    while todo:
        for key, value in todo[-1]:
            count += 1
            if count > COUNT:
                raise ValueError(f"{cut(key)}: more than {COUNT} values with those that aliases repeat")
            problem = _problem(value)
            if finite and isinstance(value, float) and not math.isfinite(value):
                problem = f"expected a finite number, found {value}"
            if problem is not None:
                raise ValueError(f"{cut(key)}: {problem}" if key else problem)
            if isinstance(value, Mapping | list | tuple):
                if len(todo) > DEPTH:
                    raise ValueError(f"{cut(key)}: nested deeper than {DEPTH} levels")
                todo.append(_inside(key, value))
                break
        else:
            todo.pop()


def _inside(key: str, value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    named = value.items() if isinstance(value, Mapping) else enumerate(value)
    return ((f"{key}.{name}" if key else str(name), item) for name, item in named)


def _problem(value: Any) -> str | None:
    if isinstance(value, str):
        if "\0" in value:
            return "the text has a NUL character"
        if not _is_utf8(value):
            return "the text is not UTF-8, or the locale is not: try LC_ALL=C.UTF-8"
    elif isinstance(value, int):
        if abs(value) >= 2**63:
            return "more than 64 bits for one number"
    elif isinstance(value, bytes | bytearray | set | frozenset):
        return f"expected text, a number, a list or a mapping, found {type(value).__name__}"
    elif isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str | int | float | None) or _problem(name) is not None:
                return f"expected keys that are plain text, found {cut(repr(name))}"
    return None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def cut(text: str) -> str:
    """The text, or the beginning of a long one, for a message."""
    return text if len(text) <= 100 else text[:97] + "..."
