"""Tools that a record of the data has for its own prompt: the schemas that the chat template shows."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.messages import shown_value
from megatron_gvpo.data.sources import Record

_USUAL = "tools"  # the name of the field in most data sets
_WANTED = (
    'a list of JSON schemas like {"type": "function", "function": {"name": "...", ...}}, or its JSON text'
)


def tools_of(record: Record, key: str) -> list[dict[str, Any]] | None:
    """The schemas in a record's field; None for a record without any. Raises DataError for another value."""
    value = record.fields.get(key)
    if (tools := _schemas(value)) is None:
        problem = f"field {key!r} (tools_key) is {shown_value(value)}: expected {_WANTED}"
        raise DataError(f"{record.where}: {problem}")
    return tools or None


def unread_tools(record: Record) -> str | None:
    """A warning about tools of a record that no key names; None for a record without any."""
    if not _schemas(record.fields.get(_USUAL)):
        return None
    return (
        f"{record.where}: the record has {_USUAL}, which no key names, so the chat template does not show "
        f"them: set tools_key={_USUAL} beside the file's path, unless the messages describe them"
    )


def _schemas(value: Any) -> list[dict[str, Any]] | None:
    """The list of schemas that the value is, or spells; None for anything else."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    is_list = isinstance(value, list) and all(isinstance(schema, dict) for schema in value)
    return value if is_list else None
