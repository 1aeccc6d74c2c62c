"""The environment of `rollout.conversation.tools`: it runs the functions that the policy calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from megatron_gvpo.conversations.environment import Reply
from megatron_gvpo.conversations.parsers import PARSERS, Call
from megatron_gvpo.groups import Prompt
from megatron_gvpo.runtime.user_functions import load_function


class Tools:
    """Answers each call of a turn with a message of role `tool`; a turn without a call ends the conversation.

    What a call does wrong is the policy's doing and told to it: an unknown tool, arguments that do not bind,
    an exception.
    """

    def __init__(self, functions: Sequence[str], parser: str) -> None:
        self._functions = {found.__name__: found for found in map(load_function, functions)}
        self._parse = PARSERS[parser]

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Nothing to do: functions have no state of a conversation."""

    async def step(self, said: str) -> Reply:
        calls = self._parse(said)
        if not calls:
            return Reply(None)
        messages, failed = [], 0
        for call in calls:
            text, right = await self._answer(call)
            failed += not right
            messages.append({"role": "tool", "name": call.name, "content": text})
        return Reply(messages, counts={"tool_calls": len(calls), "tool_errors": failed})

    async def _answer(self, call: Call) -> tuple[str, bool]:
        """(what the tool says, True if it ran)."""
        function = self._functions.get(call.name)
        if call.problem is not None:
            return f"Error: {call.problem}", False
        if function is None:
            return f"Error: there is no tool {call.name!r}; there are: {', '.join(self._functions)}", False
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"Error: {call.name}: {error}", False
        try:
            value = function(**call.arguments)
            if inspect.isawaitable(value):
                value = await value
            return _text(value), True
        except Exception as error:
            return f"Error: {type(error).__name__}: {str(error)[:200]}", False


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


def tool_schemas(functions: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON schemas of functions, from their signatures and docstrings, as chat templates take them.

    transformers reads them: each argument needs a type and a line under `Args:`. Raises ValueError, which
    names the function.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for spec in functions:
        try:
            schemas.append(get_json_schema(load_function(spec)))
        except Exception as error:  # a missing file, or a docstring that transformers cannot read
            raise ValueError(f"{spec}: {' '.join(str(error).split())}") from None
    if len({schema["function"]["name"] for schema in schemas}) < len(schemas):
        raise ValueError(f"two of {', '.join(functions)} have the same name")
    return schemas
