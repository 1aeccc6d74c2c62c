"""Reads YAML as people write it: 1e-5 is a number; `off`, 010, 0x1, 1:30 are words; no key comes twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.plain_values import check_plain

LARGEST_FILE = 2**20  # bytes of a configuration
_MOST_KEYS = 100_000  # keys of all mappings; those that `<<` merges count each time
# Kinds of files that users give by mistake in place of a configuration, by suffix.
_OTHER_FILES = {
    ".py": "Python",
    ".ipynb": "a notebook",
    ".sh": "a shell script",
    ".toml": "TOML",
    ".ini": "an INI file",
    ".jsonl": "data, which data.train.path names",
    ".parquet": "data, which data.train.path names",
    ".safetensors": "weights, whose directory model.path names",
}


class Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader with other rules for words.

    SafeLoader reads YAML 1.1, where 1e-5 is a string, `off` is a boolean, 2026-01-31 is a date, 010 is 8,
    0x1 is 1 and 1:30 is 90.
    """

    _keys = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse mappings that merge each other until they exceed the memory."""
        super().flatten_mapping(node)
        self._keys += len(node.value)
        if self._keys > _MOST_KEYS:
            problem = f"mappings merged by << have more than {_MOST_KEYS:,} keys"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that is given twice; a key that `<<` merges later may come again."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # the loader's own error refuses such a key
            if key_node.value in seen:
                problem = f"key {key_node.value!r} given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return node


# For a field of type bool, pydantic still understands yes, no, on and off.
_OTHERS = (":bool", ":timestamp", ":int", ":float")
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in of_first if not tag.endswith(_OTHERS)]
    for first, of_first in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][\d_]*)$")
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
            raise ConfigError(f"{file}: {_not_a_file(file)}")
        if (kind := _OTHER_FILES.get(file.suffix)) is not None:
            raise ConfigError(f"{file}: it is {kind}; a configuration is a YAML file, such as run.yaml")
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{file}: longer than 1 MiB, the limit for a configuration")
        values = _parse(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except _NotYamlError as error:
        raise ConfigError(f"{file}{error}") from None
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{file}: expected `section: {{key: value}}`, found {kind}")
    if "model_type" in values and "model" not in values:
        raise ConfigError(
            f"{file}: it describes a model, whose directory model.path names; a configuration is a YAML "
            "file, such as run.yaml"
        )
    try:
        check_plain(values, finite=False)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    return values


def _not_a_file(file: Path) -> str:
    if file.is_dir():
        return "it is a directory, not a configuration file"
    if file.exists():
        return "it is a pipe or a device, not a configuration file"
    if str(file) == "auto":
        return "no such configuration file; --resume=auto is one word"
    if str(file)[:1] in "\u2010\u2011\u2012\u2013\u2014\u2212":
        return f"no such configuration file; {str(file)[0]!r} is not the hyphen with which options begin: --"
    if str(file).endswith(":"):
        return f"no such configuration file; a value is given as {str(file)[:-1]}=VALUE, without spaces"
    if re.fullmatch(r"\w+(\.\w+)*", str(file)) and file.suffix not in (".yaml", ".yml"):
        return f"no such configuration file; a value is given without spaces, as {file}=VALUE"
    return "no such configuration file"


def parse_value(text: str) -> Any:
    """A value as in a file; the text itself if it is not YAML. Raises ValueError as check_plain does.

    In a value of one line, `#` begins no comment: on a command line it belongs to the value.
    """
    try:
        value = text if _ends_in_comment(text) else _parse(text)
    except _NotYamlError:
        value = text
    if isinstance(value, str) and "\n" in text and text.lstrip()[:1] not in ('"', "'", "|", ">"):
        value = text  # YAML would join the lines by spaces
    check_plain(value, finite=False)
    return value


def _ends_in_comment(text: str) -> bool:
    """True if YAML would leave out the end of a line, or all of it, as a comment."""
    if "#" not in text or "\n" in text.strip():
        return False
    try:
        ends = [token.end_mark.index for token in yaml.scan(text, Loader) if _has_text(token)]
    except yaml.YAMLError:
        return False
    return bool(text[max(ends, default=0) :].strip())


def _has_text(token: yaml.Token) -> bool:
    return bool(token.start_mark.index < token.end_mark.index)


class _NotYamlError(Exception):
    """The text is not YAML. The message begins with the line, if known, and continues a sentence."""


def _parse(text: bytes | str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = error.problem or error.context
        if problem == "found unhashable key":
            problem = "braces in place of a key; a placeholder such as {{ name }} must be filled in first"
        raise _NotYamlError(f"{line}: not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        raise _NotYamlError(f": not valid YAML: {error.reason} at byte {error.position + 1}") from None
    except RecursionError:
        raise _NotYamlError(": not valid YAML: nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # The text has a word like a number (0x_), or a tag that does not fit its value (`!!int ""`).
        raise _NotYamlError(f": not valid YAML: {error}") from None
