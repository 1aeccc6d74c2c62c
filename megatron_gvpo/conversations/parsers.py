r"""How a policy writes tool calls in a turn, by the name of the format.

    hermes  <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>, as often as wanted
    json    the whole turn, or one ```json block in it: {"name": ..., "arguments": {...}}, or a list of these
    xml     <function=add><parameter=a>1</parameter></function>, values as JSON or else as text

Parsers read the decoded text of a turn; tokens are never made from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FENCE = re.compile(r"```json\s*(.*?)```", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>(.*?)</parameter>", re.DOTALL)


class Call(NamedTuple):
    """A call of a tool; `problem` says why it cannot be understood."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def hermes(text: str) -> list[Call]:
    """The calls in <tool_call> tags."""
    calls = [_call(part) for part in _HERMES.findall(text)]
    if not calls and "<tool_call>" in text:
        return [Call("", {}, "a <tool_call> has no </tool_call>")]
    return calls


def json_calls(text: str) -> list[Call]:
    """The call, or the list of calls, that is the whole text or a block of it."""
    fenced = _FENCE.search(text)
    body = (fenced[1] if fenced else text).strip()
    if not body.startswith(("{", "[")):
        return []
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [Call("", {}, f"the call is no JSON: {error}")]
    return [_call_of(value) for value in (values if isinstance(values, list) else [values])]


def xml(text: str) -> list[Call]:
    """The calls in <function=...> tags."""
    calls = [
        Call(name, {key: _value(value) for key, value in _PARAMETER.findall(body)})
        for name, body in _FUNCTION.findall(text)
    ]
    if not calls and "<function=" in text:
        return [Call("", {}, "a <function=...> has no </function>")]
    return calls


PARSERS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes, "json": json_calls, "xml": xml}


def _call(body: str) -> Call:
    try:
        return _call_of(json.loads(body))
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is no JSON: {error}")


def _call_of(value: Any) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", {}) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call("", {}, 'a call is {"name": "...", "arguments": {...}}')
    return Call(name, arguments)


def _value(text: str) -> Any:
    text = text.strip("\n")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
