"""Calendar arithmetic on ISO dates. No tool reads the clock, since an episode must not depend on the day it runs."""

from __future__ import annotations

import datetime

from agentrl.errors import ToolError
from agentrl.tool import tool


@tool(inline=True, read_only=True)
def add_days(date: datetime.date, days: int) -> str:
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
def days_between(first: datetime.date, last: datetime.date) -> int:
    """How many days lie from the first date to the last.

    Args:
        first: for example 2026-11-21
        last: for example 2026-12-24
    """
    return (last - first).days


@tool(inline=True, read_only=True)
def weekday(date: datetime.date) -> str:
    """The day of the week of a date.

    Args:
        date: for example 2026-11-21
    """
    return date.strftime("%A")
