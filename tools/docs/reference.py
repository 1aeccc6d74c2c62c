"""The reference pages, written from the code. `python tools/docs/reference.py NAME` prints one."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import command_line
import configuration
import metrics
import resolved
import rollouts

from megatron_gvpo.algorithms import catalog

PAGES = {
    "configuration.md": configuration.page,
    "recipes.md": catalog.markdown,
    "metrics.md": metrics.page,
    "rollouts.md": rollouts.page,
    "command_line.md": command_line.page,
    "versions.md": resolved.page,
    "changelog.md": Path(__file__).parents[2].joinpath("CHANGELOG.md").read_text,
}

if __name__ == "__main__":
    print(PAGES[f"{sys.argv[1]}.md"]())
