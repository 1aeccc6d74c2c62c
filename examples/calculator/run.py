"""Runs the calculator: a small model learns, by GVPO, to use a calculator instead of guessing.

    python examples/calculator/run.py [key.sub=value ...]

The arguments go to the GVPO run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

if __name__ == "__main__":
    sys.exit(small.run_example("calculator"))
