"""Rewrites pydantic's errors in the user's terms: the key as in the file, and the name probably meant."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One line per error: `key: what is wrong (value)`, with the nearest known name for an unknown one.

    `root`: the model that was validated.
    """
    lines = []
    for item in error.errors():
        key, siblings = _locate(item["loc"], root)
        context, given = item.get("ctx", {}), item["input"]
        match item["type"]:
            case "extra_forbidden":
                lines.append(f"{key}: no such key; {_nearest(str(item['loc'][-1]), siblings)}")
            case "missing":
                lines.append(f"{key}: missing, and it has no default")
            case "union_tag_invalid":
                names = re.findall(r"'([^']+)'", context["expected_tags"])
                lines.append(f"{key}.name: there is no {context['tag']!r}; {_nearest(context['tag'], names)}")
            case "union_tag_not_found":
                lines.append(f"{key}.name: missing; it says which one is meant")
            case "model_type" | "model_attributes_type" | "dict_type":
                lines.append(f"{key}: expected settings as `key: value`, found {given!r}")
            case "tuple_type" | "list_type":
                lines.append(f"{key}: expected a list, as [a, b], found {given!r}")
            case _:
                message = item["msg"].removeprefix("Value error, ")
                shown = f" (given: {given!r})" if key and not isinstance(given, dict | BaseModel) else ""
                lines.append(f"{key}: {message}{shown}" if key else message)
    return "\n".join(lines)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"


def _locate(loc: Sequence[int | str], root: type[BaseModel]) -> tuple[str, list[str]]:
    """Returns the key in the file for a pydantic location, and the names that are known beside it."""
    sections = [root]
    beside, key = sections, []
    for part in loc:
        found = [section.model_fields[str(part)] for section in sections if part in section.model_fields]
        tagged = [s for s in sections if "name" in s.model_fields and s.model_fields["name"].default == part]
        if tagged and not found:
            sections = tagged  # pydantic adds a union's tag to the path; the file has no level for it
            continue
        key.append(str(part))
        beside = sections
        if not isinstance(part, int):
            sections = [section for field in found for section in _sections_in(field.annotation)]
    return ".".join(key), sorted({name for section in beside for name in section.model_fields})


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections inside an annotation such as `X | None`, `tuple[X, ...]` or a tagged union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections_in(part)]
