"""Failures are named as they happen: a suite that takes minutes tells them at its end otherwise."""

from __future__ import annotations

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On the controller, with or without workers."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = str(crash.message if crash else report.longrepr).splitlines()
        line = f"FAILED in {report.when}: {report.nodeid}: {said[0][:300] if said else ''}"
        print(f"\n{line}", file=sys.__stderr__, flush=True)
