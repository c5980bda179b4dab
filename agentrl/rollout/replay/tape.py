"""The record of a run: every answer that came from outside the loop, one JSON line each, in order of arrival.

    {"episode": "heldout3.m0", "kind": "engine", "call": 2, "asked": digest, "ask": {...}, "answer": {...}, "sum": ...}

`kind` is what was called: `engine`, `reset`, `step` and `end` (the environment: its answers include its tools and its
simulated user), `judge`, `replay_env` (the environment of a replay of calls), `replay_failed` (a replay of calls, if it
failed), `transcript` (an API model's numbered messages); `done` closes an episode with its outcome, `whole` holds an
episode that a timeout cut, or its scoring. `call` counts within (episode, kind), `asked` is the digest of the whole
request. `sum` chains every line to the previous ones, so an edited, missing or inserted line is detected when the record
is read (protects against mistakes, not against attacks: anybody can compute a new chain).

A `reset` starts its episode from scratch: what an interrupted attempt left before it does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import ReplayError
from agentrl.files import full_disk_said, naming
from agentrl.plain_data import json_text, read_json
from agentrl.redaction import redact
from agentrl.trajectory import Json, Trajectory
from agentrl.watchdog import EPISODE

CONTINUED = "repeat the command: the record goes on after its last whole episode"


@contextmanager
def in_episode(key: str) -> Iterator[None]:
    """All requests made inside (also in tasks and threads started there) belong to this episode."""
    token = EPISODE.set(key)
    try:
        yield
    finally:
        EPISODE.reset(token)


def current_episode() -> str:
    """The key of the episode that this code runs for; "" outside an episode."""
    return EPISODE.get()


def canonical(value: Json) -> str:
    """The same text for equal JSON values. Raises TypeError for values that JSON cannot represent."""
    return json_text(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def digest(value: Json) -> str:
    """The first 16 hexadecimal digits of SHA-256 over the canonical text, as a record has it: without known secrets."""
    text = redact(canonical(value))
    if not text.isascii():  # two surrogates of one character are that character for whoever reads them from a file
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def content_of(trajectory: Trajectory) -> Json:
    """What a replay must reproduce: a trajectory without times measured around the whole episode, and without
    success, which follows from the rest (so that older records, which lack it, stay valid)."""
    row = trajectory.to_json()
    del row["timings"], row["cause"], row["success"]
    if isinstance(row["evidence"], dict):
        row["evidence"] = {key: value for key, value in row["evidence"].items() if key != "success"}
    return row


def outcome_of(trajectory: Trajectory) -> dict[str, Json]:
    """How an episode came out, as its record ends and as a replay of it must."""
    return {
        "reward": trajectory.reward,
        "stop": trajectory.stop.value,
        "error": trajectory.error,
        "metrics": trajectory.metrics,
        "trajectory": digest(content_of(trajectory)),
    }


class Numbers:
    """Numbers the calls of each (episode, kind) from 0, for a replay."""

    def __init__(self) -> None:
        self._next: Counter[tuple[str, str]] = Counter()

    def next(self, episode: str, kind: str) -> int:
        """The number of the call that is made now."""
        self._next[episode, kind] += 1
        return self._next[episode, kind] - 1


class RecordWriter:
    """Appends rows; safe from several threads. An existing record is continued after its last whole line."""

    def __init__(self, path: Path) -> None:
        """Raises ReplayError if the file exists but is not an unbroken record."""
        self._path, self._lock = path, threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: dict[str, list[int]] = {}
        self._sum = ""
        if path.exists():
            # A kill may have cut the last line short; the chain continues from the last whole one.
            whole = path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]
            rows = _rows(path, whole.decode("utf-8", "surrogatepass"))
            self._sum = rows[-1]["sum"] if rows else ""
            os.truncate(path, len(whole))  # and not written again: a disk that is full then would cost the record
        # What JSON in UTF-8 lacks, a lone surrogate, is then written as JSON's own escape, and read back as it was.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def begin(self, episode: str) -> None:
        """Count the episode's calls from 0."""
        with self._lock:
            for key in [key for key in self._counts if _of(key[0], episode)]:
                del self._counts[key]
            for name in [name for name in self._known if _of(name, episode)]:
                del self._known[name]

    def number(self, episode: str, kind: str) -> int:
        """The number of the call that starts now."""
        with self._lock:
            self._counts[episode, kind] += 1
            return self._counts[episode, kind] - 1

    def add(self, episode: str, kind: str, call: int, ask: Json, answer: Json, *, asked: str | None = None) -> None:
        """Append one row. `asked`: the digest of the whole question if `ask` is a shortened form of it."""
        row = {"episode": episode, "kind": kind, "call": call, "asked": asked or digest(ask), "ask": ask, "answer": answer}
        text = json_text(row, ensure_ascii=False)
        if (clean := redact(text)) != text:
            row = json.loads(clean)
        with self._lock:
            self._sum = _chained(self._sum, row)
            with full_disk_said(self._path, CONTINUED), naming(self._path):
                self._file.write(json_text({**row, "sum": self._sum}, ensure_ascii=False) + "\n")
                self._file.flush()  # a killed process loses at most the line being written

    def prompt(self, episode: str, token_ids: Sequence[int], sampled: Sequence[int]) -> dict[str, Json]:
        """A prompt as the difference from the episode's sequence so far, which is then extended by `sampled`."""
        with self._lock:
            known = self._known.get(episode, [])
            keep = common(known, token_ids)
            self._known[episode] = [*token_ids, *sampled]
            return {"keep": keep, "ids": list(token_ids[keep:])}

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


@dataclass(slots=True)
class TapeRow:
    """One line of a record."""

    episode: str
    kind: str
    call: int
    asked: str
    ask: Json
    answer: Json


@dataclass(slots=True)
class Recorded:
    """A record that was read: rows by (episode, kind, call); those that belong to no episode by digest or number."""

    path: Path
    rows: dict[tuple[str, str, int], TapeRow] = field(default_factory=dict)
    replay_envs: dict[str, Json] = field(default_factory=dict)
    transcripts: dict[str, dict[int, Json]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Raises ReplayError if the file is missing or its lines were changed."""
        if not path.is_file():
            raise ReplayError(f"{path}: there is no record")
        text = path.read_bytes().decode("utf-8", "surrogatepass")
        record = cls(path)
        begun: set[str] = set()
        for raw in _rows(path, text[: text.rfind("\n") + 1]):  # a kill may have cut the last line short
            row = TapeRow(raw["episode"], raw["kind"], raw["call"], raw["asked"], raw["ask"], raw["answer"])
            if row.kind == "replay_env":
                record.replay_envs[row.asked] = row.answer
            elif row.kind == "transcript":
                record.transcripts.setdefault(row.episode, {})[row.call] = row.answer
            else:
                if row.kind == "reset" and row.episode in begun:
                    record.rows = {key: kept for key, kept in record.rows.items() if not _of(key[0], row.episode)}
                begun.add(row.episode)
                record.rows[row.episode, row.kind, row.call] = row
        return record

    @property
    def episodes(self) -> list[str]:
        """Finished episodes, in the order in which they ended."""
        return [key for key, kind, _ in self.rows if kind in ("done", "whole")]

    def take(self, episode: str, kind: str, call: int, ask: Json) -> TapeRow:
        """The row of a call. Raises ReplayError if the record does not have it or it was a different request."""
        row = self.find(episode, kind, call)
        if digest(ask) != row.asked:
            raise diverged(self.path, row, row.ask, ask)
        return row

    def find(self, episode: str, kind: str, call: int) -> TapeRow:
        """The row of a call, whatever its request. Raises ReplayError if the record has none."""
        row = self.rows.get((episode, kind, call))
        if row is not None:
            return row
        ended = self.episodes
        if episode not in ended:
            some = ", ".join(ended[:4]) + (", ..." if len(ended) > 4 else "")
            if any(_of(key[0], episode) for key in self.rows):
                raise ReplayError(
                    f"{self.path}: episode {episode}: the record breaks off inside it ({len(ended)} of its episodes are whole); "
                    "go on with the recording: the command that made it, again"
                )
            raise ReplayError(
                f"{self.path}: episode {episode}: expected one of the {len(ended)} recorded episodes "
                f"({some or 'none'}), got another one"
            )
        made = sum(key[:2] == (episode, kind) for key in self.rows)
        raise ReplayError(
            f"{self.path}: episode {episode}, {kind} call {call}: expected no such call ({made} were recorded), got one"
        )


def diverged(path: Path, row: TapeRow, expected: Json, got: Json) -> ReplayError:
    """The error for a call that differs from the recorded one; names the first difference."""
    place, old, new = first_difference(expected, json.loads(json_text(got)))
    return ReplayError(
        f"{path}: episode {row.episode}, {row.kind} call {row.call}: at {place or '/'} expected {_brief(old)}, got {_brief(new)}"
    )


def first_difference(expected: Json, got: Json, place: str = "") -> tuple[str, Json, Json]:
    """JSON Pointer to the first difference of two values, and both values there (`...` stands for a missing one)."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            if expected.get(key, ...) != got.get(key, ...):
                return first_difference(expected.get(key, "..."), got.get(key, "..."), f"{place}/{key}")
    if isinstance(expected, list) and isinstance(got, list):
        index = common(expected, got)
        old, new = (rows[index] if index < len(rows) else "..." for rows in (expected, got))
        return first_difference(old, new, f"{place}/{index}")
    return place, expected, got


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _of(key: str, episode: str) -> bool:
    """Whether a call's key belongs to the episode: its own, or that of the model that writes its summaries."""
    return key == episode or key.startswith(f"{episode}.")


def _brief(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _rows(path: Path, text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before = ""
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            row = read_json(line)
            stated = row.pop("sum")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ReplayError(f"{path}:{number}: expected a row of a record (one JSON object), got {line[:80]!r}") from None
        got = _chained(before, row)
        if stated != got:
            place = f"episode {row.get('episode')}, {row.get('kind')} call {row.get('call')}"
            raise ReplayError(
                f"{path}:{number}: {place}: the record was changed after it was written: expected sum {stated}, got {got}"
            )
        rows.append({**row, "sum": stated})
        before = stated
    return rows


def _chained(before: str, row: Mapping[str, Json]) -> str:
    return digest([before, dict(row)])
