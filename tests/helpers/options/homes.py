"""Configurations in which a block is at work: one for each block of the registries."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from helpers.options.other_values import FUNCTIONS, HERE, blocks_in, example, parts_of
from helpers.options.search import configured
from helpers.options.small_run import values_of
from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import merge, read_recipe, recipe_names

FIRST = ["grpo", "gvpo", "gpg", "sft"]  # the recipes that are tried first, after those with the block itself


class Slot(NamedTuple):
    """A block at an option of the method, or of another block there."""

    path: tuple[str, ...]
    blocks: tuple[type[Block], ...]  # the outer one, and perhaps one inside it

    @property
    def label(self) -> str:
        return "-".join((*self.path, self.blocks[-1].__name__))


def slots() -> Iterator[Slot]:
    """Every block of the registries once, and with it what its own options hold, once."""
    seen = {block for field in AlgorithmConfig.model_fields.values() for block in blocks_in(field.annotation)}
    for key, field in AlgorithmConfig.model_fields.items():
        for block in blocks_in(field.annotation):
            yield Slot((key,), (block,))
            for option, inner_field in block.model_fields.items():
                for inner_block in blocks_in(inner_field.annotation):
                    if inner_block not in seen:
                        seen.add(inner_block)
                        yield Slot((key, option), (block, inner_block))


_MASK = {"name": "mask_truncated"}
_MEMBERS = [
    {"name": "hinted", "fields": ["hint_1"], "when": "always"},
    {"name": "demonstration"},
]
# Blocks at other options of the method, without which some options of a block have no effect.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "Aggregation": {"shapers": [_MASK]},
    "PPO": {"members": _MEMBERS},
    "Tracker": {"prompts": {"name": "success_rate", "favour": "unsure"}},
}


@cache
def recipe_values(name: str) -> dict[str, Any]:
    """A recipe's blocks, with the small run's functions, which ask nobody, in place of the recipe's."""
    return {key: _without_models(value) for key, value in read_recipe(name)[0].items()}


def _without_models(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_models(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "function" in value:
        return {k: v for k, v in value.items() if k != "options"} | {
            "function": f"{HERE}:{_FUNCTION_OF.get(str(value.get('name')), FUNCTIONS['groups', 'n'])}"
        }
    return {key: _without_models(item) for key, item in value.items()}


_FUNCTION_OF = {"win_rate": "better", "group_similarity": "likeness"}


def _distance(recipe: str, key: str, block: Mapping[str, Any]) -> tuple[bool, int]:
    """The order in which recipes are tried for a block."""
    own = recipe_values(recipe).get(key)
    listed = own if isinstance(own, list) else [own]
    names = [item.get("name") if isinstance(item, Mapping) else item for item in listed if item is not None]
    has_block = bool(names) and block.get("name") in names
    return not has_block, FIRST.index(recipe) if recipe in FIRST else len(FIRST)


def home(slot: Slot, directory: Path) -> tuple[dict[str, Any], tuple[str | int, ...]]:
    """The configuration of the first recipe that takes the block, and the block's path in `algorithm`."""
    outer = example(slot.blocks[0])
    if len(slot.blocks) > 1:
        outer[slot.path[1]] = example(slot.blocks[1])
    key = slot.path[0]
    is_listed = any(
        typing.get_origin(p) is tuple for p in parts_of(AlgorithmConfig.model_fields[key].annotation)
    )
    elsewhere = ELSEWHERE.get(slot.blocks[-1].__name__, {})
    problem: ValueError | None = None
    for name in sorted(recipe_names(), key=lambda recipe: _distance(recipe, key, outer)):
        method = merge(recipe_values(name), {key: [outer] if is_listed else outer} | elsewhere)
        try:
            values = values_of({"recipe": None} | method, directory)
            config = configured(values)
        except ValueError as error:
            problem = problem or error
            continue
        values["algorithm"] = config.algorithm.model_dump()
        path = (key, 0) if is_listed else (key,)
        return values, (*path, *slot.path[1:])
    raise AssertionError(f"no recipe goes with {slot.label}; with {FIRST[0]}: {problem}")
