"""`pytest --seconds N` begins no test that would end later than N seconds after the start.

How long a test takes is read from benchmarks/results/proof.json (suite/outcomes.py). It leaves out tests of
less than half a second, so a test that is not in it counts as 1 s. In a file without any times a test counts
as 60 s, and the first, which makes the fixtures, as 300 s. The end of the output counts what did not run,
file by file. Tests that still run GRACE seconds after the limit are cut off, and are counted, too.
tools/touched_proofs.py reads the same file for the commit that a change began with.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from helpers.suite.outcomes import last_run, outcomes

SHORT, UNKNOWN, UNKNOWN_FIRST = 1.0, 60.0, 300.0  # seconds
GRACE = 300.0  # seconds
NO_TIME, FAILED = "no time left", "failed when all proofs ran last"

_started = time.time()
_collected: dict[str, None] = {}  # names, in their order
_begun: set[str] = set()  # files with a test that has begun
_given_up: set[str] = set()  # files with a test that was left out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="skip tests that would not end in this time")


def pytest_configure(config: pytest.Config) -> None:
    """Let every worker count from the start of the controller, which ends the run when the time is over."""
    global _started
    _started = getattr(config, "workerinput", {}).get("started", _started)
    limit = config.getoption("seconds")
    if limit is not None and not hasattr(config, "workerinput"):
        timer = threading.Timer(limit + GRACE, _cut_off, [config, limit])
        timer.daemon = True
        timer.start()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["started"] = _started


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Iterable[str]) -> None:
    _collected.update(dict.fromkeys(ids))


def pytest_collection_finish(session: pytest.Session) -> None:
    _collected.update(dict.fromkeys(item.nodeid for item in session.items))


def known_times() -> dict[str, float]:
    """The seconds that each test took in the last `make proof`."""
    seconds: dict[str, float] = last_run()["seconds"]
    return seconds


def file_of(name: str) -> str:
    return name.partition("::")[0]


@functools.cache
def longest_of(file: str) -> float | None:
    """The seconds of the file's longest test, which may include the fixtures of all; None if unknown."""
    return max((s for name, s in known_times().items() if file_of(name) == file), default=None)


def expected_seconds(name: str, is_first: bool) -> float:
    """The seconds that a test is expected to take; `is_first`: no test of its file has begun."""
    longest = longest_of(file_of(name))
    if longest is None:
        return UNKNOWN_FIRST if is_first else UNKNOWN
    return longest if is_first else known_times().get(name, SHORT)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would end too late, and the later tests of its file, which need the same fixtures.

    A proof that failed before the change is skipped, too, because it shows nothing about the change.
    """
    limit = item.config.getoption("seconds")
    if limit is None:
        return
    file = file_of(item.nodeid)
    needed = expected_seconds(item.nodeid, is_first=file not in _begun)
    if file in _given_up or time.time() - _started + needed > limit:
        _given_up.add(file)
        pytest.skip(NO_TIME)
    if item.nodeid in last_run()["failed"]:
        pytest.skip(FAILED)
    _begun.add(file)


def _cut_off(config: pytest.Config, limit: float) -> None:
    """End this process, the controller. The failures come last in the output, where a reader looks first."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    remaining = [name for name in _collected if name not in outcomes]
    reporter.section(f"cut off after {limit + GRACE:.0f} s, without a result: {len(remaining)}", yellow=True)
    _list_files(reporter, remaining)
    reporter.summary_errors()
    reporter.summary_failures()
    reporter.short_test_summary()
    reporter._tw.flush()
    os._exit(int("failed" in outcomes.values()))


def _list_files(reporter: Any, names: Iterable[str]) -> None:
    """Write a line for each file with the number of its tests, because there are thousands of proofs."""
    for file, count in Counter(map(file_of, names)).items():
        reporter.line(f"{file}: {count}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reason, words in ((NO_TIME, "for want of time"), (FAILED, "because they failed before")):
        left_out = [r for r in terminalreporter.stats.get("skipped", []) if reason in str(r.longrepr)]
        if left_out:
            terminalreporter.section(f"did not run, {words}: {len(left_out)}", yellow=True)
            _list_files(terminalreporter, (report.nodeid for report in left_out))
