"""One episode, read from its file by where its row lies."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from agentrl.errors import RunFolderError
from agentrl.images import by_digest
from agentrl.plain_data import read_json
from agentrl.run.reader import EpisodeFile, RunRecord
from agentrl.view.queries import COLUMNS, FROM, NotFoundError

Json = Any
_KEPT = (
    *("env_id", "seed", "messages", "evidence", "metrics", "state", "timings", "tools", "rewrites", "cause", "agent"),
    *("user_calls", "parting"),
    *("terminated", "truncated"),
)
_ID = re.compile(r"([a-z]+(?:_\d+)?)\.(\d+)")


def find(db: sqlite3.Connection, ident: str) -> sqlite3.Row:
    """The index's row of an episode. Raises NotFoundError."""
    parts = _ID.fullmatch(ident)
    found, why = None, ""
    if parts is not None:
        file = db.execute("SELECT id, problem FROM files WHERE name = ?", (parts[1],)).fetchone()
        why = f"; trajectories/{parts[1]}.jsonl is not there"
        if file is not None:
            why = f"; {parts[1]}.jsonl: {file[1]}" if file[1] else ""
            rows = db.execute("SELECT count(*) FROM episodes WHERE file = ?", (file[0],)).fetchone()[0]
            why = why or f"; {parts[1]} has {rows} episodes, from 0 on"
            found = db.execute(f"SELECT {COLUMNS} {FROM} WHERE e.file = ? AND e.row = ?", (file[0], int(parts[2]))).fetchone()
    if found is None:
        first = db.execute("SELECT f.name, e.row FROM episodes e JOIN files f ON f.id = e.file LIMIT 1").fetchone()
        example = f", for example {first[0]}.{first[1]}" if first else ": there are no episodes yet"
        raise NotFoundError(f"there is no episode {ident!r}; expected FILE.ROW{example}{why}")
    row: sqlite3.Row = found
    return row


def stored(run: RunRecord, row: sqlite3.Row) -> dict[str, Json]:
    """The episode's row in its file, as JSON. Raises RunFolderError if the file was written anew since it was indexed."""
    file = file_of(run, row["id"].rpartition(".")[0])
    try:
        with file.path.open("rb") as lines:
            if os.fstat(lines.fileno()).st_ino == row["inode"]:
                lines.seek(row["start"])
                found: dict[str, Json] = read_json(lines.read(row["length"]))
                return found
    except (OSError, ValueError):
        pass
    raise RunFolderError(f"{file.path}: it was written anew meanwhile; ask again")


def file_of(run: RunRecord, name: str) -> EpisodeFile:
    """The file of that name. Raises RunFolderError if it is gone."""
    for file in run.files:
        if file.name == name:
            return file
    raise RunFolderError(f"{run.path}: {name}.jsonl is not there any more")


def detail(found: Mapping[str, Json], row: sqlite3.Row, db: sqlite3.Connection) -> dict[str, Json]:
    """What the page shows of an episode, beside the columns of its row."""
    task = found["task"]
    ledgers = found.get("ledgers") or []
    versions = _versions(ledgers)
    images = found.get("images") or {}
    turns = []
    for turn in found["turns"]:
        message = turn["message"]
        turns.append(
            {
                "index": turn.get("index"),
                "message": message,
                "calls": message.get("tool_calls") or [],
                "results": [_pictured(result, images) for result in turn["results"]],
                "tokens": turn.get("sampled_tokens"),
                "prompt_tokens": turn.get("prompt_tokens"),
                "seconds": turn.get("seconds"),
                "timings": _timings(turn),
                "versions": versions.get(turn.get("index"), []),
                "version": next(iter(versions.get(turn.get("index"), [])), None),
                "reward": turn.get("reward"),
                "ledger": turn.get("ledger"),
                "finish": turn.get("finish"),
                "usd": turn.get("usd"),
            }
        )
    kept = {name: found.get(name) for name in _KEPT}
    # Messages of tools are shown as results of their turns.
    kept["messages"] = [m if m["role"] == "tool" else _pictured(m, images) for m in found["messages"]]
    return {
        **kept,
        "task_seed": task.get("seed"),
        "data": task.get("data"),
        "gold": task.get("gold"),
        "turns": turns,
        "ledgers": [_ledger(ledger) for ledger in ledgers],
        "neighbours": _neighbours(db, row),
    }


def _ledger(ledger: Mapping[str, Json]) -> dict[str, int]:
    spans = ledger.get("spans") or []
    return {"tokens": sum(span[0] for span in spans), "sampled": sum(span[0] for span in spans if span[2] >= 0)}


def _pictured(item: Mapping[str, Json], images: Mapping[str, Json]) -> Mapping[str, Json]:
    """A message or result with its images as the page shows them; one whose bytes are not those of its digest as the reason."""
    if not item.get("images"):
        return item
    shown: list[dict[str, str]] = []
    for digest in item["images"]:
        try:
            image = by_digest({digest: images[digest]})[digest]
            shown.append({"src": f"data:{image.media_type};base64,{image.data}", "alt": image.line})
        except (KeyError, TypeError, ValueError) as problem:
            shown.append({"src": "", "alt": f"[an image that cannot be shown: {problem}]"})
    return {**item, "images": shown}


def _versions(ledgers: list[Mapping[str, Json]]) -> dict[int, list[int]]:
    """The versions of the weights that sampled each turn, oldest first."""
    out: dict[int, set[int]] = {}
    for ledger in ledgers:
        for _, turn, version in ledger.get("spans") or []:
            if version >= 0:
                out.setdefault(turn, set()).add(version)
    return {turn: sorted(found) for turn, found in out.items()}


def _timings(turn: Mapping[str, Json]) -> dict[str, float]:
    """Seconds of a turn: `sampling_s`, and `tools_s`, of its calls one after the other."""
    tools = sum(result.get("seconds") or 0.0 for result in turn["results"])
    return {"sampling_s": max((turn.get("seconds") or 0.0) - tools, 0.0), "tools_s": tools}


def _neighbours(db: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Json]:
    """The episodes before and after it in its file, and those of its group."""

    def one(where: str, order: str) -> str | None:
        found = db.execute(
            f"SELECT f.name || '.' || e.row {FROM} WHERE e.file = ? AND e.row {where} ? ORDER BY e.row {order} LIMIT 1",
            (row["file"], row["row"]),
        ).fetchone()
        return None if found is None else str(found[0])

    same = f"SELECT f.name || '.' || e.row {FROM} WHERE e.file = ? AND e.grp = ? ORDER BY e.member"
    group = [found[0] for found in db.execute(same, (row["file"], row["grp"]))]
    return {"prev": one("<", "DESC"), "next": one(">", "ASC"), "group": group}
