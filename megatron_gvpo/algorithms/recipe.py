"""Reads recipes: YAML files with usual compositions of blocks, and a description of each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import AliasChoices, Field

from megatron_gvpo.algorithms.base import Block

RECIPES = Path(__file__).parent / "recipes"
# The keys of mappings that no class describes: their keys are the user's, so an empty one empties them.
FREE_MAPPINGS = ("options", "chat_template_kwargs", "env", "headers", "json_schema", "request")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it


class About(Block):
    """The description of a recipe."""

    title: str
    paper: str
    summary: str
    # The source of its formulas: the paper; the authors' code; notes or implementations of others; a
    # textbook; or the abstract alone, which only inspired the method. `sure` is the key's former name.
    provenance: Literal["paper", "code", "second-hand", "textbook", "inspired by"] = Field(
        validation_alias=AliasChoices("provenance", "sure")
    )
    chosen: str | None = None  # choices that the source does not make
    needs: tuple[str, ...] = ()  # requirements on the data, the rewards or other models
    settings: dict[str, Any] = Field(default_factory=dict)  # settings of the run that go with the method


@cache
def recipe_names() -> list[str]:
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def read_recipe(name: str) -> tuple[dict[str, Any], About]:
    """A recipe's blocks, merged with those of the recipe that it is based on, and its description.

    Raises ValueError for an unknown recipe.
    """
    if name not in recipe_names():
        near = difflib.get_close_matches(name.lower(), recipe_names(), 5, 0.5)
        # Swapped letters come first: gpro, grpo.
        near.sort(key=lambda known: sorted(known) != sorted(name.lower()))
        hint = f"did you mean {near[0]!r}?" if near else "`megatron-gvpo recipes` lists them"
        raise ValueError(f"there is no recipe {name!r}; {hint}")
    blocks: dict[str, Any] = yaml.load((RECIPES / f"{name}.yaml").read_text(), _LOADER)
    about = About(**blocks.pop("about"))
    if base := blocks.pop("based_on", None):
        blocks = merge(read_recipe(base)[0], blocks)
    return blocks, about


def merge(base: Mapping[str, Any], over: Mapping[str, Any], is_free: bool = False) -> dict[str, Any]:
    """Nested settings `over` on top of `base`; a block under another name or recipe replaces the whole block.

    A plain string in `base` is a block's short form where `over` sets keys of that block. A list is replaced,
    unless `over` gives its items by their numbers: `members: {0: {count: 4}}`, or members.0.count=4.
    `recipe: null` alone, as algorithm.recipe=null, keeps the blocks of `base`. An empty mapping replaces one
    of FREE_MAPPINGS, and mappings inside it (`is_free`); a section stays as it is.
    """
    merged = {**base, **over}
    for key in base.keys() & over.keys():
        old, new = base[key], over[key]
        # {env: NAME} stands for a variable.
        if isinstance(old, str) and not (isinstance(new, Mapping) and new.keys() == {"env"}):
            old = {"recipe" if key == "algorithm" else "name": old}
        if isinstance(old, list) and isinstance(new, Mapping):
            merged[key] = _merge_items(old, new)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            is_replaced = any(new.get(tag, old[tag]) != old[tag] for tag in ("name", "recipe") if tag in old)
            if new == {"recipe": None}:
                is_replaced = False
            if key == "estimator" and new.get("name", "group") != old.get("name", "group") and "name" in new:
                is_replaced = True  # the name `group` may be left out
            is_inner_free = is_free or key in FREE_MAPPINGS
            is_replaced = is_replaced or (is_inner_free and not new)
            merged[key] = new if is_replaced else merge(old, new, is_inner_free)
    return merged


def _merge_items(old: list[Any], new: Mapping[Any, Any]) -> Any:
    """A list with some of its items changed; other values are left for validation to refuse."""
    items = {str(number): item for number, item in enumerate(old)}
    if not {str(number) for number in new} <= items.keys():
        return new
    merged = merge(items, {str(number): item for number, item in new.items()})
    return [merged[number] for number in items]
