"""All keys of a configuration with type, default and meaning: the reference page and `megatron-gvpo keys`.

Types and defaults come from the models, meanings from the comments beside the fields in the source.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.algorithms.catalog import _block_keys, _blocks, field_comments
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.explain import begins_a_word, foreign, foreign_about

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
    is_nullable = type(None) in typing.get_args(field.annotation)
    return " ".join([text, *_limits(field.metadata), *(["or null"] if is_nullable else [])])


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


def search(words: str) -> Iterator[str]:
    """Return a line for every key, also of other trainers, that has all words in its name, type or meaning.

    The options of a method's blocks are among them, as `algorithm.PLACE.OPTION [BLOCK]`. Without words, there
    is a line for every key. Of `--NAME=VALUE`, as another trainer's command line has it, the name counts.
    If no key of this package has the words, other trainers' keys with the words in their names follow.
    """
    words = words.partition("=")[0].strip().lstrip("-")
    wanted = [_spaced(re.sub(r"@\d+", "@k", word)) for word in words.lower().split()]
    is_ours = False
    for name, key, owner in _all_keys():
        text = _spaced(f"{name} {key.type} {key.meaning}".lower())
        if all(begins_a_word(word, text) for word in wanted):
            is_ours = True
            where = f" [{owner}]" if owner else ""
            yield f"{name}{where}: {key.type}; {key.default.strip('`')}. {key.meaning}".rstrip()
    if (answer := foreign(words.lower().replace("-", "_").replace(" ", "_"))) is not None:
        yield f"{words}, in another trainer: {answer}"
    elif not is_ours:
        for name, answer in foreign_about(wanted):
            yield f"{name}, in another trainer: {answer}"


def _spaced(text: str) -> str:
    """The text with spaces in place of hyphens and underscores: `wall-time` equals `wall_time`."""
    return re.sub("[-_]", " ", text)


def _all_keys() -> Iterator[tuple[str, Key, str]]:
    """(dotted name, key, the block that has it) of every key, blocks' options last."""
    for path, model in sections():
        for key in keys(model):
            yield f"{path}.{key.name}".lstrip("."), key, ""
    for path, kind in _block_keys().items():
        for block in _blocks(kind):
            for key in keys(block):
                if key.name != "name":
                    yield f"algorithm.{path}.{key.name}", key, _name(block)


def _name(block: type[Block]) -> str:
    named = block.model_fields.get("name")
    return named.default if named is not None and isinstance(named.default, str) else ""
