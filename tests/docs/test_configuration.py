"""The configuration reference: every key has a meaning, and the page has every key."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "docs"))

import configuration

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.algorithms.catalog import _block_keys, _blocks, field_comments
from megatron_gvpo.algorithms.recipe import recipe_names

SECTIONS = list(configuration.sections())
BLOCKS = {block.__name__: block for annotation in _block_keys().values() for block in _blocks(annotation)}


@pytest.mark.parametrize(("path", "section"), SECTIONS, ids=[path or "top" for path, _ in SECTIONS])
def test_every_key_has_a_meaning(path: str, section: type[BaseModel]):
    meanings = {key.name: key.meaning for key in configuration.keys(section)}
    assert [name for name, meaning in meanings.items() if len(meaning.split()) < 2] == []
    assert [name for name, meaning in meanings.items() if "type: ignore" in meaning] == []


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_option_of_a_block_has_a_meaning(block: type[Block]):
    """A comment beside the field, or a word about it in the block's docstring or that of a base class."""
    docs = " ".join(inspect.getdoc(base) or "" for base in block.__mro__ if issubclass(base, Block))
    comments = field_comments(block)
    missing = [
        name
        for name in block.model_fields
        if name != "name" and not comments.get(name) and not re.search(rf"\b{name}\b", docs)
    ]
    assert missing == []


def test_the_page_has_every_section_and_key():
    page = configuration.page()
    for path, section in SECTIONS:
        assert not path or f"## `{path}`" in page
        assert all(f"| `{name}` |" in page for name in (key.name for key in configuration.keys(section)))
    assert "| `max_tokens` | integer > 0 | `1024` | " in page
    assert "| `path` | text | required | " in page


def test_the_command_line_page_has_every_command():
    import command_line

    page = command_line.page()
    for command in (
        "train",
        "eval",
        "export",
        "convert",
        "serve",
        "recipes",
        "slurm",
        "k8s",
        "sky",
        "plan",
        "doctor",
    ):
        assert f"## megatron-gvpo {command}" in page
    assert "--save-before SECONDS" in page


def test_the_reference_pages_follow_the_code():
    import reference

    old = [name for name, page in reference.PAGES.items() if (reference.FOLDER / name).read_text() != page()]
    assert not old, "python tools/docs/reference.py writes them again"


def test_the_recipes_page_has_every_recipe_and_block():
    import reference

    page = reference.PAGES["recipes.md"]()
    assert all(f"| `{name}` |" in page for name in recipe_names())
    assert all(
        f"In `{block.__module__.partition('.')[2].replace('.', '/')}.py`" in page for block in BLOCKS.values()
    )
