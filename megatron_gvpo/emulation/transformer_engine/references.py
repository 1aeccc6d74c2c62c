"""The references by the names of the compiled functions that they stand for.

The compiled function runs first: its C++ checks the arguments, converts quantizers and allocates the results,
while the null CUDA leaves the kernels out. Then the reference computes the values and writes them into that
memory. So a reference takes the compiled function's result, then its arguments.
"""

from __future__ import annotations

from collections.abc import Callable

Reference = Callable[..., None]
TABLE: dict[str, Reference] = {}


def reference(function: Reference) -> Reference:
    """Register a reference under its name, which is the compiled function's."""
    TABLE[function.__name__] = function
    return function


def reference_of(name: str, function: Reference) -> None:
    """Register a reference of a family of functions under one name."""
    TABLE[name] = function
