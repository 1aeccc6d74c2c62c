"""Reads YAML as people write it: 1e-5 is a number, `off`, 010 and 1:30 are words, no key comes twice."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.core.errors import ConfigError

LARGEST_FILE = 2**20  # bytes of a configuration


class Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader with other rules for words.

    SafeLoader reads YAML 1.1, where 1e-5 is a string, `off` is a boolean, 2026-01-31 is a date, 010 is 8 and
    1:30 is 90.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # the loader's own error refuses such a key
            if key_node.value in seen:
                problem = f"key {key_node.value!r} given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# For a field of type bool, pydantic still understands yes, no, on and off.
_OTHERS = (":bool", ":timestamp", ":int", ":float")
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in of_first if not tag.endswith(_OTHERS)]
    for first, of_first in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_yaml(file: Path) -> dict[str, Any]:
    """A configuration file's settings. Raises ConfigError, which names the file and the line."""
    try:
        if not file.is_file():
            raise ConfigError(f"{file}: no such configuration file")
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{file}: longer than 1 MiB, which no configuration is")
        values = _parse(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except _NotYamlError as error:
        raise ConfigError(f"{file}{error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected `section: {{key: value}}`, found {type(values).__name__}")
    try:
        check_plain(values, finite=False)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    return values


def parse_value(text: str) -> Any:
    """A value as in a file; the text itself if it is not YAML. Raises ValueError as check_plain does."""
    try:
        value = _parse(text)
    except _NotYamlError:
        value = text
    check_plain(value, finite=False)
    return value


class _NotYamlError(Exception):
    """Not YAML. The message begins with the line, where it is known, and continues a sentence."""


def _parse(text: bytes | str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise _NotYamlError(f"{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise _NotYamlError(f": not valid YAML: {error.reason} at byte {error.position + 1}") from None
    except RecursionError:
        raise _NotYamlError(": not valid YAML: nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # A word like a number, such as 0x_, or a tag that does not fit its value, such as `!!int ""`.
        raise _NotYamlError(f": not valid YAML: {error}") from None


# Checks that settings are plain values: text, numbers, booleans, null, lists and mappings of these.

DEPTH = 50  # levels of lists and mappings
COUNT = 100_000  # values, each counted as often as aliases repeat it


def check_plain(values: Any, finite: bool = True) -> None:
    """Raises ValueError, which begins with the key, for a value that no configuration can have.

    These are values that JSON has no form for, text that no file name or UTF-8 file can hold, and lists and
    mappings that are too deep or too many to be meant: YAML's aliases can repeat or contain themselves.
    `finite`: refuse infinite numbers and NaN, too.
    """
    todo: list[Iterator[tuple[str, Any]]] = [iter([("", values)])]
    count = 0
    while todo:
        for key, value in todo[-1]:
            count += 1
            if count > COUNT:
                raise ValueError(f"{cut(key)}: more than {COUNT} values with those that aliases repeat")
            problem = _problem(value)
            if finite and isinstance(value, float) and not math.isfinite(value):
                problem = f"expected a finite number, found {value}"
            if problem is not None:
                raise ValueError(f"{cut(key)}: {problem}" if key else problem)
            if isinstance(value, Mapping | list | tuple):
                if len(todo) > DEPTH:
                    raise ValueError(f"{cut(key)}: nested deeper than {DEPTH} levels")
                todo.append(_inside(key, value))
                break
        else:
            todo.pop()


def _inside(key: str, value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    named = value.items() if isinstance(value, Mapping) else enumerate(value)
    return ((f"{key}.{name}" if key else str(name), item) for name, item in named)


def _problem(value: Any) -> str | None:
    if isinstance(value, str):
        if "\0" in value:
            return "the text has a NUL character"
        if not _is_utf8(value):
            return "the text is not UTF-8"
    elif isinstance(value, int):
        if abs(value) >= 2**63:
            return "more than 64 bits for one number"
    elif isinstance(value, bytes | bytearray | set | frozenset):
        return f"expected text, a number, a list or a mapping, found {type(value).__name__}"
    elif isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str | int | float | None) or _problem(name) is not None:
                return f"expected keys that are plain text, found {cut(repr(name))}"
    return None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def cut(text: str) -> str:
    """The text, or the beginning of a long one, for a message."""
    return text if len(text) <= 100 else text[:97] + "..."


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that comes twice: json.loads would take the last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"field {next(key for key in counts if counts[key] > 1)!r} is given twice")
    return fields
