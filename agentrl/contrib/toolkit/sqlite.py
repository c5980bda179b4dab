"""Run a policy's SQL within limits, on a private copy of a SQLite database given as bytes.

Four measures confine a query: the connection is opened on a copy in memory; `query_only` refuses writes; an authorizer allows
SELECT, reading and a list of functions, and nothing else (no PRAGMA, no ATTACH, no recursion, no temporary tables); SQLite's own
limits bound strings and statements, and a progress handler stops a query after a number of virtual machine steps or seconds. A
change (`change`) has the same limits; it may also insert, update, delete, and create, alter and drop tables, indexes and views,
in a database of limited size."""

from __future__ import annotations

import math
import re
import sqlite3
import string
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.data.trajectory import Json
from agentrl.utils.errors import ToolError

Row = list[Json]

# Functions with linear time and memory in their input that access nothing outside the database.
FUNCTIONS = frozenset(
    """abs avg cast ceil ceiling coalesce count cume_dist date dense_rank first_value floor group_concat hex
    ifnull iif instr julianday lag last_value lead length like likely lower ltrim max min nth_value ntile nullif
    percent_rank quote rank replace round row_number rtrim sign strftime substr substring sum total trim typeof
    unicode unlikely upper""".split()  # noqa: SIM905
)
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})
_CHANGES = _ALLOWED | {
    sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_ALTER_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_REINDEX,
}  # fmt: skip
_RENAMES = ("rename_table", "rename_column", "rename_test", "rename_quotefix", "drop_column")
_ALTER_FUNCTIONS = frozenset({"printf", *(f"sqlite_{name}" for name in _RENAMES)})
"""Functions that ALTER TABLE calls; statements can call only printf of these, whose result is limited like all values."""
_STEPS_PER_CHECK = 1000


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """Limits of a query: returned `rows`, `steps` of SQLite's virtual machine (the same on every computer), wall-clock `seconds`,
    `characters` per statement and per value, and about `total` characters of all returned values."""

    rows: int = 50
    steps: int = 3_000_000
    seconds: float = 10.0
    characters: int = 4000
    total: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Table:
    """Result of a query: column names and rows; `more`: rows beyond the limit were left out."""

    columns: list[str]
    rows: list[Row]
    more: bool = False

    def text(self) -> str:
        """Format the result for the policy: a header and one line per row."""
        shown = lambda value: "NULL" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)  # noqa: E731
        lines = [" | ".join(self.columns), *(" | ".join(map(shown, row)) for row in self.rows)]
        if self.more:
            lines.append(f"(only the first {len(self.rows)} rows are shown)")
        elif not self.rows:
            lines.append("(no rows)")
        return "\n".join(lines)


def query(image: bytes, sql: str, limits: QueryLimits) -> Table:
    """Run one SELECT on a copy of the database `image`. Raises ToolError with a message for the policy."""
    with closing(_copy(image)) as connection:
        clock = _lock(connection, limits)
        try:
            cursor = connection.execute(sql)
            found, size, more = list[Any](), 0, False
            for row in cursor:
                if len(found) == limits.rows or size > limits.total:
                    more = True
                    break
                found.append(row)
                size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as problem:
            raise ToolError(_explain(problem, clock)) from problem
        if cursor.description is None:
            raise ToolError("this is not a query: write one SELECT statement")
        columns = [str(column[0]) for column in cursor.description]
        return Table(columns, [list(map(_plain, row)) for row in found], more)


def contents(image: bytes) -> dict[str, list[Row]]:
    """Return the rows of every table by table name."""
    with closing(_copy(image)) as connection:
        connection.text_factory = _readable
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        quoted = {name: name.replace('"', '""') for name in names}
        rows = {name: connection.execute(f'SELECT * FROM "{quoted[name]}"') for name in names}
        return {name: [list(map(_plain, row)) for row in found] for name, found in rows.items()}


def change(image: bytes, sql: str, limits: QueryLimits, most: int) -> tuple[bytes, int]:
    """Run one changing statement on a copy of the database; return the copy, of at most about `most` bytes, and the number of
    changed rows. A failed statement changes nothing. Raises ToolError with a message for the policy."""
    with closing(_copy(image)) as connection:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, most // page)}")
        computed = _count_generated(connection)
        clock = _lock(connection, limits, changes=True)
        try:
            cursor = connection.execute(sql)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as problem:
            raise ToolError(_explain(problem, clock, "one INSERT, UPDATE, DELETE, CREATE, ALTER or DROP")) from problem
        if cursor.description is not None:
            raise ToolError("this changes nothing: it is a query")
        connection.set_authorizer(None)
        if _count_generated(connection) > computed:  # their values are computed at each read, without limits
            raise ToolError("generated columns are not allowed")
        return connection.serialize(), max(cursor.rowcount, 0)


def _copy(image: bytes) -> sqlite3.Connection:
    # Autocommit: each statement is its own transaction, so none stays open.
    connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    if image:
        connection.deserialize(image)
    return connection


def _count_generated(connection: sqlite3.Connection) -> int:
    asked = "SELECT count(*) FROM sqlite_master AS t, pragma_table_xinfo(t.name) AS c WHERE t.type = 'table' AND c.hidden > 1"
    return int(connection.execute(asked).fetchone()[0])


_FOLD = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_readable = partial(str, encoding="utf-8", errors="replace")


class _Clock:
    """SQLite's progress handler: counts steps and seconds; returns 0 to continue or 1 to stop."""

    def __init__(self, limits: QueryLimits) -> None:
        self.steps = 0
        self.limits = limits
        self.deadline = time.monotonic() + limits.seconds
        self.stopped = ""

    def __call__(self) -> int:
        self.steps += _STEPS_PER_CHECK
        return int(self.late())

    def late(self) -> bool:
        """Return True if a limit is reached."""
        if self.steps > self.limits.steps:
            self.stopped = f"more than {self.limits.steps} steps"
        elif time.monotonic() > self.deadline:
            self.stopped = f"more than {self.limits.seconds:g} s"
        return bool(self.stopped)


def _lock(connection: sqlite3.Connection, limits: QueryLimits, changes: bool = False) -> _Clock:
    connection.text_factory = _readable
    connection.execute(f"PRAGMA query_only = {'OFF' if changes else 'ON'}")
    connection.execute("PRAGMA trusted_schema = OFF")
    for limit, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, limits.characters),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, limits.characters),
        (sqlite3.SQLITE_LIMIT_COLUMN, 100),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20),
        (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 20),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(limit, value)
    connection.set_authorizer(partial(_authorize, changes))
    clock = _Clock(limits)
    # SQLite's own LIKE takes time exponential in the number of %, during which no steps are counted.
    connection.create_function("like", 2, partial(_like, clock.late), deterministic=True)
    connection.set_progress_handler(clock, _STEPS_PER_CHECK)
    return clock


def _authorize(changes: bool, action: int, first: str | None, second: str | None, base: str | None, trigger: str | None) -> int:
    # Without ATTACH and temporary tables, the copy is the only database.
    called = (second or "").lower() in FUNCTIONS or (changes and second in _ALTER_FUNCTIONS)
    fine = action in (_CHANGES if changes else _ALLOWED) or (action == sqlite3.SQLITE_FUNCTION and called)
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY


def _like(late: Callable[[], bool], pattern: Json, text: Json) -> int | None:
    """Match SQL's LIKE (case-insensitive) in time O(pattern length * text length); raise TimeoutError if `late()`."""
    if pattern is None or text is None:
        return None
    # SQLite writes floats with 15 digits and a point, and folds ASCII letters alone.
    texts = (
        re.sub(r"^-?\d+(?=e|$)", r"\g<0>.0", f"{one:.15g}") if isinstance(one, float) else str(one) for one in (pattern, text)
    )
    wanted, found = (one.translate(_FOLD) for one in texts)
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
            if mark % 64 == 0 and late():
                raise TimeoutError
        else:
            return 0
    return int(all(letter == "%" for letter in wanted[j:]))


def _explain(problem: Exception, clock: _Clock, allowed: str = "one SELECT") -> str:
    if clock.stopped:
        return f"the query was stopped: {clock.stopped}"
    text = str(problem)
    if "not authorized" in text or "prohibited" in text:
        return f"{text}: only {allowed} over the tables is allowed"
    return text[:500]


def _plain(value: object) -> Json:
    """Convert a value to JSON: blobs to hexadecimal text, infinities to text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
