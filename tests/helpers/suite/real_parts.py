"""Counts the real parts (servers, ranks, Slurm, ...) that passing tests have used.

A helper that has brought up a real part calls `used("its name")`. The part counts for every test that
passes and used it, directly or through a fixture. `pytest --every-part`, which CI runs, fails where a part
never ran. Under pytest-xdist each worker sends its counts to the controller, which adds them up.
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
    "megatron-core and Megatron-Bridge, 8 ranks",
    "torchrun",
    "embedded rollout engine",
    "reward workers",
    "environment workers",
    "agent programs",
    "sglang server",
    "vllm server",
    "TRL's losses",
    "Slurm",
    "image",
    "null CUDA",
    "emulated GPU",
    "Chromium",
    "bubblewrap",
    "MCP server",
    "trackio, MLflow and SwanLab",
    "Tinker SDK",
    "lm-eval",
    "OpenEnv",
    "NeMo-Gym",
)

_passed: Counter[str] = Counter()
# the parts that the fixture of this name used; under "", those of the running test
_used_by: dict[str, set[str]] = {}
_running: list[str] = []


def used(part: str) -> None:
    """Record that the running test or fixture uses `part`, one of PARTS; does nothing in child processes."""
    assert part in PARTS, f"{part!r} is none of PARTS in {__file__}"
    if _running:
        _used_by[_running[-1]].add(part)


@contextmanager
def _recording(name: str) -> Generator[None]:
    _used_by[name] = set()
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
    _passed.update(set().union(*(_used_by.get(name, ()) for name in ("", *item.fixturenames))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-part", action="store_true", help="fail unless every real part ran")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """On the controller: add the counts of a worker that has ended; a worker that crashed has sent none."""
    _passed.update(getattr(node, "workeroutput", {}).get("real_parts", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # this process is a worker
        output["real_parts"] = dict(_passed)
    elif session.config.getoption("every_part") and not set(PARTS) <= set(_passed):
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
