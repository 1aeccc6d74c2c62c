"""Directories of the checkout that tests need."""

from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
IMPORTS = f"{ROOT}:{ROOT / 'tests'}"  # the PYTHONPATH of a program that imports the package and helpers
