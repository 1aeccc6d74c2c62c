"""Parameters of the selected tests, so that a fixture of a file runs the cases of those tests alone."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """The values of these parameters in the selected tests of the fixture's file; several give tuples.

    Tests without one of the parameters are left out. Each value comes once, in the tests' order.
    """
    params = (
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    )
    values = dict.fromkeys(tuple(p[name] for name in names) for p in params if p.keys() >= set(names))
    return [value[0] for value in values] if len(names) == 1 else list(values)
