"""Tools that come from outside and live as long as an episode."""

from __future__ import annotations

from typing import Protocol

from agentrl.tool.tool import Tool


class ToolSession(Protocol):
    """One episode's connection to where tools come from."""

    async def open(self) -> list[Tool]:
        """Connect and list the tools. Raises EnvError where the other side does not answer."""
        ...

    async def close(self) -> None:
        """Disconnect; idempotent, also after a failed `open`."""
        ...


class ToolSource(Protocol):
    """Makes a session of its own for every episode."""

    def session(self) -> ToolSession:
        """A new, unopened session."""
        ...
