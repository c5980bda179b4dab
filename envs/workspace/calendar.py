"""The calendar app."""

from __future__ import annotations

import re
from datetime import date

from agentrl.env import tool
from agentrl.utils.errors import ToolError

from .apps import Apps, Json, Minutes, Short, has


class Calendar(Apps):
    """Events with a title, day (YYYY-MM-DD), start (HH:MM), length in minutes, attendees and a reminder."""

    @tool(inline=True, read_only=True)
    def list_events(self, day: Short) -> list[Json]:
        """The events of a day (YYYY-MM-DD), in order of their start."""
        day = _day(day)
        return sorted(
            ({"event_id": key, **row} for key, row in self.world["events"].items() if row["day"] == day),
            key=lambda row: (str(row["start"]), str(row["event_id"])),
        )

    @tool(inline=True, read_only=True)
    def find_events(self, title: Short) -> list[Json]:
        """The events whose title holds a text."""
        events = self.world["events"].items()
        return [{"event_id": key, **row} for key, row in events if has(row["title"], title)][:50]

    @tool(inline=True, read_only=True)
    def get_event(self, event_id: Short) -> Json:
        """One event."""
        return {"event_id": event_id, **self._one("events", event_id, "event")}

    @tool(inline=True, parallel=False)
    def create_event(self, title: Short, day: Short, start: Short, minutes: Minutes) -> str:
        """Create an event without attendees on a day (YYYY-MM-DD) at a time (HH:MM); returns its id."""
        key = self._new_id("e")
        self.world["events"][key] = {
            "title": title, "day": _day(day), "start": _clock(start), "minutes": minutes, "attendees": [],
            "reminder": None,
        }  # fmt: skip
        return key

    @tool(inline=True, parallel=False)
    def move_event(self, event_id: Short, day: Short, start: Short) -> str:
        """Move an event to another day (YYYY-MM-DD) or time (HH:MM)."""
        self._one("events", event_id, "event").update(day=_day(day), start=_clock(start))
        return "moved"

    @tool(inline=True, parallel=False)
    def cancel_event(self, event_id: Short) -> str:
        """Cancel an event; it disappears."""
        self._one("events", event_id, "event")
        del self.world["events"][event_id]
        return "cancelled"

    @tool(inline=True, parallel=False)
    def add_attendee(self, event_id: Short, email: Short) -> str:
        """Invite an address to an event."""
        row = self._one("events", event_id, "event")
        if email not in row["attendees"]:
            row["attendees"].append(email)
        return "invited"

    @tool(inline=True, parallel=False)
    def remove_attendee(self, event_id: Short, email: Short) -> str:
        """Take an address off an event."""
        row = self._one("events", event_id, "event")
        if email not in row["attendees"]:
            raise ToolError(f"{email[:80]!r} is not invited")
        row["attendees"].remove(email)
        return "removed"

    @tool(inline=True, parallel=False)
    def set_reminder(self, event_id: Short, minutes: Minutes) -> str:
        """Have an event announced that many minutes before it starts."""
        self._one("events", event_id, "event")["reminder"] = minutes
        return "set"


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as problem:
        raise ToolError(f"{text[:40]!r} is not a day such as 2031-03-04: {str(problem)[:80]}") from None


def _clock(text: str) -> str:
    if not re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", text):
        raise ToolError(f"{text[:40]!r} is not a time such as 09:30")
    return text
