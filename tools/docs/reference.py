"""Writes the reference pages that follow from the code: `python tools/docs/reference.py`.

They are committed, so that a reader of the repository sees them. A test fails where the code has changed
since.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import command_line  # noqa: E402
import configuration  # noqa: E402
import metrics  # noqa: E402
import resolved  # noqa: E402
import rollouts  # noqa: E402

from megatron_gvpo.algorithms import catalog  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "configuration.md": configuration.page,
    "recipes.md": catalog.markdown,
    "metrics.md": metrics.page,
    "rollouts.md": rollouts.page,
    "command_line.md": command_line.page,
    "versions.md": resolved.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
