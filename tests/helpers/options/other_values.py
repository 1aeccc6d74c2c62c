"""The options of settings, from their types alone, and for each the other values that are worth a try."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_gvpo.algorithms.base import Block, Reference

HERE = "helpers.options.small_run"
# A user's function, by its arguments; `other_NAME` is another one.
FUNCTIONS = {
    ("prompt", "a", "b"): "better",
    ("a", "b"): "likeness",
    ("group",): "group_rewards",
    ("prompt",): "expected",
    ("groups", "n"): "teacher_texts",
    ("groups", "sampling"): "more_responses",
    ("rows",): "row_values",
    ("inputs",): "row_loss",
}
# Values of options without a default, and texts that name something of the small run, by the option's name.
EXAMPLES: dict[str, list[Any]] = {
    "items": [2],
    "separator_ids": [(6, 8, 10, 12)],
    "stratum": ["stratum", "format"],
    "constraints": [{"format": 0.5}, {"rubric": 0.9}],
    "outcome": ["right", "format"],
    "bonus": ["rubric", "stratum"],
    "stages": [(("right", 0.5), ("format", 0.5)), (("format", 0.5), ("right", 0.5))],
    "across": ["topic", "prompt"],
    "fields": [("hint_1", "hint_2"), ("hint",)],
    "name": [],
    "convert": [f"{HERE}:convert", f"{HERE}:other_convert"],
    "reference": [
        {"name": "ema", "decay": 0.5},
        {"name": "fixed"},
        {"name": "teacher"},
        {"name": "step_start"},
    ],
    "component": ["grade"],
    "divergence": [{"name": "forward", "reference": {"name": "fixed"}}],
    "betas": [(0.5, 0.95), (0.9, 0.5)],
    "chat_template_kwargs": [{"style": "s"}],
    "max_prompt_tokens": [14],
    "stop": [("a",), ("b", "c")],
    "path": [],
    "options": [{"factor": 2.0}, {"margin": 9}, {"word": "q"}],
    "weights": [{"right": 1.0, "format": 0.5}, {"rubric": 1.0}],
}
TEXTS = ["a", "rated", "format", "rubric", "hint", "hint_1", "topic", "rate", "solution", "prompt", "stratum"]
NUMBERS = [0.0, 0.01, 1.0, 0.15, 0.7, 6.0, 1000.0, -1.5]


class Option(NamedTuple):
    """An option of a section or block: where it is, whose it is, its value, and others."""

    path: tuple[str | int, ...]
    owner: type[BaseModel]
    name: str
    value: Any
    others: list[Any]

    @property
    def label(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


def options_of(section: BaseModel, above: tuple[str | int, ...] = ()) -> Iterator[Option]:
    """Every option of a section and of the sections inside it."""
    for name, field in type(section).model_fields.items():
        if name == "recipe" or (name == "name" and not _has_several_names(field)):
            continue  # it chooses the block itself
        value, path = getattr(section, name), (*above, name)
        yield Option(path, type(section), name, value, other_values(type(section), name, field, value))
        for i, inner in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(inner, BaseModel) and not isinstance(inner, Reference):
                yield from options_of(inner, path if i is None else (*path, i))


def _has_several_names(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is Literal and len(typing.get_args(field.annotation)) > 1


def other_values(owner: type[BaseModel], name: str, field: FieldInfo, value: Any) -> list[Any]:
    """Values of the option's type that differ from its value and lie within its bounds."""
    kind: Any = field.annotation
    if field.metadata:
        kind = typing.Annotated[(kind, *field.metadata)]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    distinct: list[Any] = []
    for candidate in candidates(owner, name, field.annotation, value):
        try:
            seen = adapter.validate_python(candidate, strict=None)
        except ValidationError:
            continue
        if seen != value and candidate not in distinct:
            distinct.append(candidate)
    return distinct


def candidates(owner: type[BaseModel], name: str, kind: Any, value: Any) -> Iterator[Any]:
    parts = list(parts_of(kind))
    if name == "function":
        arguments = getattr(owner, "arguments", ("rows",))
        function = FUNCTIONS[("groups", "n") if owner.__name__ == "LearnedHint" else tuple(arguments)]
        yield from (f"{HERE}:{function}", f"{HERE}:other_{function}")
    if types.NoneType in parts:
        yield None
    yield from EXAMPLES.get(name, ())
    for block in blocks_in(kind):
        if block is not Reference and name not in EXAMPLES:
            yield example(block)
    for part in parts:
        yield from _of_kind(part, value)


def _of_kind(kind: Any, value: Any) -> Iterator[Any]:
    """Candidates of one type; the caller leaves out those that the option does not take."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        yield from arguments
    elif kind is bool:
        yield from (True, False)
    elif kind is float:
        known = float(value) if isinstance(value, int | float) else 1.0
        yield from (known / 3, known * 4, *NUMBERS)
    elif kind is int:
        known = int(value) if isinstance(value, int) else 2
        yield from (known + 1, 1, 2 * known, known + 3, known - 1, 3, 0, 5)
    elif kind is str:
        yield from ([f"1{value}", f"{value}1"] if isinstance(value, str) else [])
        yield from TEXTS
    elif origin is tuple:
        yield from _tuples(arguments[0])


def _tuples(kind: Any) -> Iterator[Any]:
    parts = list(parts_of(kind))
    if any(typing.get_origin(part) is Literal for part in parts):
        words = [word for part in parts for word in typing.get_args(part)]
        yield from ((), *((word,) for word in words), tuple(words))
    elif int in parts:
        yield from ((), tuple(range(8, 91, 4)), tuple(range(9, 91, 4)), (13, 15, 17, 19, 21, 23))
    else:
        yield from ((), *((text,) for text in TEXTS))


def parts_of(kind: Any) -> Iterator[Any]:
    """The types in a union, without annotations."""
    if isinstance(kind, typing.TypeAliasType):
        yield from parts_of(kind.__value__)
    elif typing.get_origin(kind) is typing.Annotated:
        yield from parts_of(typing.get_args(kind)[0])
    elif isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        for part in typing.get_args(kind):
            yield from parts_of(part)
    else:
        yield kind


def blocks_in(kind: Any) -> Iterator[type[Block]]:
    """The blocks that an option of this type may hold."""
    for part in parts_of(kind):
        if isinstance(part, type) and issubclass(part, Block):
            yield part
        elif typing.get_origin(part) is tuple:
            yield from blocks_in(typing.get_args(part)[0])


def example(block: type[Block]) -> dict[str, Any]:
    """The shortest settings of a block."""
    values: dict[str, Any] = {}
    for name, field in block.model_fields.items():
        if name == "name":
            if isinstance(field.default, str):
                values[name] = field.default
            elif field.is_required():
                values[name] = next(candidates(block, name, field.annotation, None))
        elif field.is_required():
            values[name] = next(candidates(block, name, field.annotation, None))
    return values | EXTRA.get(block.__name__, {})


# Settings without which a block does not work, beside its required options.
EXTRA: dict[str, dict[str, Any]] = {
    "Hinted": {"fields": ("hint_1", "hint_2")},
    "ComponentEstimator": {"weights": {"right": 1.0, "format": 0.5}},
    "CustomLoss": {"reads": ("advantage", "ref")},
    "Skills": {"after_step": 0, "gate": 0.6, "n": 2},
    "Reference": {"name": "ema", "decay": 0.9},
    "RoleEstimator": {
        "open_ids": tuple(range(6, 91, 4)),
        "close_ids": tuple(range(7, 91, 4)),
        "local": "rubric",
    },
    "ConfidenceEstimator": {"marker_ids": (6, 7, 8, 9, 10)},
    "LengthCurriculum": {"every": 1, "start": 6.0},
    "ShortRight": {"top": 0.5},
}


def changed(values: Mapping[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Nested settings with another value at a path."""
    first, *rest = path
    if not rest:
        return {**values, first: value}  # type: ignore[dict-item]
    inner: Any = values[first]  # type: ignore[index]
    if isinstance(inner, list | tuple):
        at, *further = rest
        items = list(inner)
        items[int(at)] = changed(items[int(at)], tuple(further), value) if further else value
        return {**values, first: items}  # type: ignore[dict-item]
    return {**values, first: changed(inner, tuple(rest), value)}  # type: ignore[dict-item]
