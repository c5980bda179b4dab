"""Read one episode from its file, and its ledgers' tokens as columns."""

from __future__ import annotations

import functools
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.contrib.view.queries import COLUMNS, FROM, NotFoundError
from agentrl.data.images import by_digest
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Trajectory
from agentrl.run.reader import EpisodeFile, RunRecord, token_columns
from agentrl.utils.errors import RunFolderError, UserError
from agentrl.utils.files import open_plain
from agentrl.utils.parsing import read_json

Json = Any
MOST = 20_000


def columns(run: RunRecord, row: sqlite3.Row, found: Mapping[str, Json], at: int, offset: int, limit: int) -> dict[str, Json]:
    """Return tokens `offset` to `offset + limit` of ledger `at` of an episode, with null for missing numbers. Raises UserError
    for an unknown ledger."""
    ledgers = Trajectory.from_json(found).ledgers
    if not 0 <= at < len(ledgers):
        raise UserError(f"ledger={at}: the episode has {len(ledgers)} ledgers")
    ledger, part = ledgers[at], slice(offset, offset + limit)
    sampled = ledger.sampled
    trained, lost = _trained_tokens(run, row, ledgers, at)
    ids = ledger.token_ids[part].tolist()
    texts, why = _texts(run, ids)
    out = {
        "text": texts,
        "id": ids,
        "sampled": sampled[part].tolist(),
        "logprob": _spread(sampled, ledger.logprobs[sampled])[part],
        "version": _spread(sampled, ledger.versions[sampled])[part],
        "turn": ledger.turns[part].tolist(),
        "advantage": None,
        "ratio": None,
        "total": len(ledger),
        "offset": offset,
        "text_problem": why,
        "trained_problem": lost,
    }
    if trained is not None:
        out["advantage"] = _spread(sampled, trained[0])[part]
        out["ratio"] = None if trained[1] is None else _spread(sampled, trained[1])[part]
    return out


def _spread(sampled: Any, values: Any) -> list[float | int | None]:
    """Spread values of sampled tokens over all tokens."""
    out: list[float | int | None] = [None] * len(sampled)
    for place, value in zip(np.flatnonzero(sampled).tolist(), values.tolist(), strict=True):
        out[place] = value
    return out


def _trained_tokens(run: RunRecord, row: sqlite3.Row, ledgers: Sequence[TokenLedger], at: int) -> tuple[Any, str | None]:
    """Return advantages and ratios, if the run has stored them, or the reason why they cannot be read."""
    path = run.folder.tokens / f"{row['id'].rpartition('.')[0]}.jsonl"
    try:
        stat = path.stat()
        place = _lines(path, stat.st_ino, stat.st_size)[row["row"] : row["row"] + 2]
        if len(place) < 2:
            return None, None  # not written yet
        with open_plain(path) as file:
            file.seek(place[0])
            return token_columns(read_json(file.read(place[1] - place[0])), ledgers, at), None
    except FileNotFoundError:
        return None, None
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as fault:  # also of another version
        return None, f"{path}:{row['row'] + 1}: {type(fault).__name__}: {fault}"[:300]


@functools.lru_cache(maxsize=64)
def _lines(path: Path, inode: int, size: int) -> list[int]:
    """Return the offset of each line of a file, and the end of the last one."""
    starts = [0]
    with open_plain(path) as file:
        for line in file:
            starts.append(starts[-1] + len(line))
    return starts


def _texts(run: RunRecord, ids: Sequence[int]) -> tuple[list[str | None], str | None]:
    """Return each token's text, or the reason why it is unknown. A character of several tokens is shown at the last one."""
    path = tokenizer_file(run)
    if path is None:
        return [None] * len(ids), "no tokenizer of the run's model is on this machine"
    try:
        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
        alone: list[str] = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        out: list[str | None] = [*alone]
        begun = 0
        for place, text in enumerate(alone):
            if "\ufffd" not in text:
                begun = place + 1
                continue
            # Join the tokens of one character, at most four bytes, until it is complete.
            whole = tokenizer.decode(list(ids[begun : place + 1]), skip_special_tokens=False)
            if "\ufffd" not in whole:
                out[begun : place + 1] = [""] * (place - begun) + [whole]
                begun = place + 1
            elif place - begun >= 3:
                begun += 1
        return out, None
    except Exception as problem:  # the Rust library has no exception class of its own
        return [None] * len(ids), f"{path}: {problem}"


@functools.lru_cache(maxsize=4)
def _tokenizer(path: Path, changed: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def tokenizer_file(run: RunRecord) -> Path | None:
    """Find the tokenizer.json of the run's model: in its folder, at `model.path`, or in the hub's cache; else None."""
    folder = run.folder
    folders = [folder.model, folder.warm_start, folder.final]
    given = None
    if run.text:
        model = run.table.get("model")
        given = model.get("path") if isinstance(model, dict) else None
    for name in () if run.text else ("eval.json", "rollout.json"):  # of an evaluation or rollout
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            given = given or read_json((run.path / name).read_text())["identity"].get("model.path")
    if isinstance(given, str):
        folders.append(Path(given))
    for place in folders:
        if os.path.isfile(place / "tokenizer.json"):  # noqa: PTH113 - Path.is_file raises in an unreadable folder
            return place / "tokenizer.json"
    if not isinstance(given, str) or given.startswith((".", "/")) or ":" in given:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(given, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


_KEPT = (
    *("env_id", "seed", "messages", "evidence", "metrics", "state", "timings", "tools", "rewrites", "cause", "agent"),
    *("user_calls", "parting"),
    *("terminated", "truncated"),
)
_OF_TURN = ("index", "prompt_tokens", "seconds", "reward", "ledger", "finish", "usd", "value")
_ID = re.compile(r"([a-z]+(?:_\d+)?)\.(\d+)")


def find(db: sqlite3.Connection, ident: str) -> sqlite3.Row:
    """Return an episode's index row. Raises NotFoundError."""
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


def stored_row(run: RunRecord, row: sqlite3.Row) -> dict[str, Json]:
    """Read the episode's row from its file as JSON. Raises RunFolderError if the file was rewritten since it was indexed."""
    file = file_of(run, row)
    try:
        with file.path.open("rb") as lines:
            if os.fstat(lines.fileno()).st_ino == row["inode"]:
                lines.seek(row["start"])
                found: dict[str, Json] = read_json(lines.read(row["length"]))
                return found
    except (OSError, ValueError):
        pass
    raise RunFolderError(f"{file.path}: it was rewritten since it was indexed; ask again")


@contextmanager
def name_damage(run: RunRecord, row: sqlite3.Row) -> Iterator[None]:
    """Raise RunFolderError, with file and line, for an episode's row of invalid form."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        where = f"{file_of(run, row).path}:{row['row'] + 1}"
        raise RunFolderError(f"{where}: damaged: {type(fault).__name__}: {fault}"[:300]) from None


def file_of(run: RunRecord, row: sqlite3.Row) -> EpisodeFile:
    """Return the file of an episode's row. Raises RunFolderError if it does not exist."""
    name = row["id"].rpartition(".")[0]
    for file in run.files:
        if file.name == name:
            return file
    raise RunFolderError(f"{run.path}: {name}.jsonl is not there any more")


def detail(found: Mapping[str, Json], row: sqlite3.Row, db: sqlite3.Connection) -> dict[str, Json]:
    """Return an episode as the page shows it, without its row's columns."""
    task = found["task"]
    ledgers = found.get("ledgers") or []
    versions = _versions(ledgers)
    images = found.get("images") or {}
    turns = []
    for turn in found["turns"]:
        message = turn["message"]
        tools = sum(result.get("seconds") or 0.0 for result in turn["results"])  # executed sequentially
        sampled_by = versions.get(turn.get("index"), [])
        turns.append({
            **{name: turn.get(name) for name in _OF_TURN},
            "message": message,
            "calls": message.get("tool_calls") or [],
            "results": [_with_pictures(result, images) for result in turn["results"]],
            "tokens": turn.get("sampled_tokens"),
            "timings": {"sampling_s": max((turn.get("seconds") or 0.0) - tools, 0.0), "tools_s": tools},
            "versions": sampled_by, "version": next(iter(sampled_by), None),
        })  # fmt: skip
    # The previous and next episode in its file and in its group.
    near: dict[str, Json] = {}
    for name, where, order in (("prev", "<", "DESC"), ("next", ">", "ASC")):
        neighbour = db.execute(
            f"SELECT f.name || '.' || e.row {FROM} WHERE e.file = ? AND e.row {where} ? ORDER BY e.row {order} LIMIT 1",
            (row["file"], row["row"]),
        ).fetchone()
        near[name] = None if neighbour is None else str(neighbour[0])
    same = f"SELECT f.name || '.' || e.row {FROM} WHERE e.file = ? AND e.grp = ? ORDER BY e.member"
    near["group"] = [member[0] for member in db.execute(same, (row["file"], row["grp"]))]
    kept = {name: found.get(name) for name in _KEPT}
    # Tool messages are shown as results of their turns.
    kept["messages"] = [m if m["role"] == "tool" else _with_pictures(m, images) for m in found["messages"]]
    spans = [ledger.get("spans") or [] for ledger in ledgers]
    sizes = [{"tokens": sum(s[0] for s in found), "sampled": sum(s[0] for s in found if s[2] >= 0)} for found in spans]
    of_task = {"task_seed": task.get("seed"), "data": task.get("data"), "gold": task.get("gold")}
    return {**kept, **of_task, "turns": turns, "ledgers": sizes, "neighbours": near}


def _with_pictures(item: Mapping[str, Json], images: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return a message or result with its images for the page; an image that does not match its digest becomes a note."""
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
    """Return the weight versions that sampled each turn, oldest first."""
    out: dict[int, set[int]] = {}
    for ledger in ledgers:
        for _, turn, version in ledger.get("spans") or []:
            if version >= 0:
                out.setdefault(turn, set()).add(version)
    return {turn: sorted(found) for turn, found in out.items()}
