"""The settings that differ between two configurations of a run, and which of them change its mathematics.

Every section declares which of its keys change the results of a run (see `Section`). The blocks
of a method are fixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from megatron_gvpo.core.secrets import as_written
from megatron_gvpo.core.section import EVERY_KEY

_NAMED = 8  # changes that a message spells out
_LONGEST = 60  # characters of a value that a message shows
ABSENT: Any = object()  # the value of an entry that a mapping does not have


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs."""

    key: str
    old: Any
    new: Any
    fixed: bool  # the key changes the mathematics

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.old)} and is {_shown(self.new)}"


def changes(old: Mapping[str, Any], config: BaseModel) -> list[Change]:
    """The keys of `config` whose values differ from those of `old`, JSON values of its class, in file order.

    The old configuration may lack a key that a new version of the program has added: its value is then the
    default. One that a new version no longer has is not compared. In a mapping that users fill, such as a
    function's options, every entry that only one of the two has is a change.
    """
    every = list(_changes(config, old, as_written(config), "", False))
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
    owner: Any, old: Mapping[str, Any], new: Mapping[str, Any], above: str, free: bool
) -> Iterator[Change]:
    """`owner`: the part of the configuration that was written as `new`; a section's class declares its keys.

    The items of a list have their numbers as keys.
    """
    section = type(owner) if isinstance(owner, BaseModel) else None
    for name in {**new, **old}:
        if section is not None and name not in new:
            continue  # this version no longer has the key
        before = old[name] if name in old else _default(section, name)
        after = new.get(name, ABSENT)
        if before == after:
            continue
        key, is_free = f"{above}{name}", free or _is_free(section, name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changes(_part(owner, name), before, after, f"{key}.", is_free)
        elif _can_be_paired(before, after):
            pairs = _by_number(before), _by_number(after)
            yield from _changes(_part(owner, name), *pairs, f"{key}.", is_free)
        else:
            yield Change(key, before, after, not is_free)


def _part(owner: Any, name: str) -> Any:
    """The value of a key in a section, a list or a mapping; None in a text, such as a secret's."""
    if isinstance(owner, BaseModel):
        return getattr(owner, name)
    if isinstance(owner, list | tuple):
        return owner[int(name)]
    return owner.get(name) if isinstance(owner, Mapping) else None


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
    if section is None or section.model_fields[name].is_required():
        return ABSENT
    value = section.model_fields[name].get_default(call_default_factory=True)
    return json.loads(json.dumps(value, default=lambda inner: inner.model_dump(mode="json")))


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
