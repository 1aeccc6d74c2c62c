"""Which parts of the outside world the tests really ran, recorded where they run.

A helper that has brought a real part up calls `used("its name")`. It counts for every test that passes and
used it, itself or by its fixtures. `pytest --every-part`, which is what CI runs, fails where one never ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

PARTS = (
    "megatron-core and Megatron-Bridge, 1 rank",
    "megatron-core and Megatron-Bridge, 2 ranks",
    "megatron-core and Megatron-Bridge, 4 ranks",
    "torchrun",
    "embedded rollout engine",
    "reward workers",
    "sglang server",
    "vllm server",
    "TRL's losses",
    "Slurm",
    "image",
)

_passed: Counter[str] = Counter()
_of: dict[str, set[str]] = {}  # the parts that a fixture of this name, or the test "", has used
_running: list[str] = []


def used(part: str) -> None:
    """Note that the running test or fixture has used one of PARTS; without effect in processes of its own."""
    assert part in PARTS, f"{part!r} is none of PARTS in {__file__}"
    if _running:
        _of[_running[-1]].add(part)


@contextmanager
def _recording(name: str) -> Generator[None]:
    _of[name] = set()
    _running.append(name)
    try:
        yield
    finally:
        _running.pop()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    with _recording(fixturedef.argname):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None]:
    with _recording(""):
        yield
    _passed.update(set().union(*(_of.get(name, ()) for name in ("", *item.fixturenames))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-part", action="store_true", help="fail unless every real part ran")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("every_part") and not set(PARTS) <= set(_passed):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    every = config.getoption("every_part")
    if not _passed and not every:
        return
    terminalreporter.section("real parts, and the tests that passed with them")
    for part in PARTS:
        if _passed[part]:
            terminalreporter.line(f"{_passed[part]:5}  {part}")
        elif every:
            terminalreporter.line(f"NEVER  {part}", red=True, bold=True)
