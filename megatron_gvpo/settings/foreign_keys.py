"""Keys of TRL, verl, slime and NeMo-RL: for each, our key of the same meaning, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

# These end a name that stands for all keys of a section: for those without an entry of their own, or for all.
_OTHERS, _ALL = ".*", ".**"


def answers(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields for a key, or for every key of the mapping that is its value, the key and its answer.

    Only keys of the table count: other names may be misspelt keys of our own.
    """
    for path in _leaves(key, value):
        if (answer := foreign(path)) is not None:
            yield path, answer


def foreign(key: str) -> str | None:
    """The name of another trainer's key here, or a note that it is not supported; None for other keys.

    `key`: a dotted path, as in the other trainer's configuration or in a section of ours. The entry with most
    parts counts; then one for all keys of a section, the last part alone, and one for a section's other keys.
    """
    parts = key.lower().lstrip("-").replace("-", "_").split(".")
    endings = [".".join(parts[start:]) for start in range(len(parts))]
    sections = [
        ".".join(parts[start:end]) for end in range(len(parts), 0, -1) for start in range(end)
    ]  # innermost keys first
    names = [*endings[:-1], *(name + _ALL for name in sections), endings[-1]]
    names += [name + _OTHERS for name in sections]
    table = _table()
    return next((table[name] for name in names if name in table), None)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


@cache
def _table() -> dict[str, str]:
    """The answer for each name of foreign_keys.yaml."""
    text = resources.files(__package__).joinpath("foreign_keys.yaml").read_text(encoding="utf-8")
    groups = yaml.safe_load(text)
    table = {name: f"here it is {key_here}" for key_here, names in groups["ours"].items() for name in names}
    refusals = groups["not_supported"].items()
    return table | {name: f"not supported: {why}" for why, names in refusals for name in names}
