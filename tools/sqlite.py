"""A SQLite database of the episode's own: queries, and changes unless it is read-only (limits: contrib/toolkit/sqlite.py)."""

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
    """The database is bytes, and every call opens a copy of its own: no connection stays open, and a fork costs nothing."""

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
        """Each episode begins with a copy of `database`, a SQLite file or a script of SQL, or with an empty one. A query shows at
        most `rows`, a call takes at most `seconds`, a statement and a value have at most `characters`, and the database may grow
        to `most_bytes`. Raises ConfigError for a file that is neither."""
        self.read_only, self.most_bytes = read_only, most_bytes
        self.limits = QueryLimits(rows=rows, steps=1 << 40, seconds=seconds, characters=characters)
        self.image = b"" if database is None else _image(database)
        if len(self.image) > most_bytes:
            raise ConfigError(f"tools.args.sqlite.database = {database!r}: {len(self.image)} bytes, more than most_bytes")

    def state(self) -> Json:
        """The rows of every table, by the tables' names."""
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
    """The database at a path, read once a process."""
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
