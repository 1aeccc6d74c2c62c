"""`pytest --seconds N` skips every test that would end later than N seconds after the start.

How long a test takes is read from benchmarks/results/proof.json, which `pytest --write-times FILE` writes;
tests that are not in it count as 60 s. `make proof` writes the file, and tools/touched_proofs.py reads
it for the proofs that a change touches, and for the commit that the change began with. The end of the output
lists what did not run.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TIMES = Path(__file__).parents[2] / "benchmarks" / "results" / "proof.json"
UNKNOWN = 60.0  # seconds
REASON = "no time left"

_started = time.time()
_outcomes: dict[str, str] = {}
_seconds: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="skip tests that would not end in this time")
    parser.addoption("--write-times", type=Path, metavar="FILE", help="write outcomes and seconds as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Let every worker count from the start of the controller."""
    global _started
    _started = getattr(config, "workerinput", {}).get("started", _started)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["started"] = _started


def known_times() -> dict[str, float]:
    """{test: seconds} of the last `make proof`."""
    return json.loads(TIMES.read_text())["seconds"] if TIMES.exists() else {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("seconds")
    if limit is not None and time.time() - _started + known_times().get(item.nodeid, UNKNOWN) > limit:
        pytest.skip(REASON)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid
    _seconds[name] += report.duration
    if report.when == "call" or report.outcome != "passed":
        _outcomes[name] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("write_times")
    if file is None or hasattr(session.config, "workerinput"):
        return
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=TIMES.parent, capture_output=True, text=True
    ).stdout.strip()
    found = {
        "commit": commit,
        "machine": platform.machine(),
        "total_seconds": round(time.time() - _started),
        "outcomes": dict(Counter(_outcomes.values())),
        "failed": sorted(name for name, outcome in _outcomes.items() if outcome == "failed"),
        "seconds": {name: round(s, 1) for name, s in sorted(_seconds.items()) if s >= 0.5},
    }
    file.write_text(json.dumps(found, indent=1) + "\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    left_out = [r for r in terminalreporter.stats.get("skipped", []) if REASON in str(r.longrepr)]
    if left_out:
        terminalreporter.section(f"did not run, for want of time: {len(left_out)}", yellow=True)
        for report in left_out:
            terminalreporter.line(report.nodeid)
