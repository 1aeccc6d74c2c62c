"""An MCP server with two tools: it adds and multiplies. It speaks over its standard input and output."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two integers."""
    return str(a + b)


@server.tool()
def multiply(a: int, b: int) -> str:
    """Multiplies two integers."""
    return str(a * b)


if __name__ == "__main__":
    server.run("stdio")
