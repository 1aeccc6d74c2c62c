"""The log of a test without the records of other libraries."""

from __future__ import annotations

import logging

import pytest


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The package's own records: other libraries log when the garbage of earlier tests is collected."""
    return [record for record in caplog.records if record.name.startswith("megatron_gvpo")]
