"""Tools of MCP servers: their schemas, and calls over sessions that a process keeps.

All conversations of a worker process share its session with a server, because tools must not remember a
conversation: a call may go to any worker, and is repeated by another one if the first fails. A session for
each conversation would start a server's program hundreds of times a step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.slow_work import slow_work

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, Tool

START = 60.0  # seconds in which a server must start and list its tools
_CONNECT = 5.0  # seconds that a connection may take; a step has more
_MOST_TOOLS = 1000
_NAME = re.compile(r"[\w./:-]{1,128}")  # names of tools, as the protocol recommends them


class _Strays(logging.Filter):
    """Log filter: one line, and no traceback, if a server's program prints something among its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        from pydantic import ValidationError

        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, ValidationError):
            return True
        line = repr(error.errors(include_url=False)[0].get("input"))[:100]
        record.msg = (
            "an MCP server's program printed %s on its standard output, where the protocol's messages are: "
            "print to standard error there"
        )
        record.args, record.exc_info = (line,), None
        is_first, self.first = not self.first, self.first or line
        return is_first


_STRAYS = _Strays()


class ServerFailed(Exception):  # noqa: N818 - it is not a fault of this program
    """Raised if an MCP server cannot be reached, which is not the policy's fault."""


def server(settings: Mapping[str, Any]) -> McpServer:
    """The server with these settings (`McpConfig`): one object in each process."""
    return _server(json.dumps(settings, sort_keys=True))


@cache
def _server(settings: str) -> McpServer:
    return McpServer(json.loads(settings))


class McpServer:
    """One server. Its session is opened when it is needed, and again after it has ended.

    Use it in one event loop. `str()` is its command or address, without secrets.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._session: _Session | None = None

    def __str__(self) -> str:
        return f"MCP server {self._settings['url'] or ' '.join(self._settings['command'])}"

    async def tools(self) -> list[Tool]:
        """The server's tools. Raises ServerFailed."""
        _, _, tools = await self._open()
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return the tool's answer, and False if it is an error. Raises ServerFailed.

        If the connection fails, a new one is opened, and the call is tried once more.
        """
        from mcp import MCPError

        for attempt in (1, 2):
            session, client, _ = await self._open()
            try:
                result = await client.call_tool(name, arguments)
                return _text(result), not result.is_error
            except asyncio.CancelledError:  # the step took too long; the program may hang
                self._drop(session)
                raise
            except Exception as error:
                if isinstance(error, MCPError) and error.code not in _failures():
                    return str(error), False
                self._drop(session)
                if attempt == 2:
                    raise ServerFailed(f"{self}: {name}: {_problem(error)}") from None
        raise AssertionError("unreachable")

    async def _open(self) -> tuple[_Session, Client, list[Tool]]:
        """The session, which is opened if there is none. Raises ServerFailed."""
        if self._session is None or self._session.over:
            self._session = _Session(self._settings)
        session = self._session
        try:
            return session, *await session.opened()
        except asyncio.CancelledError:  # the step took too long, and has called no tool
            raise ServerFailed(
                f"{self}: no session could be opened in time (rollout.conversation.step_timeout)"
            ) from None
        except Exception as error:
            self._drop(session)
            problem = _problem(error)
            if self._settings["url"] is None and problem.endswith("Connection closed"):
                problem += f": its program ended before it answered; look at what it printed{_printed()}"
            raise ServerFailed(f"{self}: {problem}") from None

    def _drop(self, session: _Session) -> None:
        """End a session; the next call opens another."""
        if self._session is session:
            self._session = None
        session.end()

    async def close(self) -> None:
        if self._session is not None:
            self._session.end()
            await self._session.ended()
            self._session = None


class _Session:
    """A connection, and the task that keeps it open: only the task that opened it may close it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._end = settings, asyncio.Event()
        self._opened: asyncio.Future[tuple[Client, list[Tool]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_open())

    @property
    def over(self) -> bool:
        return self._task.done()

    async def opened(self) -> tuple[Client, list[Tool]]:
        """Wait until the session is open; return the client and the server's tools.

        Raises the error that prevented the opening.
        """
        return await asyncio.shield(self._opened)

    def end(self) -> None:
        """Let the task close the connection, and end the program."""
        self._end.set()

    async def ended(self) -> None:
        await asyncio.wait([self._task], timeout=START)

    async def _keep_open(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(START):
                    client = await _connect(self._settings, stack)
                    tools = await _listed(client)
                self._opened.set_result((client, tools))
                await self._end.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error if isinstance(error, Exception) else EOFError(str(error)))
            elif not isinstance(error, Exception):
                raise


async def _connect(settings: Mapping[str, Any], stack: AsyncExitStack) -> Client:
    """A client on the stack. HTTP goes to the given address alone: no proxy, no redirect elsewhere."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    transport: Any
    if settings["url"] is None:
        program, *arguments = settings["command"]
        _STRAYS.first = ""
        logging.getLogger("mcp.client.stdio").addFilter(_STRAYS)
        parameters = StdioServerParameters(command=program, args=arguments, env=dict(settings["env"]))
        transport = stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)
    else:
        import httpx2

        limits = httpx2.Timeout(START, connect=_CONNECT, read=None)  # the step's own limit ends a call
        http = httpx2.AsyncClient(headers=dict(settings["headers"]), timeout=limits, trust_env=False)
        transport = streamable_http_client(settings["url"], http_client=await stack.enter_async_context(http))
    return await stack.enter_async_context(Client(transport))


async def _listed(client: Client) -> list[Tool]:
    """The tools on all pages. Raises ValueError for more than a policy could be shown, and for odd names."""
    tools, cursor, pages = list["Tool"](), None, 0
    while pages == 0 or cursor is not None:
        page = await client.list_tools(cursor=cursor)
        tools, cursor, pages = [*tools, *page.tools], page.next_cursor, pages + 1
        if max(len(tools), pages) > _MOST_TOOLS:
            raise ValueError(f"it lists more than {_MOST_TOOLS} tools or pages of tools")
    if odd := [tool.name for tool in tools if _NAME.fullmatch(tool.name) is None]:
        raise ValueError(f"a tool's name is {odd[0][:60]!r}: want 1 to 128 letters, digits and _ - . / :")
    return tools


@cache
def _failures() -> frozenset[int]:
    """The codes of errors of the connection or the server. Errors of a tool itself have other codes."""
    import mcp_types as codes

    return frozenset(
        {
            codes.CONNECTION_CLOSED,
            codes.REQUEST_TIMEOUT,
            codes.PARSE_ERROR,
            codes.INVALID_REQUEST,
            codes.METHOD_NOT_FOUND,
            codes.INTERNAL_ERROR,
        }
    )


def _text(result: CallToolResult) -> str:
    """A result as text: its texts, joined, with a note in place of other content."""
    parts = [str(getattr(block, "text", f"[{block.type}]")) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _printed() -> str:
    line = _STRAYS.first
    return f"; it printed {line} on its standard output, which is for messages" if line else ""


def _problem(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it did not start in {START:g} seconds{_printed()}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def server_schemas(servers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools of all servers as chat templates take them. Raises ValueError, which names the server."""

    async def ask() -> list[dict[str, Any]]:
        schemas = []
        for settings in servers:
            mcp_server = McpServer(settings)
            try:
                with slow_work(f"waiting for {mcp_server}") as now:
                    now(f"it has {START:g} seconds to start and to list its tools")
                    tools = await mcp_server.tools()
            finally:
                await mcp_server.close()
            if not tools:
                raise ValueError(f"{mcp_server} has no tools")
            schemas += [_schema(tool) for tool in tools]
        return schemas

    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's thread has an event loop already
            return thread.submit(asyncio.run, ask()).result()
    except ServerFailed as error:
        raise ValueError(str(error)) from None


def _schema(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


async def connect(servers: Sequence[Mapping[str, Any]]) -> None:
    """Open the sessions before the first call. If a session cannot be opened now, the first call opens it."""
    for settings in servers:
        with suppress(ServerFailed):
            await server(settings).tools()
