"""Trains a small model, by GVPO, to search before it answers.

    python examples/search/run.py [key.sub=value ...]

The arguments go to the GVPO run. It needs bm25s (`pip install bm25s`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

if __name__ == "__main__":
    sys.exit(small.run_example("search"))
