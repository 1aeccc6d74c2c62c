"""Trains a small model to count discs in pictures, first by SFT, then by GVPO.

    python examples/images/run.py [key.sub=value ...]

The arguments go to the GVPO run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

if __name__ == "__main__":
    sys.exit(small.run_example("images"))
