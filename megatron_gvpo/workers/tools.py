"""The environment of `rollout.conversation.tools`: it runs the tools that the policy calls."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.user_functions import described, load_function, message_of
from megatron_gvpo.data.tool_calls import ToolCall, parser_of
from megatron_gvpo.groups import Prompt
from megatron_gvpo.settings.conversation import PYTHON, ConversationConfig
from megatron_gvpo.workers.environment import Outage, Reply
from megatron_gvpo.workers.mcp_servers import server, server_schemas
from megatron_gvpo.workers.sandbox import SCHEMA, Sandbox

Tool = Callable[[dict[str, Any]], Awaitable[tuple[str, bool]]]  # arguments -> (its answer, True if it ran)
_shown_errors = set[tuple[str, str]]()  # tools and kinds of errors that were shown to the user


class Tools:
    """Answers each call of a turn with a message of role `tool`; a turn without a call ends the conversation.

    The answer names mistakes of the policy's calls: an unknown tool, arguments that do not fit, an exception
    other than Outage.
    """

    def __init__(
        self,
        functions: Sequence[str],
        parser: str,
        sandbox: Mapping[str, Any],
        mcp: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._servers = [server(settings) for settings in mcp]
        self._tools: dict[str, Tool] = {}
        for spec in functions:
            if spec == PYTHON:
                self._tools[PYTHON] = partial(_run_program, Sandbox(**sandbox))
            else:
                function = load_function(spec)
                self._tools[function.__name__] = partial(_call_function, function)
        self._parse = parser_of(parser)

    @staticmethod
    def overlaps(functions: Sequence[str], **options: Any) -> bool:
        """True if no tool delays other conversations (see `environment`): functions must be `async`.

        Python programs run one after the other, because each may use a processor and much memory.
        """
        return PYTHON not in functions and all(
            map(inspect.iscoroutinefunction, map(load_function, functions))
        )

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Do nothing: functions do not remember a conversation."""

    async def step(self, response: str) -> Reply:
        calls = self._parse(response)
        if not calls:
            return Reply(None)
        messages, failed = [], 0
        for i, call in enumerate(calls):
            text, right = await self._answer(call)
            failed += not right
            messages.append(tool_message(call.name, text, call.id or i))
        return Reply(messages, counts={"tool_calls": len(calls), "tool_errors": failed})

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        """Return the tool's answer, and True if the tool ran."""
        if call.problem is not None:
            return f"Error: {call.problem}", False
        if (tool := self._tools.get(call.name)) is not None:
            return await tool(call.arguments)
        names = list(self._tools)
        for mcp_server in self._servers:
            listed = [tool.name for tool in await mcp_server.tools()]
            names += listed
            if call.name in listed:
                return await mcp_server.call(call.name, call.arguments)
        return f"Error: there is no tool {call.name!r}; there are: {', '.join(names)}", False


def tool_message(name: str, content: str, call: str | int = 0) -> dict[str, str]:
    """The chat message of a tool's answer; `call` is the call's id, or its number in the turn.

    The id has nine characters, as Mistral's templates require; other templates accept any.
    """
    number = call if isinstance(call, str) else f"{call:09d}"
    return {"role": "tool", "name": name, "tool_call_id": number, "content": content}


async def _call_function(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, bool]:
    """The function's answer and True, or its error as text and False. Raises Outage."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"Error: {function.__name__}: {error}", False
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = await value
        return _text(value), True
    except Outage:
        raise
    except (Exception, SystemExit) as error:
        _tell_once(function.__name__, error)
        return f"Error: {type(error).__name__}: {message_of(error)[:200]}", False


def _tell_once(tool: str, error: BaseException) -> None:
    """Show the user each kind of error once, because the tool itself may be wrong."""
    if (kind := (tool, type(error).__name__)) not in _shown_errors:
        _shown_errors.add(kind)
        print(f"{tool}: {described(error)}: the policy is told, and this is shown once", file=sys.stderr)


async def _run_program(sandbox: Sandbox, arguments: dict[str, Any]) -> tuple[str, bool]:
    """The program's output, and True if it ended without an error. Raises SandboxFailed."""
    if arguments.keys() != {"code"} or not isinstance(arguments["code"], str):
        return f"Error: {PYTHON}: it takes one argument, code, which is a text", False
    outcome = sandbox.run(arguments["code"])
    return str(outcome), not outcome.problem


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def tool_schemas(tools: Sequence[str], mcp: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The JSON schemas of tools, in the form that chat templates take.

    transformers makes those of functions from signatures and docstrings: each argument needs a type and a
    line under `Args:`. The schemas of MCP servers' tools come from the servers. Raises ValueError, which
    names the function or the server.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for spec in tools:
        try:
            schemas.append(SCHEMA if spec == PYTHON else get_json_schema(_describable(load_function(spec))))
        except Exception as error:  # a missing file, or a docstring that transformers cannot read
            raise ValueError(f"tools: {spec}: {' '.join(str(error).split())}") from None
    if mcp:
        try:
            schemas += server_schemas(mcp)
        except ValueError as error:
            raise ValueError(f"mcp: {error}") from None
    names = [schema["function"]["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tools: two of them have the same name: {', '.join(twice)}")
    return schemas


def _describable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function. Raises ValueError if no schema can describe its calls, whose arguments have names."""
    if inspect.isclass(function):
        raise ValueError("it is a class; a tool is a function")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"no schema can describe its argument {str(parameter).partition(':')[0]}, because the policy "
                "gives arguments by name: write every argument with a name and a type, without *, ** and /"
            )
    return function


def configured_schemas(talks: ConversationConfig | None) -> tuple[dict[str, Any], ...]:
    """The schemas of the tools that the policy may call in these conversations. Raises ConfigError."""
    if talks is None or not talks.has_tools:
        return ()
    try:
        return tuple(tool_schemas(talks.tools, [server.model_dump() for server in talks.mcp]))
    except ValueError as error:
        raise ConfigError(f"rollout.conversation.{error}") from None
