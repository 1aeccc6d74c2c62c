"""Tests that failed and then passed are shown at the end, with what they said.

Real servers, Slurm and signals on a shared machine: one test of thousands may meet a moment that has nothing
to do with what it proves, so a failed one is run once more (`--reruns 1`). It is a defect, of the test or of
what it tests, and is to be mended; it does not hide.
"""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    failed = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", [])
    reports = terminalreporter.stats.get("rerun", [])
    again = [report for report in reports if report.nodeid not in {other.nodeid for other in failed}]
    if not again:
        return
    terminalreporter.section("failed, and passed when run again: to be mended", yellow=True)
    for report in again:
        terminalreporter.line(report.nodeid, yellow=True)
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.line(str(crash or report.longrepr))
