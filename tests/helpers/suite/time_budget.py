"""`pytest --seconds N` begins no test that would end later than N seconds after the start.

How long a test takes is read from benchmarks/results/proof.json (suite/outcomes.py); tests that are not in
it count as 60 s. tools/touched_proofs.py reads that file, too, for the commit that a change began with. The
end of the output lists what did not run. Tests that still run GRACE seconds after the limit are cut off, and
are named, too.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from helpers.suite.outcomes import last_run, outcomes

UNKNOWN = 60.0  # seconds
GRACE = 300.0  # seconds
NO_TIME, FAILED = "no time left", "failed when all proofs ran last"

_started = time.time()
_collected: dict[str, None] = {}  # names, in their order
_begun: set[str] = set()  # files of which a test has begun
_given_up: set[str] = set()  # files of which a test was left out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="skip tests that would not end in this time")


def pytest_configure(config: pytest.Config) -> None:
    """Let every worker count from the start of the controller, which cuts off what takes too long."""
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
    """{test: seconds}"""
    seconds: dict[str, float] = last_run()["seconds"]
    return seconds


def file_of(name: str) -> str:
    return name.partition("::")[0]


@functools.cache
def longest_of(file: str) -> float:
    """The seconds of the file's longest test. The first one makes fixtures for all, which may be the longest
    part.
    """
    return max((s for name, s in known_times().items() if file_of(name) == file), default=UNKNOWN)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would end too late, and all later ones of its file: they need the same fixtures.

    A proof that failed before the change says nothing about it: it is skipped, too.
    """
    limit = item.config.getoption("seconds")
    if limit is None:
        return
    file = file_of(item.nodeid)
    known = known_times().get(item.nodeid, UNKNOWN)
    needed = known if file in _begun else max(known, longest_of(file))
    if file in _given_up or time.time() - _started + needed > limit:
        _given_up.add(file)
        pytest.skip(NO_TIME)
    if item.nodeid in last_run()["failed"]:
        pytest.skip(FAILED)
    _begun.add(file)


def _cut_off(config: pytest.Config, limit: float) -> None:
    """End this process, the controller. The output ends with the names of tests without a result."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    remaining = [name for name in _collected if name not in outcomes]
    reporter.section(f"cut off after {limit + GRACE:.0f} s, without a result: {len(remaining)}", yellow=True)
    for name in remaining:
        reporter.line(name)
    reporter._tw.flush()
    os._exit(int("failed" in outcomes.values()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reason, words in ((NO_TIME, "for want of time"), (FAILED, "because they failed before")):
        left_out = [r for r in terminalreporter.stats.get("skipped", []) if reason in str(r.longrepr)]
        if left_out:
            terminalreporter.section(f"did not run, {words}: {len(left_out)}", yellow=True)
        for report in left_out:
            terminalreporter.line(report.nodeid)
