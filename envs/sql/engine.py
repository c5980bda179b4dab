"""Untrusted queries: read-only, within limits, on a private copy of the database.

Four things confine a query: the connection is opened on a copy in memory; `query_only` refuses writes; an
authorizer allows SELECT, reading and a list of functions, and nothing else (no PRAGMA, no ATTACH, no
recursion, no temporary tables); SQLite's own limits bound strings and statements, and a progress handler stops
a query after a number of virtual machine steps, or of seconds.
"""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import dataclass

from agentrl.errors import ToolError
from agentrl.trajectory import Json

Row = list[Json]

# Functions that need time and memory in proportion to their input, and access nothing outside.
FUNCTIONS = frozenset(
    """abs avg cast ceil ceiling coalesce count cume_dist date dense_rank first_value floor group_concat hex
    ifnull iif instr julianday lag last_value lead length like likely lower ltrim max min nth_value ntile nullif
    percent_rank quote rank replace round row_number rtrim sign strftime substr substring sum total trim typeof
    unicode unlikely upper""".split()  # noqa: SIM905
)
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})
_EVERY = 1000


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """`rows` returned, `steps` of SQLite's virtual machine (the same on every computer), wall-clock `seconds`."""

    rows: int = 50
    steps: int = 3_000_000
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Table:
    """A result: column names and rows; `more`: rows beyond the limit were left out."""

    columns: list[str]
    rows: list[Row]
    more: bool = False

    def text(self) -> str:
        """The result as the policy reads it: a header and one line per row."""
        lines = [" | ".join(self.columns), *(" | ".join(map(_cell, row)) for row in self.rows)]
        if self.more:
            lines.append(f"(only the first {len(self.rows)} rows are shown)")
        elif not self.rows:
            lines.append("(no rows)")
        return "\n".join(lines)


def query(image: bytes, sql: str, limits: QueryLimits) -> Table:
    """Run one SELECT on a copy of the database `image`. Raises ToolError with a message for the policy."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        connection.deserialize(image)
        clock = _lock(connection, limits)
        try:
            cursor = connection.execute(sql)
            found = cursor.fetchmany(limits.rows + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as problem:
            raise ToolError(_explain(problem, clock, limits)) from problem
        if cursor.description is None:
            raise ToolError("this is not a query: write one SELECT statement")
        columns = [str(column[0]) for column in cursor.description]
        return Table(columns, [list(map(_plain, row)) for row in found[: limits.rows]], len(found) > limits.rows)
    finally:
        connection.close()


class _Clock:
    """SQLite's progress handler: counts steps and seconds; returns 0 to continue or 1 to stop."""

    def __init__(self, limits: QueryLimits) -> None:
        self.steps = 0
        self.limits = limits
        self.deadline = time.monotonic() + limits.seconds
        self.stopped = ""

    def __call__(self) -> int:
        self.steps += _EVERY
        if self.steps > self.limits.steps:
            self.stopped = f"more than {self.limits.steps} steps"
        elif time.monotonic() > self.deadline:
            self.stopped = f"more than {self.limits.seconds:g} s"
        return int(bool(self.stopped))


def _lock(connection: sqlite3.Connection, limits: QueryLimits) -> _Clock:
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    for limit, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, 4000),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4000),
        (sqlite3.SQLITE_LIMIT_COLUMN, 100),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20),
        (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 20),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(limit, value)
    # SQLite's own LIKE takes time exponential in the number of %, during which no steps are counted.
    connection.create_function("like", 2, _like, deterministic=True)
    connection.set_authorizer(_authorize)
    clock = _Clock(limits)
    connection.set_progress_handler(clock, _EVERY)
    return clock


def _authorize(action: int, first: str | None, second: str | None, base: str | None, trigger: str | None) -> int:
    if action in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _like(pattern: Json, text: Json) -> int | None:
    """SQL's LIKE (case-insensitive) in time proportional to the product of the lengths."""
    if pattern is None or text is None:
        return None
    wanted, found = str(pattern).lower(), str(text).lower()
    i = j = 0
    star, mark = -1, 0
    while i < len(found):
        if j < len(wanted) and wanted[j] == "%":
            star, mark = j, i
            j += 1
        elif j < len(wanted) and wanted[j] in ("_", found[i]):
            i, j = i + 1, j + 1
        elif star >= 0:
            mark += 1
            i, j = mark, star + 1
        else:
            return 0
    return int(all(letter == "%" for letter in wanted[j:]))


def _explain(problem: Exception, clock: _Clock, limits: QueryLimits) -> str:
    if clock.stopped:
        return f"the query was stopped: {clock.stopped}"
    text = str(problem)
    if "not authorized" in text or "prohibited" in text:
        return f"{text}: only one SELECT over the tables is allowed"
    return text[:500]


def _plain(value: object) -> Json:
    """A value as JSON: blobs as hexadecimal text, infinities as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cell(value: Json) -> str:
    return "NULL" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def canonical(table: Table, ordered: bool) -> list[Row]:
    """Rows for comparison: floats to six decimals; sorted unless the question asks for an order."""
    rows = [[round(value, 6) if isinstance(value, float) else value for value in row] for row in table.rows]
    return rows if ordered else sorted(rows, key=lambda row: [_rank(value) for value in row])


def _rank(value: Json) -> tuple[int, float, str]:
    if value is None:
        return 0, 0.0, ""
    if isinstance(value, (int, float)):
        return 1, float(value), ""
    return 2, 0.0, str(value)
