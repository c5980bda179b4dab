"""The index of a run's episodes, an SQLite file: its location and updates."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from agentrl.contrib.view.features import Features, features_of
from agentrl.run.reader import EpisodeFile, RunRecord
from agentrl.utils.errors import RunFolderError
from agentrl.utils.files import open_plain
from agentrl.utils.parsing import read_json
from agentrl.utils.terminal import say


def cache_folder(run: Path) -> Path:
    """Return the index folder: `.view` in the run folder; in the user's cache if that is not writable; else a temporary folder,
    with a note on stderr, which is deleted at exit. Raises RunFolderError if that fails too."""
    inside = run / ".view"
    if _writable(inside if os.path.isdir(inside) else run):  # noqa: PTH112 - Path's raises in an unsearchable folder
        return inside
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    except RuntimeError:  # a user without a home
        home = Path("/nonexistent")
    cached = home / "agentrl" / "view" / hashlib.sha256(str(run).encode()).hexdigest()[:16]
    if _writable(next(path for path in (cached, *cached.parents) if os.path.exists(path))):  # noqa: PTH110
        return cached
    if not _made:  # one folder for all runs of this process; the first one is reported
        neither = f"{run}: neither it nor {cached} can be written"
        advice = "set XDG_CACHE_HOME to a folder that can"
        try:
            _made.append(tempfile.TemporaryDirectory(prefix="agentrl-view-", ignore_cleanup_errors=True))
        except OSError as problem:
            text = f"{neither}, and an index of its episodes must lie somewhere ({problem}): {advice}"
            raise RunFolderError(text) from None
        say(f"{neither}: its episodes are read anew, into {_made[0].name} until this ends; {advice}", file=sys.stderr)
    return Path(_made[0].name) / cached.name


def _writable(folder: Path) -> bool:
    rights = os.W_OK | os.X_OK
    return folder.is_dir() and os.access(folder, rights, effective_ids=os.access in os.supports_effective_ids)


_made: list[tempfile.TemporaryDirectory[str]] = []
"""Deleted when this process exits."""


# The index of a run's episodes: an SQLite file, updated by reading only new rows.
#
# For each episode it has the columns to filter and sort by, and the position of its row in the file: a page is a query, an
# episode one seek. A trajectory file of a run appears complete; a growing one (of an evaluation) is continued at the last
# position; a rewritten one is read again. The index is only a cache: if its schema differs or it is damaged, it is rebuilt.

_PRINT = 4096
_BATCH = 2000
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, phase TEXT NOT NULL, step INTEGER NOT NULL,
  inode INTEGER NOT NULL, size INTEGER NOT NULL, mtime INTEGER NOT NULL, done INTEGER NOT NULL, print TEXT NOT NULL,
  rows INTEGER NOT NULL, damaged INTEGER NOT NULL, problem TEXT
);
CREATE TABLE IF NOT EXISTS episodes (
  id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER NOT NULL, row INTEGER NOT NULL, start INTEGER NOT NULL,
  length INTEGER NOT NULL, step INTEGER NOT NULL, phase TEXT NOT NULL, env TEXT NOT NULL, task TEXT NOT NULL,
  seed INTEGER NOT NULL, content TEXT NOT NULL, split TEXT NOT NULL,
  grp INTEGER NOT NULL, member INTEGER NOT NULL, reward REAL, success INTEGER,
  stop TEXT NOT NULL, error TEXT, turns INTEGER NOT NULL, calls INTEGER NOT NULL, tool_errors INTEGER NOT NULL,
  tokens INTEGER NOT NULL, seconds REAL, terms TEXT NOT NULL, gold_answer REAL, gold_calls REAL, repeated REAL NOT NULL,
  judge REAL, judged REAL, did TEXT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS by_row ON episodes (file, row);
CREATE INDEX IF NOT EXISTS by_group ON episodes (file, grp, member);
CREATE INDEX IF NOT EXISTS by_step ON episodes (step, id, phase, env, success, reward);
CREATE INDEX IF NOT EXISTS by_task ON episodes (task, step, success, reward);
CREATE INDEX IF NOT EXISTS by_stop ON episodes (stop, step, success, reward);
CREATE INDEX IF NOT EXISTS by_env ON episodes (env, step, success, reward);
CREATE INDEX IF NOT EXISTS by_phase ON episodes (phase, step, success, reward);
CREATE INDEX IF NOT EXISTS by_reward ON episodes (reward, id);
CREATE INDEX IF NOT EXISTS by_success ON episodes (success, id);
CREATE INDEX IF NOT EXISTS by_tokens ON episodes (tokens, id);
CREATE INDEX IF NOT EXISTS by_turns ON episodes (turns, id);
CREATE INDEX IF NOT EXISTS by_calls ON episodes (calls, id);
CREATE INDEX IF NOT EXISTS by_tool_errors ON episodes (tool_errors, id);
CREATE INDEX IF NOT EXISTS by_seconds ON episodes (seconds, id);
CREATE INDEX IF NOT EXISTS by_gold ON episodes (max(coalesce(gold_answer, 0), coalesce(gold_calls, 0)), reward);
CREATE INDEX IF NOT EXISTS by_repeated ON episodes (repeated);
CREATE INDEX IF NOT EXISTS by_judge ON episodes (judge) WHERE judge IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_did ON episodes (env, task, content, did, judged) WHERE judged IS NOT NULL;
CREATE TABLE IF NOT EXISTS tools (name TEXT, episode INTEGER, count INTEGER, PRIMARY KEY (name, episode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS errors (name TEXT, episode INTEGER, PRIMARY KEY (name, episode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS terms (name TEXT, value REAL, episode INTEGER, PRIMARY KEY (name, episode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures (kind TEXT, reason TEXT, episode INTEGER, PRIMARY KEY (kind, reason, episode)) WITHOUT ROWID;
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, content='', detail=none);
"""
_CODE = Path(__file__).with_name("features.py").read_bytes()
SCHEMA = hashlib.sha256(_TABLES.encode() + _CODE).hexdigest()[:8]
"""Part of the file name: hash of the tables and the code that fills them. Indexes of other versions are left alone."""
_DETAIL_TABLES = ("tools", "errors", "terms", "failures")

FileStates = dict[str, tuple[int, int, int] | None]


class Index:
    """The index of one run. `refresh` may be called from any thread; each `reading` has its own connection."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self._lock = threading.Lock()
        self.path = cache_folder(self.run.path) / f"index-{SCHEMA}.sqlite"
        self._seen: FileStates = {}

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for queries on a consistent state of the index."""
        if not os.path.isfile(self.path):  # noqa: PTH113 - Path's raises in an unsearchable folder
            with self._writing():  # creates it
                pass
        with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, timeout=30, isolation_level=None)) as db:
            db.row_factory = sqlite3.Row
            try:
                db.execute("BEGIN")  # until it is closed
                yield db
            except sqlite3.DatabaseError:
                self._seen = {}  # the next update rebuilds a damaged index
                raise

    def refresh(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Index new lines of the run's files; returns True if there were any. Stops early, between files and parts of them, if
        `stop` returns True. Lines that another process indexes at the same time are not read twice."""
        with self._lock:
            try:
                return self._refresh(stop)
            except sqlite3.DatabaseError as problem:
                # Locked, or the disk is full: the file is intact. SQLITE_ERROR: a table or column is missing.
                if (
                    isinstance(problem, sqlite3.OperationalError)
                    and getattr(problem, "sqlite_errorcode", 0) != sqlite3.SQLITE_ERROR
                ):
                    raise RunFolderError(f"{self.path}: the index cannot be written: {problem}") from None
                self._drop()
                return self._refresh(stop)

    def progress(self) -> tuple[int, int]:
        """Return the indexed episodes, and an estimate of all episodes in the run's files."""
        with self.reading() as db:
            known = {row["name"]: row for row in db.execute("SELECT name, rows - damaged AS rows, done FROM files")}
        rows = sum(row["rows"] for row in known.values())
        if self._seen:  # everything was read by the last update
            return rows, rows
        done = sum(row["done"] for row in known.values())
        size = sum(file_size(file.path) for file in self.run.files)
        return rows, (max(rows, round(rows * size / done)) if done else (1 if size else 0))

    # -- writing -------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if not self.run.path.is_dir():
            raise RunFolderError(f"{self.run.path}: the run folder no longer exists")
        self.path = cache_folder(self.run.path) / f"index-{SCHEMA}.sqlite"
        try:
            # Without parents inside a run: a folder that was just deleted must not reappear.
            self.path.parent.mkdir(parents=not self.path.is_relative_to(self.run.path), exist_ok=True)
        except FileNotFoundError:
            raise RunFolderError(f"{self.run.path}: the run folder no longer exists") from None
        except OSError as problem:
            raise RunFolderError(f"{self.run.path}: the index cannot be made in {self.path.parent}: {problem.strerror}") from None
        with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=WAL")  # readers continue during a write
            db.execute("PRAGMA synchronous=OFF")  # it can be rebuilt
            db.execute("PRAGMA cache_size=-65536")
            db.executescript(_TABLES)
            yield db

    def _drop(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _refresh(self, stop: Callable[[], bool]) -> bool:
        changed, files = False, self.run.files
        states = {file.name: _file_state(file.path) for file in files}
        if states == self._seen and os.path.isfile(self.path):  # noqa: PTH113
            return False  # without a connection: viewing an ended run changes nothing in its folder
        with self._writing() as db:
            known = {row[0]: row[1:] for row in db.execute("SELECT name, inode, size, mtime FROM files")}
            for gone in known.keys() - {file.name for file in files}:
                with _transaction(db):
                    _delete_file(db, gone)
                changed = True
            for file in files:
                more = known.get(file.name) != states[file.name]
                while more and not stop():
                    more = _index_rows(db, file)
                    changed = True
        self._seen = {} if stop() else states
        return changed


def _index_rows(db: sqlite3.Connection, file: EpisodeFile) -> bool:
    """Index the next rows of a file; returns whether there may be more."""
    try:
        handle = open_plain(file.path)
    except FileNotFoundError:  # deleted since it was listed
        return False
    except OSError as fault:
        with _transaction(db):
            _delete_file(db, file.name)  # retry on the next update
            db.execute(
                "INSERT INTO files (name, phase, step, inode, size, mtime, done, print, rows, damaged, problem) "
                "VALUES (?,?,?,0,0,0,0,'',0,0,?)",
                (file.name, file.phase, file.step, str(fault)),
            )
        return False
    with handle, _transaction(db):
        stat = os.fstat(handle.fileno())
        # Check again under the lock: another process may have indexed them.
        known = db.execute("SELECT * FROM files WHERE name = ?", (file.name,)).fetchone()
        if known is not None and (known["inode"], known["size"], known["mtime"]) == _file_state(handle.fileno()):
            return False
        if known is not None:
            done = known["done"]
            grown = known["inode"] == stat.st_ino and done <= stat.st_size
            if not (grown and known["print"] == _fingerprint(handle, done)):  # not the file that was read before
                _delete_file(db, file.name)
                known = None
        return _read_rows(db, file, handle, stat, known)


def _file_state(path: Path | int) -> tuple[int, int, int] | None:
    """Return inode, size and change time, which detect changes; None for a missing file."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - also works with an open file
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.row_factory = sqlite3.Row
    db.execute("BEGIN IMMEDIATE")
    with db:  # commits or rolls back
        yield


def file_size(path: Path) -> int:
    """Return the size in bytes; 0 for an inaccessible file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fingerprint(handle: BinaryIO, end: int) -> str:
    """Hash the first and last bytes before `end`, which detects a file rewritten in place."""
    handle.seek(0)
    digest = hashlib.sha256(handle.read(min(_PRINT, end)))
    handle.seek(max(end - _PRINT, 0))
    digest.update(handle.read(min(_PRINT, end)))
    return digest.hexdigest()


def _read_rows(
    db: sqlite3.Connection, file: EpisodeFile, handle: BinaryIO, stat: os.stat_result, known: sqlite3.Row | None
) -> bool:
    """Index up to `_BATCH` rows after the known ones, and store the position; returns whether there may be more."""
    if known is None:
        found = db.execute(
            "INSERT INTO files (name, phase, step, inode, size, mtime, done, print, rows, damaged) VALUES (?,?,?,?,?,?,0,'',0,0)",
            (file.name, file.phase, file.step, stat.st_ino, stat.st_size, stat.st_mtime_ns),
        )
        ident, done, row, damaged, problem = int(found.lastrowid or 0), 0, 0, 0, None
    else:
        ident, done, row = known["id"], known["done"], known["rows"]
        damaged, problem = known["damaged"], known["problem"]
    groups = Groups(db, ident)
    handle.seek(done)
    count = 0
    while count < _BATCH:
        line = handle.readline()
        if not line.endswith(b"\n"):
            break
        try:
            features = features_of(read_json(line))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IndexError, OverflowError) as fault:
            damaged += 1
            problem = problem or f"row {row + 1}: {type(fault).__name__}: {fault}"[:300]
        else:
            place = {"file": ident, "row": row, "start": done, "length": len(line), "step": file.step, "phase": file.phase}
            columns = {**place, "grp": groups.of(features), **features.columns}
            marks = ", ".join("?" * len(columns))
            added = db.execute(f"INSERT INTO episodes ({', '.join(columns)}) VALUES ({marks})", tuple(columns.values()))
            at = int(added.lastrowid or 0)
            db.executemany("INSERT INTO tools VALUES (?,?,?)", [(name, at, used) for name, used in features.tools.items()])
            db.executemany("INSERT INTO errors VALUES (?,?)", [(name, at) for name in features.errors])
            db.executemany("INSERT INTO terms VALUES (?,?,?)", [(name, value, at) for name, value in features.terms.items()])
            db.executemany("INSERT INTO failures VALUES (?,?,?)", [(*failure, at) for failure in features.failures])
            db.execute("INSERT INTO words (rowid, text) VALUES (?,?)", (at, features.text))
        row, done, count = row + 1, done + len(line), count + 1
    whole = count < _BATCH
    # While there are more rows, store the size read so far, so that the next update continues.
    size, changed = (stat.st_size, stat.st_mtime_ns) if whole else (done, 0)
    db.execute(
        "UPDATE files SET inode=?, size=?, mtime=?, done=?, print=?, rows=?, damaged=?, problem=? WHERE id=?",
        (stat.st_ino, size, changed, done, _fingerprint(handle, done), row, damaged, problem, ident),
    )
    return not whole


class Groups:
    """Number groups of a file as `agentrl.data.rows.number_groups`: episodes of one task form a group, and a repeated member
    starts the next one."""

    def __init__(self, db: sqlite3.Connection, file: int) -> None:
        self._current: dict[tuple[Any, ...], tuple[int, set[int]]] = {}
        self._file, self._db = file, db
        row = db.execute("SELECT max(grp) FROM episodes WHERE file = ?", (file,)).fetchone()
        self._next = 0 if row[0] is None else int(row[0]) + 1
        self._first = row[0] is None

    def of(self, features: Features) -> int:
        """Return the group of the next episode."""
        member = int(features.columns["member"])
        task = tuple(features.columns[name] for name in ("env", "task", "seed"))
        found = self._current.get(task)
        if found is None and not self._first:  # the task's newest group among rows indexed earlier
            rows = self._db.execute(
                "SELECT grp, member FROM episodes WHERE file = ? AND env = ? AND task = ? AND seed = ? ORDER BY grp DESC",
                (self._file, *task),
            ).fetchall()
            found = (rows[0][0], {row[1] for row in rows if row[0] == rows[0][0]}) if rows else None
        if found is None or member in found[1]:
            found = (self._next, set())
            self._next += 1
        found[1].add(member)
        self._current[task] = found
        return found[0]


def _delete_file(db: sqlite3.Connection, name: str) -> None:
    """Delete a file's episodes. Their words remain, but match nothing, because episode numbers are not reused."""
    ident = db.execute("SELECT id FROM files WHERE name = ?", (name,)).fetchone()
    if ident is not None:
        for table in _DETAIL_TABLES:
            db.execute(f"DELETE FROM {table} WHERE episode IN (SELECT id FROM episodes WHERE file = ?)", (ident[0],))
        db.execute("DELETE FROM episodes WHERE file = ?", (ident[0],))
        db.execute("DELETE FROM files WHERE id = ?", (ident[0],))
