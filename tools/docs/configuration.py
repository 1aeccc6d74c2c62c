"""The configuration reference: every section and key, with type, default and meaning.

Types and defaults come from the models, meanings from the comments beside the fields in the source.
"""

from __future__ import annotations

import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.algorithms.field_comments import field_comments
from megatron_gvpo.settings.config import Config

_LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


class Key(NamedTuple):
    name: str
    type: str
    default: str
    meaning: str


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, model) of the top level and of every section below it, in the order of the source."""
    yield from _sections("", Config)


def _sections(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            many = "[]" if _is_list(field.annotation) else ""
            yield from _sections(f"{path}.{name}{many}".lstrip("."), inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names; the blocks of a method have their own page."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not issubclass(annotation, Block) or annotation.__name__ == "AlgorithmConfig":
            yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _models(part)


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple


def keys(model: type[BaseModel]) -> Iterator[Key]:
    """The keys of one section, subsections left out."""
    meanings = field_comments(model)
    for name, field in model.model_fields.items():
        if any(_models(field.annotation)):
            continue
        yield Key(name, type_name(field), default(field), meanings.get(name, ""))


def type_name(field: FieldInfo) -> str:
    """A field's type in words, with its limits."""
    text = _type(field.annotation)
    nullable = type(None) in typing.get_args(field.annotation)
    return " ".join([text, *_limits(field.metadata), *(["or null"] if nullable else [])])


def _limits(metadata: Any) -> list[str]:
    return [
        f"{sign} {getattr(item, name)}"
        for item in metadata
        for name, sign in _LIMITS.items()
        if getattr(item, name, None) is not None
    ]


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    simple = {str: "text", bool: "true or false", int: "integer", float: "number"}
    if annotation in simple:
        return simple[annotation]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin is typing.Annotated:
        return " ".join([_type(args[0]), *_limits(args[1:])])
    if origin in (typing.Union, types.UnionType):
        words = [_type(part) for part in args if part is not type(None)]
        return " or ".join(dict.fromkeys(words))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"list of {_plural(_type(args[0]))}"
        return f"list of {len(args)} {_plural(_type(args[0]))}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "block"
    raise TypeError(f"no words for the type {annotation}")


def _plural(words: str) -> str:
    """`integer > 0` becomes `integers > 0`; a list of choices stays as it is."""
    first, space, rest = words.partition(" ")
    return words if first.startswith("`") or first == "text" else f"{first}s{space}{rest}"


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, tuple):
        value = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in value]
    return f"`{json.dumps(value)}`"


def page() -> str:
    parts = [_HEAD]
    seen: dict[type[BaseModel], str] = {}
    for path, model in sections():
        if path:
            parts.append(f"## `{path}`")
        if model in seen:
            parts.append(f"The keys of `{seen[model]}`.")
            continue
        seen[model] = path
        if "__doc__" in model.__dict__ and model.__doc__ and path:
            parts.append(_paragraphs(inspect.getdoc(model) or ""))
        rows = [
            f"| `{k.name}` | {_cell(k.type)} | {_cell(k.default)} | {_cell(k.meaning)} |" for k in keys(model)
        ]
        if rows:
            parts.append("\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _paragraphs(doc: str) -> str:
    """A docstring as Markdown: its indented lines are YAML."""
    out: list[str] = []
    for block in doc.split("\n\n"):
        if block.startswith("    "):
            out.append(f"```yaml\n{textwrap.dedent(block)}\n```")
        else:
            out.append(block)
    return "\n\n".join(out)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_HEAD = """# Configuration

Every section and key, generated from `megatron_gvpo/settings/` and `megatron_gvpo/algorithms/config.py`.

A configuration is one or more YAML files. Later files win, key by key; `key.sub=value` arguments on the
command line win over all files. A key that does not exist is an error that names the nearest one. `required`
keys have no default. The options of a method's blocks are on the page [Recipes](recipes.md).

`1e-5`, `1_000` and `0x10` are numbers; `010`, `1:30`, `true` and anything in quotes are not. A number
without a stated bound must lie between -2147483647 and 2147483647 (integers) or between -1e12 and 1e12."""
