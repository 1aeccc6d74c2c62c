"""Prints failures as they happen: pytest would print them at the end of the suite, minutes later."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print one line for a failed test, in the process that the user started."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = str(crash.message if crash else report.longrepr).splitlines()
        line = f"FAILED in {report.when}: {report.nodeid}: {lines[0][:300] if lines else ''}"
        print(f"\n{line}", file=sys.__stderr__, flush=True)
