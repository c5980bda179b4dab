"""Calendar arithmetic on ISO dates. No tool reads the clock, so that an episode does not depend on its date."""

from __future__ import annotations

import datetime
from typing import Annotated

from pydantic import WithJsonSchema

from agentrl.env import tool
from agentrl.utils.errors import ToolError

Date = Annotated[  # without the pattern, "0" would be read as Unix seconds
    datetime.date, WithJsonSchema({"type": "string", "format": "date", "pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"})
]


@tool(inline=True, read_only=True)
def add_days(date: Date, days: int) -> str:
    """The date some days later (or earlier, if days is negative).

    Args:
        date: for example 2026-11-21
        days: how many
    """
    try:
        return (date + datetime.timedelta(days=days)).isoformat()
    except OverflowError as problem:
        raise ToolError("that date is outside of the years 1 to 9999") from problem


@tool(inline=True, read_only=True)
def days_between(first: Date, last: Date) -> int:
    """How many days lie from the first date to the last.

    Args:
        first: for example 2026-11-21
        last: for example 2026-12-24
    """
    return (last - first).days


@tool(inline=True, read_only=True)
def weekday(date: Date) -> str:
    """The day of the week of a date.

    Args:
        date: for example 2026-11-21
    """
    return date.strftime("%A")
