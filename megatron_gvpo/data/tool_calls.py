r"""Formats in which a policy writes tool calls in a turn, by name.

    hermes  <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>, as often as wanted
    json    the whole turn, or one ```json block in it: {"name": ..., "arguments": {...}}, or a list of these;
            "parameters" is read like "arguments", as Llama 3 writes it, and in hermes, too
    xml     <function=add><parameter=a>1</parameter></function>, values as JSON or else as text

or in the format of a user's function, which takes the text and returns a list of calls: (name, arguments).
Parsers read the decoded text of a turn; tokens are never made from it. Calls are read only after the turn's
thinking part, as in inference servers: a call inside it is not made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from megatron_gvpo.core.user_functions import UserFunctionError, load_function, refused

_TOOL_CALL = re.compile(r"<tool_call>")
_FENCE = re.compile(r"```json\s*(.*?)```", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>")
_ID = re.compile(r"[0-9A-Za-z]{9}")  # the form of ids that Mistral's models write, and its templates demand


Parser = Callable[[str], "list[ToolCall]"]


_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of messages


class ToolCall(NamedTuple):
    """A call of a tool; `problem`: why it cannot be understood; `id`: its id in the policy's text."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    id: str | None = None


def thoughts(message: Mapping[str, Any]) -> str:
    """The thinking that a message of data or of an inference server has beside its content, or ""."""
    texts = (message.get(name) for name in _THOUGHTS)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def with_values(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as values, where they are an object as JSON text.

    In OpenAI's interface and most data sets the arguments are such text. A chat template writes this text in
    quotes within the call's JSON, which no parser reads as arguments. Inference servers convert it to values,
    too.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_with_values(call) for call in calls]}


def _with_values(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    with suppress(ValueError, RecursionError):
        if isinstance(values := json.loads(text), dict):
            function = {**function, "arguments": values}
    return {**call, "function": function} if "function" in call else function


def behind_thoughts(text: str) -> str:
    """The text after the turn's thinking, which ends with </think>; the whole text without any."""
    thoughts, end, answer = text.partition("</think>")
    return answer if end else thoughts


def hermes(text: str) -> list[ToolCall]:
    """The calls in <tool_call> tags."""
    text = behind_thoughts(text)
    calls = [_call(body) for _, body in _between(_TOOL_CALL, "</tool_call>", text)]
    if not calls and "<tool_call>" in text:
        return [ToolCall("", {}, "a <tool_call> has no </tool_call>")]
    return calls


def json_calls(text: str) -> list[ToolCall]:
    """The call, or the list of calls, that is the whole text or a block of it."""
    text = behind_thoughts(text)
    fenced = _FENCE.search(text)
    body = (fenced[1] if fenced else text).strip()
    if not body.startswith(("{", "[")):
        return []
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, f"the call is not JSON: {error}")]
    return [_call_of(value) for value in (values if isinstance(values, list) else [values])]


def xml(text: str) -> list[ToolCall]:
    """The calls in <function=...> tags."""
    text = behind_thoughts(text)
    calls = [
        ToolCall(
            begin[1],
            {key[1]: _value(value) for key, value in _between(_PARAMETER, "</parameter>", body)},
        )
        for begin, body in _between(_FUNCTION, "</function>", text)
    ]
    if not calls and "<function=" in text:
        return [ToolCall("", {}, "a <function=...> has no </function>")]
    return calls


PARSERS: dict[str, Parser] = {"hermes": hermes, "json": json_calls, "xml": xml}


def parser_of(spec: str) -> Parser:
    """The parser of this name, or the user's function. Raises ValueError, which names the missing part."""
    if spec in PARSERS:
        return PARSERS[spec]
    load_function(spec)
    return partial(_own, spec)


def _own(spec: str, text: str) -> list[ToolCall]:
    """The calls that the user's parser finds.

    Errors that the parser raises count as errors in the policy's text.

    Raises UserFunctionError for anything but a list of calls.
    """
    try:
        calls = load_function(spec)(text)
    except UserFunctionError:
        raise
    except Exception as error:
        return [ToolCall("", {}, f"the call cannot be read: {type(error).__name__}: {str(error)[:200]}")]
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
        raise refused(
            "rollout.conversation.parser",
            spec,
            f"it returned {str(calls)[:60]}: want a list of (name, arguments), [] for a turn without a call",
        )
    return [ToolCall(name, dict(arguments)) for name, arguments in calls]


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], dict)
    )


def _call(body: str) -> ToolCall:
    try:
        return _call_of(json.loads(body))
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not JSON: {error}")


def _call_of(value: Any) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = _arguments_of(value) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, 'a call is {"name": "...", "arguments": {...}}')
    number = value.get("id")
    return ToolCall(name, arguments, id=number if isinstance(number, str) and _ID.fullmatch(number) else None)


def _arguments_of(call: dict[str, Any]) -> Any:
    """The arguments of a call, which Llama 3's template calls parameters; None if they have another name."""
    if not {"arguments", "parameters"} & call.keys():
        return {} if call.keys() <= {"name", "id", "type"} else None
    return call["arguments"] if "arguments" in call else call["parameters"]


def _between(begin: re.Pattern[str], end: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each match of `begin` with the text from there to the next `end`.

    The function searches both expressions separately, because a policy may write thousands of beginnings, and
    one joint expression would search from each of them to the end.
    """
    index = 0
    while (opening := begin.search(text, index)) and (close := text.find(end, opening.end())) >= 0:
        yield opening, text[opening.end() : close]
        index = close + len(end)


def _value(text: str) -> Any:
    text = text.strip("\n")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
