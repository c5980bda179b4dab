"""Common parts of the four apps: the world that they work on, and its form for comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from agentrl.utils.errors import ToolError

Json = Any
Short = Annotated[str, Field(max_length=200)]
Long = Annotated[str, Field(max_length=4000)]
Minutes = Annotated[int, Field(ge=5, le=1440)]


class Apps:
    """Base class of the apps: `world` is the whole state, as plain JSON."""

    world: dict[str, Json]

    def _one(self, table: str, key: str, what: str) -> dict[str, Json]:
        """A record by key. Raises ToolError if there is none."""
        found: dict[str, Json] | None = self.world[table].get(key)
        if found is None:
            raise ToolError(f"no {what} {key[:80]!r}")
        return found

    def _new_id(self, letter: str) -> str:
        self.world["created"] += 1
        return f"{letter}{1000 + self.world['created']}"


def export(world: dict[str, Json]) -> dict[str, Json]:
    """The world for comparison: without ids and order of creation."""
    return {
        "contacts": {email: {**row, "groups": sorted(row["groups"])} for email, row in sorted(world["contacts"].items())},
        "mail": _rows(world["mail"].values(), "to"),
        "mail_folders": sorted(world["mail_folders"]),
        "events": _rows(world["events"].values(), "attendees"),
        "files": {path: {**row, "shared": sorted(row["shared"])} for path, row in sorted(world["files"].items())},
        "folders": sorted(world["folders"]),
    }


def _rows(rows: Iterable[dict[str, Json]], inner: str) -> list[Json]:
    copies = [{**row, inner: sorted(row[inner])} for row in rows]
    return sorted(copies, key=lambda row: sorted(map(str, row.items())))


def has(text: str, part: str) -> bool:
    """Whether `part` occurs in `text`, ignoring case."""
    return part.strip().casefold() in text.casefold()
