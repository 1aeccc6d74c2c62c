"""Compares tables in docs/ with the code; `pytest --write-tables TEST_FILE` writes them anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Hold = Callable[[Path, Mapping[str, Callable[[], str]]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-tables", action="store_true", help="write the tables in docs/ again")


@pytest.fixture(scope="session")
def hold_current(pytestconfig: pytest.Config) -> Hold:
    """Return a function that compares a page's tables with those that functions return, by NAME.

    A table is between `<!-- NAME -->` and `<!-- end of NAME -->`.
    """

    def hold(page: Path, tables: Mapping[str, Callable[[], str]]) -> None:
        text = current = page.read_text()
        for name, table in tables.items():
            begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
            head, rest = current.split(begin)
            _, tail = rest.split(end)
            current = head + begin + table() + end + tail
        if pytestconfig.getoption("write_tables"):
            page.write_text(current)
        else:
            assert text == current, f"{page} is not current; pytest --write-tables with this test's file"

    return hold
