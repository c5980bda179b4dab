"""Separate SQLite database per episode, with queries, and changes unless read-only (limits: contrib/toolkit/sqlite.py)."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.contrib.toolkit.sqlite import QueryLimits, change, contents, query
from agentrl.data.trajectory import Json
from agentrl.env import ToolSet, tool
from agentrl.utils.errors import ConfigError, ToolError

Sql = Annotated[str, Field(min_length=1)]


class Sqlite(ToolSet):
    """Holds the database as bytes, and opens a copy for each call: no connection stays open, and forks are free."""

    name = "sqlite"

    def __init__(
        self,
        *,
        database: str | None = None,
        read_only: bool = False,
        rows: Annotated[int, Field(ge=1, le=1000)] = 50,
        seconds: Annotated[float, Field(gt=0, le=60)] = 5.0,
        most_bytes: Annotated[int, Field(ge=1 << 16)] = 8 << 20,
        characters: Annotated[int, Field(ge=100)] = 20_000,
    ) -> None:
        """Each episode starts with a copy of `database` (a SQLite file or SQL script), by default empty. Limits: `rows` shown by
        a query, `seconds` per call, `characters` of a statement and of a value, `most_bytes` of the database. Raises ConfigError
        for any other file."""
        self.read_only, self.most_bytes = read_only, most_bytes
        self.limits = QueryLimits(rows=rows, steps=1 << 40, seconds=seconds, characters=characters)
        self.image = b"" if database is None else _image(database)
        if len(self.image) > most_bytes:
            raise ConfigError(f"tools.args.sqlite.database = {database!r}: {len(self.image)} bytes, more than most_bytes")

    def state(self) -> Json:
        """Return the rows of every table, by table name."""
        return contents(self.image)

    @tool(read_only=True, concurrency=4, timeout=120)
    def query_database(self, sql: Sql) -> str:
        """Run one SELECT statement (SQLite) and see its rows. The tables are in sqlite_master.

        Args:
            sql: such as SELECT name, sql FROM sqlite_master
        """
        return query(self.image, sql, self.limits).text()

    @tool(parallel=False, concurrency=4, timeout=120)
    def change_database(self, sql: Sql) -> str:
        """Run one statement that changes the database: INSERT, UPDATE, DELETE, CREATE, ALTER or DROP.

        Args:
            sql: such as UPDATE items SET price = 3 WHERE id = 7
        """
        if self.read_only:
            raise ToolError("the database is read-only")
        self.image, rows = change(self.image, sql, self.limits, self.most_bytes)
        return f"done; {rows} rows changed"


@lru_cache(maxsize=64)
def _image(path: str) -> bytes:
    """Read the database at a path, once per process."""
    try:
        content = Path(path).read_bytes()
    except OSError as problem:
        raise ConfigError(f"tools.args.sqlite.database = {path!r}: {problem}") from None
    connection = sqlite3.connect(":memory:")
    try:
        if content.startswith(b"SQLite format 3\0"):
            connection.deserialize(content)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return content
        connection.executescript(content.decode())
        return connection.serialize()
    except (sqlite3.Error, UnicodeDecodeError) as problem:
        raise ConfigError(f"tools.args.sqlite.database = {path!r}: neither a SQLite file nor a script: {problem}") from None
    finally:
        connection.close()
