"""The settings that differ between two configurations of a run, and which of them change its mathematics.

Every section declares which of its keys change the results of a run (see `Section`). The blocks
of a method are fixed.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from megatron_gvpo.core.section import EVERY_KEY

_NAMED = 8  # changes that a message spells out
_LONGEST = 60  # characters of a value that a message shows


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs."""

    key: str
    old: Any
    new: Any
    fixed: bool  # the key changes the mathematics

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.old)} and is {_shown(self.new)}"


def changes(root: type[BaseModel], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys whose values differ in two configurations, as JSON values of the model `root`, in file order.

    The old configuration may lack a key that a new version of the program has added; its value is then the
    default.
    """
    every = list(_changes(root, old, new, "", False))
    method = [change for change in every if change.key.startswith("algorithm.")]
    recipe = next((change for change in method if change.key == "algorithm.recipe"), None)
    if recipe is None:
        return every
    # Another recipe changes many blocks, so only its name is listed. The same blocks by another name are not
    # a change.
    rest = [change for change in every if change not in method]
    return [*rest, Change("algorithm.recipe", recipe.old, recipe.new, fixed=len(method) > 1)]


def listed(differences: Sequence[Change]) -> str:
    """The changes in one line."""
    more = f"; and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    return "; ".join(str(change) for change in differences[:_NAMED]) + more


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """True if `allowed` names the key, or a section that it is in."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def known_keys(values: Any, at: str = "") -> Iterator[str]:
    """The dotted keys of nested values, sections included."""
    if at:
        yield at
    if isinstance(values, Mapping | list):
        items = values.items() if isinstance(values, Mapping) else enumerate(values)
        for key, value in items:
            yield from known_keys(value, f"{at}.{key}" if at else str(key))


def _changes(
    section: type[BaseModel] | None,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    above: str,
    free: bool,
    each: type[BaseModel] | None = None,
) -> Iterator[Change]:
    """`section`: the class that declares the keys; None for a mapping that no class describes.

    `each`: the class of a list's items, where the keys are their numbers.
    """
    fields = {} if section is None else section.model_fields
    for name in [*fields, *(name for name in {**old, **new} if name not in fields)]:
        if name not in new:
            continue  # this version no longer has the key
        before = old[name] if name in old else _default(section, name)
        if before == new[name]:
            continue
        key, is_free = f"{above}{name}", free or _is_free(section, name)
        inner = each if name not in fields else _section_in(fields[name].annotation)
        if isinstance(before, Mapping) and isinstance(new[name], Mapping):
            yield from _changes(inner, before, new[name], f"{key}.", is_free)
        elif _can_be_paired(before, new[name]):
            of_each = None if name not in fields else _section_of_each(fields[name].annotation)
            pairs = _by_number(before), _by_number(new[name])
            yield from _changes(None, *pairs, f"{key}.", is_free, each=of_each)
        else:
            yield Change(key, before, new[name], not is_free)


def _can_be_paired(before: Any, after: Any) -> bool:
    """True for two lists of one length in which there are mappings: each item is compared with the other."""
    are_lists = isinstance(before, list) and isinstance(after, list) and len(before) == len(after)
    return are_lists and any(isinstance(value, Mapping) for value in (*before, *after))


def _by_number(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


def _is_free(section: type[BaseModel] | None, name: str) -> bool:
    free: tuple[str, ...] = getattr(section, "free_keys", ())
    return name in free or free == EVERY_KEY


def _default(section: type[BaseModel] | None, name: str) -> Any:
    if section is None or name not in section.model_fields or section.model_fields[name].is_required():
        return None
    value = section.model_fields[name].get_default(call_default_factory=True)
    return json.loads(json.dumps(value, default=lambda inner: inner.model_dump(mode="json")))


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The one section that an annotation such as `X | None` names; None for a choice, or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    return _section_in(parts[0]) if len(parts) == 1 and typing.get_origin(annotation) is not tuple else None


def _section_of_each(annotation: Any) -> type[BaseModel] | None:
    """The one section that an annotation such as `tuple[X, ...]` names; None for any other."""
    parts = typing.get_args(annotation)
    return _section_in(parts[0]) if typing.get_origin(annotation) is tuple else None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
