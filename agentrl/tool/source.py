"""Tools from outside, which exist for one episode."""

from __future__ import annotations

from typing import Protocol

from agentrl.tool.tool import Tool


class ToolSession(Protocol):
    """One episode's connection to a source of tools."""

    async def open(self) -> list[Tool]:
        """Connect and list the tools. Raises EnvError if the other side does not answer."""
        ...

    async def close(self) -> None:
        """Disconnect; idempotent, also after a failed `open`."""
        ...


class ToolSource(Protocol):
    """Makes a separate session for every episode."""

    def session(self) -> ToolSession:
        """A new, unopened session."""
        ...
