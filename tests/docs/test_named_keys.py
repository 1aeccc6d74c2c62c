"""The pages for newcomers name keys, recipes, metrics and errors that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.doc_blocks import ROOT, outside_of_blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "docs"))

import configuration

from megatron_gvpo.algorithms.catalog import _block_keys, _blocks
from megatron_gvpo.algorithms.recipe import recipe_names
from megatron_gvpo.core.metric_names import entry

MIGRATION = outside_of_blocks("docs/howto/migrate.md")
TROUBLE = outside_of_blocks("docs/howto/troubleshooting.md")
# On the first page, tables with two columns have other projects' options on the left: the right one counts.
OURS = " ".join(re.findall(r"^\| [^|]+ \| ([^|]+) \|$", MIGRATION, re.M))
SECTIONS = {path: section.model_fields.keys() for path, section in configuration.sections()}


def dotted(text: str) -> list[str]:
    """The names like `train.steps` in backticks, without their values."""
    names = set(re.findall(r"`([a-z]\w*(?:\.\w+)+)", text))
    return sorted(name for name in names if name.split(".")[0] in SECTIONS[""])


def options(key: str) -> set[str]:
    """The options of all blocks that the configuration takes at a key, such as `loss`."""
    return {field for block in _blocks(_block_keys()[key]) for field in block.model_fields}


def exists(key: str) -> bool:
    section, _, name = key.rpartition(".")
    if section.startswith("algorithm."):
        return name in options(section.removeprefix("algorithm."))
    return name in SECTIONS.get(section, ()) or key in SECTIONS


def test_both_pages_have_keys():
    assert len(dotted(OURS)) > 60
    assert len(dotted(TROUBLE)) > 20


@pytest.mark.parametrize("key", dotted(OURS + TROUBLE))
def test_the_key_exists(key: str):
    assert exists(key)


def test_the_recipes_exist():
    cells = " ".join(cell for cell in OURS.split(" | ") if "recipe" in cell)
    named = set(re.findall(r"the recipes? `(\w+)`", cells))
    assert len(named) > 4
    assert named <= set(recipe_names())


def test_the_metrics_exist():
    named = [name for name in re.findall(r"`([a-z]+/\S+)`", TROUBLE) if not name.endswith("*")]
    assert len(named) > 10
    assert [name for name in named if entry(name) is None] == []


def test_the_errors_exist():
    """The program's own words in the first column of the tables."""
    sources = "\n".join(path.read_text() for path in (ROOT / "megatron_gvpo").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # strings that go on in the next line
    quoted = [words for words in re.findall(r"^\| `([^`|]+)`", TROUBLE, re.M) if " " in words]
    assert len(quoted) > 5
    assert [words for words in quoted if words not in joined] == []
