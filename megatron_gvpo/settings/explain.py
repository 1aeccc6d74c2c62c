"""Rewrites pydantic's errors in the user's terms: the key as in the file, and the nearest known name.

Keys of TRL, verl, slime and NeMo-RL are known, too. The answer is this package's key of the same meaning, or
the reason for which there is none.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import typing
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megatron_gvpo.core.plain_values import cut
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.secrets import without_secret

MOST, LONGEST = 40, 400  # the most errors, and the most characters of each
_NUMBER = re.compile(r"[-+]?(0|[1-9]\d{0,20})?(\.\d{0,20})?([eE][-+]?\d{1,3})?")
_ALTERNATIVES = ("str", "int", "constrained-int")  # parts of a union in the locations of pydantic's errors
MOST_ELSEWHERE, DEEPEST = 3, 3  # most places of a key that are proposed, and most sections above it
_MOST = 10  # names of other trainers' keys in one answer


class _Brief(reprlib.Repr):
    """Writes values in Python's notation, shortened and without secrets."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(hide(x), level)


_BRIEF = _Brief(maxstring=100, maxother=100, maxlong=40, maxlevel=3, maxdict=6, maxlist=10)


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One line per error: `key: problem (value)`; for an unknown key, the nearest known one.

    The first of many errors are shown, and the beginning of long values.

    `root`: the model that was validated.
    """
    lines: list[str] = []
    for item in error.errors():
        key, siblings, owners = _locate(item["loc"], root)
        key = cut(key)
        context, value = item.get("ctx", {}), item["input"]
        match item["type"]:
            case "extra_forbidden" if owners:
                lines.append(f"{key}: no such key; it goes with name={' or '.join(owners)}")
            case "extra_forbidden" if answers := _of_other_trainers(key, value, siblings):
                lines += [f"{cut(name)}: no such key; {answer}" for name, answer in answers]
            case "extra_forbidden" if elsewhere := _elsewhere(str(item["loc"][-1]), value, root):
                lines.append(f"{key}: no such key; did you mean {elsewhere}?")
            case "extra_forbidden":
                lines.append(f"{key}: no such key; {_nearest(str(item['loc'][-1]), siblings, key)}")
            case "missing":
                lines.append(f"{key}: missing, and it has no default")
            case "union_tag_invalid":
                names = re.findall(r"'([^']+)'", context["expected_tags"])
                lines.append(f"{key}.name: there is no {context['tag']!r}; {_nearest(context['tag'], names)}")
            case "union_tag_not_found":
                lines.append(f"{key}.name: missing; it says which one is meant")
            case "model_type" | "model_attributes_type" | "dict_type":
                instead = _instead(item["loc"], value, root)
                lines.append(f"{key}: expected settings as `key: value`, found {_shown(value)}{instead}")
            case "invalid_key":
                lines.append(f"{key}: a key is text; is there a comma in a number, in place of a point?")
            case "string_type" if isinstance(value, Mapping):
                colon = "YAML reads a colon and a space as a key and its value"
                lines.append(
                    f"{key}: expected a text, found {_shown(value)}; {colon}: put the text in quotes, on a "
                    f"command line as '{key}=\"TEXT\"'"
                )
            case "tuple_type" | "list_type":
                lines.append(_not_a_list(key, value))
            case "int_type" | "float_type" if isinstance(value, str) and (odd := _not_ascii(value)):
                lines.append(f"{key}: expected a number, and {odd} (given: {_shown(value)})")
            case "int_type" | "float_type" if isinstance(value, str) and value and _NUMBER.fullmatch(value):
                lines.append(f"{key}: expected a number, found text: write it without quotes ({value!r})")
            case _:
                message = item["msg"].removeprefix("Value error, ")
                simple = key and not isinstance(value, dict | BaseModel)
                shown = f" (given: {_shown(value)})" if simple else ""
                if key and lines and lines[-1].startswith(f"{key}: "):  # the next alternative of a union
                    message = f"{lines.pop().removeprefix(f'{key}: ').removesuffix(shown)}, or {message}"
                lines.append(f"{key}: {message}{shown}" if key else message)
    lines = [hide(line) for line in lines]
    lines = [line if len(line) <= LONGEST else line[: LONGEST - 3] + "..." for line in lines]
    more = [f"and {len(lines) - MOST} more errors"] if len(lines) > MOST else []
    return "\n".join(lines[:MOST] + more)


def _shown(value: Any) -> str:
    """A value in Python's notation (None as null), or its variable's name; the beginning of a long value."""
    if value is None:
        return "null"
    if isinstance(value, str):
        value = without_secret(value)
    try:
        return _BRIEF.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a very large number"


def _of_other_trainers(key: str, value: Any, siblings: Sequence[str]) -> list[tuple[str, str]]:
    """The answers for keys of another trainer; none for a misspelt section of this package."""
    name = key.rpartition(".")[2]
    if _not_ascii(name):  # the name looks like another key, perhaps like one of this package
        return []
    if isinstance(value, Mapping) and difflib.get_close_matches(name, siblings, 1, 0.9):
        return []
    return [pair for pair in answers(key, value) if pair[1].partition(",")[0] != f"here it is {pair[0]}"]


def _nearest(name: str, known: Sequence[str], key: str = "") -> str:
    """The known name that is meant, in the section of `key`; all known names where none is near."""
    if odd := _not_ascii(name):
        return f"{odd}, and keys are ASCII letters"
    near = difflib.get_close_matches(name, known, 1, 0.6)
    section = key[: -len(name)] if key.endswith(f".{name}") else ""
    return f"did you mean '{section}{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"


def _elsewhere(name: str, value: Any, root: type[BaseModel]) -> str:
    """The keys of this name in other sections, those nearest to the root; empty for none, and for many.

    Only a mapping belongs to a key that is a section.
    """
    level: list[tuple[str, type[BaseModel]]] = [("", root)]
    while level:
        inner = [
            (f"{path}{field}.", section)
            for path, model in level
            for field, info in model.model_fields.items()
            for section in _sections_in(info.annotation)
        ]
        same = {
            f"'{path}{name}'"
            for path, model in inner
            if (field := model.model_fields.get(name)) is not None
            and bool(_sections_in(field.annotation)) == isinstance(value, Mapping)
        }
        if same:
            return " or ".join(sorted(same)) if len(same) <= MOST_ELSEWHERE else ""
        level = [(path, section) for path, section in inner if path.count(".") < DEEPEST]
    return ""


def _not_a_list(key: str, value: Any) -> str:
    """The error for a value in place of a list. `key.1=x` changes item 1, if the files' list has it."""
    if isinstance(value, Mapping) and value and all(re.fullmatch(r"[0-9]+", str(part)) for part in value):
        return (
            f"{key}.{next(iter(value))}: the list has no such item to change (items are numbered from 0); "
            f"to add one, give the whole list, as {key}=[a, b]"
        )
    return f"{key}: expected a list, as [a, b], found {_shown(value)}"


def _not_ascii(text: str) -> str:
    """Names the first character of a text that is not ASCII, which may look like one; empty without any."""
    odd = next((character for character in text if not character.isascii()), None)
    name = "" if odd is None else unicodedata.name(odd, "no name")
    return "" if odd is None else f"{odd!r} in it is U+{ord(odd):04X} ({name})"


def _locate(loc: Sequence[int | str], root: type[BaseModel]) -> tuple[str, list[str], list[str]]:
    """Returns the key in the file for a pydantic location, and the names that are known beside it.

    For a key of another block, also the names of the blocks that have it and could be given instead.
    """
    sections = [root]
    beside, key = sections, []
    choice: list[type[BaseModel]] = []
    owners: list[type[BaseModel]] = []
    for part in loc:
        fields = [section.model_fields[str(part)] for section in sections if part in section.model_fields]
        tagged = [s for s in sections if "name" in s.model_fields and s.model_fields["name"].default == part]
        # pydantic adds a union's tag to the path, which may be the name of an option of another block, too
        if tagged and (not fields or len(sections) > 1):
            choice = sections
            sections = tagged  # the file has no level for it
            continue
        if not sections and part in _ALTERNATIVES:
            continue  # an alternative of a union: the file has no level for it either
        key.append(str(part))
        owners = [section for section in choice if part in section.model_fields]
        beside, choice = sections, []
        if not isinstance(part, int):
            sections = [section for field in fields for section in _sections_in(field.annotation)]
    known = sorted({name for section in beside for name in section.model_fields})
    return ".".join(key), known, sorted(section.model_fields["name"].default for section in owners)


# The keys that switch off a section, for users who write `eval: false`.
_OFF = {
    "eval": "to evaluate nothing, leave data.eval out (data.eval=null)",
    "checkpoint": "a run always ends with a checkpoint; checkpoint.export_hf=false leaves out the export",
    "logging.rollouts": "logging.rollouts.every=0 saves none",
    "logging.steps": "logging.steps.max_gb=0 writes none",
}
_OFF_WORDS: list[Any] = [False, None, "none", "None", "off", "no", "false", "False"]


def _instead(loc: Sequence[int | str], value: Any, root: type[BaseModel]) -> str:
    """The end of the error for a value in place of a section: a right form."""
    sections, annotations = [root], []
    for part in loc:
        fields = [section.model_fields[str(part)] for section in sections if part in section.model_fields]
        annotations = [field.annotation for field in fields]
        sections = [section for annotation in annotations for section in _sections_in(annotation)]
    key = ".".join(map(str, loc))
    if len(sections) != 1 or not key:
        return ""
    if value in _OFF_WORDS:
        can_be_null = any(type(None) in typing.get_args(annotation) for annotation in annotations)
        default = f"for none write {key}=null" if can_be_null else "leave it out for the defaults"
        return f"; {_OFF.get(key, default)}"
    if isinstance(value, str) and (inner := _only_text(sections[0])):
        return f"; did you mean {key}.{inner}={cut(hide(value))}?"
    return f"; its keys: {', '.join(sorted(sections[0].model_fields))}"


def _only_text(section: type[BaseModel]) -> str | None:
    """The dotted name of the one field that a section needs, if that is a text."""
    required = [name for name, field in section.model_fields.items() if field.is_required()]
    if len(required) != 1:
        return None
    [name] = required
    annotation = section.model_fields[name].annotation
    if annotation is str:
        return name
    inner = [_only_text(section) for section in _sections_in(annotation)]
    return f"{name}.{inner[0]}" if len(inner) == 1 and inner[0] else None


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections inside an annotation such as `X | None`, `tuple[X, ...]` or a tagged union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections_in(part)]


# Suffixes of names that stand for keys of a section: those without an entry of their own, or all.
_OTHERS, _ALL = ".*", ".**"


def answers(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields for a key, or for every key of the mapping that is its value, the key and its answer.

    Only keys of the table count, because other names may be misspelt keys of this package.
    """
    for path in _leaves(key, value):
        if (answer := foreign(path)) is not None:
            yield path, answer


def foreign(key: str) -> str | None:
    """The name of another trainer's key here, or a note that it is not supported; None for other keys.

    `key`: a dotted path, as in the other trainer's configuration or in a section of this package. The entry
    with most parts counts; then one for all keys of a section, the last part alone, and one for a section's
    other keys.
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


def begins_a_word(word: str, text: str) -> bool:
    """True if a word of the text begins with `beginning`: `rope` is not in `properly`."""
    return re.search(rf"(?<![^\W_]){re.escape(word)}", text) is not None


def foreign_about(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, answer) for at most _MOST names of other trainers' keys that have all words in them."""
    table = _table()
    names = (name for name in table if not name.endswith((_OTHERS, _ALL)))
    matches = (n for n in names if all(begins_a_word(word, n.replace("_", " ")) for word in words))
    yield from ((name, table[name]) for name in islice(matches, _MOST))


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
