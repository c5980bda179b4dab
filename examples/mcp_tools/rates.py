"""A Model Context Protocol server: how many euros one unit of a currency is. `python rates.py PORT` serves it over HTTP."""

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("rates")
RATES = {"dollar": 2, "pound": 3, "franc": 4}


@server.tool()
def rate(currency: str) -> int:
    """euros for one unit of a currency"""
    if currency not in RATES:
        raise ToolError(f"no rate for {currency[:20]!r}; known: {', '.join(RATES)}")
    return RATES[currency]


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1]))
