"""Fixtures of the tests of the Megatron model."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.references import gradient_reference


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference's models, each in a folder of its name. A file writes its results there."""
    path = tmp_path_factory.mktemp("models")
    gradient_reference.save_models(path)
    return path
