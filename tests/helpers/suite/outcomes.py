"""Outcomes and times of tests: written to a file at the end, and to a journal as they come.

`pytest --write-times FILE` writes the outcomes and seconds of all tests as JSON; `make proof` writes
benchmarks/results/proof.json so. `pytest --journal FILE` adds a line to FILE after every test, and leaves out
the tests that have passed or were skipped in FILE at the same commit: a run of hours that was stopped is
resumed. With changes that are not committed it begins anew, since no name tells which files were tested.
"""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TIMES = ROOT / "benchmarks" / "results" / "proof.json"

outcomes: dict[str, str] = {}  # by the names of all tests that ended, those in the journal included
_seconds: Counter[str] = Counter()
_started = time.time()
_earlier = 0.0  # seconds that the runs before this one took, by the journal
_journal: Path | None = None  # set on the controller, by --journal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-times", type=Path, metavar="FILE", help="write outcomes and seconds as JSON")
    parser.addoption("--journal", type=Path, metavar="FILE", help="note outcomes in FILE, and go on from it")


@functools.cache
def commit() -> str:
    """The commit that is checked out, with `-dirty` where files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


@functools.cache
def last_run() -> dict[str, Any]:
    """The results of the last `make proof`."""
    return json.loads(TIMES.read_text()) if TIMES.exists() else {"seconds": {}, "failed": []}


def noted(journal: Path) -> list[dict[str, Any]]:
    """The journal's lines of this commit; empty if files differ from it."""
    if not journal.exists() or not commit() or commit().endswith("-dirty"):
        return []
    complete = [line for line in journal.read_text().splitlines() if line.endswith("}")]
    return [entry for entry in map(json.loads, complete) if entry["commit"] == commit()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    journal = config.getoption("journal")
    if journal is None:
        return
    done = {entry["test"] for entry in noted(journal) if entry["outcome"] != "failed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_sessionstart(session: pytest.Session) -> None:
    """On the controller: begin with the outcomes in the journal."""
    global _earlier, _journal
    if hasattr(session.config, "workerinput") or session.config.getoption("journal") is None:
        return
    _journal = session.config.getoption("journal")
    for entry in noted(_journal):
        outcomes[entry["test"]] = entry["outcome"]
        _seconds[entry["test"]] = entry["seconds"]
        _earlier = max(_earlier, entry["since_start"])
    if outcomes:
        print(f"{_journal}: {len(outcomes)} tests have an outcome at {commit()[:12]}; the others run now")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid
    if report.when == "setup":
        _seconds[name] = 0.0
    _seconds[name] += report.duration
    if report.when == "call" or report.outcome != "passed":
        outcomes[name] = report.outcome


def pytest_runtest_logfinish(nodeid: str) -> None:
    """On the controller: add a line to the journal."""
    if _journal is None or nodeid not in outcomes:
        return
    entry = {
        "commit": commit(),
        "test": nodeid,
        "outcome": outcomes[nodeid],
        "seconds": round(_seconds[nodeid], 1),
        "since_start": round(_earlier + time.time() - _started),
    }
    with _journal.open("a") as file:
        file.write("\n" + json.dumps(entry))  # the newline first: the last line may have been cut off


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("write_times")
    if file is None or hasattr(session.config, "workerinput"):
        return
    outcomes_here = {
        "commit": commit(),
        "machine": platform.machine(),
        "total_seconds": round(_earlier + time.time() - _started),
        "outcomes": dict(Counter(outcomes.values())),
        "failed": sorted(name for name, outcome in outcomes.items() if outcome == "failed"),
        "seconds": {name: round(s, 1) for name, s in sorted(_seconds.items()) if s >= 0.5},
    }
    file.write_text(json.dumps(outcomes_here, indent=1) + "\n")
