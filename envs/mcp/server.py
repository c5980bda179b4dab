"""A small inventory server, the default of `agentrl/Mcp-v0`: `python server.py` serves it over stdio.

`load` and `dump` set and return the whole state; the environment calls them, and the policy never sees them.
"""

from __future__ import annotations

import logging
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

READS = ToolAnnotations(read_only_hint=True)


def build() -> MCPServer:
    """A new server with its own, empty stock."""
    server = _quiet_server("stock")
    items: dict[str, dict[str, Any]] = {}

    def item(code: str) -> dict[str, Any]:
        if code not in items:
            raise ToolError(f"no item with code {code[:40]!r}; codes come from search")
        return items[code]

    @server.tool(annotations=READS)
    def search(text: str) -> list[dict[str, str]]:
        """Find items: the code and name of each item whose name holds the text."""
        return [{"code": code, "name": it["name"]} for code, it in items.items() if text.lower() in it["name"]]

    @server.tool(annotations=READS)
    def count(code: str) -> int:
        """How many of an item are in stock."""
        return int(item(code)["count"])

    @server.tool()
    def take(code: str, amount: int) -> str:
        """Take some of an item out of stock."""
        it = item(code)
        if not 1 <= amount <= it["count"]:
            raise ToolError(f"amount must be within 1..{it['count']}")
        it["count"] -= amount
        return f"took {amount} of {it['name']}"

    @server.tool()
    def add(code: str, amount: int) -> str:
        """Put more of an item into stock."""
        it = item(code)
        if not 1 <= amount <= 1000:
            raise ToolError("amount must be within 1..1000")
        it["count"] += amount
        return f"added {amount} of {it['name']}"

    @server.tool()
    def load(stock: dict[str, dict[str, Any]]) -> int:
        """Replace the whole stock: code -> {"name", "count"}. Returns the number of items."""
        items.clear()
        items.update({code: dict(it) for code, it in stock.items()})
        return len(items)

    @server.tool(annotations=READS)
    def dump() -> dict[str, int]:
        """The whole stock: code -> count."""
        return {code: it["count"] for code, it in sorted(items.items())}

    return server


def _quiet_server(name: str) -> MCPServer:
    """A server without the SDK's process-wide logging setup, which here is up to the run."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    server = MCPServer(name)
    root.handlers[:] = handlers
    root.setLevel(level)
    return server


if __name__ == "__main__":
    build().run("stdio")
