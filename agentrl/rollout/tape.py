"""The tape: every answer from outside an episode, one JSON line each, in order of arrival; live, recorded or replayed."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from agentrl.data.trajectory import Json, Message, Task, ToolCall, ToolResult, Trajectory, as_row
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.env.users import RecordedUser
from agentrl.reward import Context
from agentrl.reward.leaf import AsTwin, JudgeClient, ReplayEnv
from agentrl.reward.twins import (
    Copies,
    GoldRounds,
    MakeEnv,
    RoundTurns,
    TurnOutcome,
    Twin,
    TwinPass,
    Twins,
    UserSide,
    run_at_once,
    twin_of,
)
from agentrl.reward.values import FailedTwinError
from agentrl.rollout.engine import Engine
from agentrl.utils.errors import ReplayError
from agentrl.utils.event_loop import EPISODE
from agentrl.utils.files import full_disk_said, naming
from agentrl.utils.parsing import json_text, read_json
from agentrl.utils.redaction import redact

# Sources of answers

ReplayEnvMaker = Callable[[Task], ReplayEnv | AsTwin]
Entries = Mapping[int, dict[str, Json]]


class EpisodeIO:
    """Live: passes everything through unchanged. `Recorder` and `Replayer` intercept it. `live`: whether anything outside is
    asked at all."""

    live: ClassVar[bool] = True

    def env(self, ref: EnvRef, episode: str) -> ToolEnv:
        """The environment of one episode."""
        return ref.build()

    def engine(self, make: Callable[[], Engine]) -> Engine:
        """The engine that samples; `make` builds the live one."""
        return make()

    def transcript(self, owner: str) -> tuple[Entries, Callable[[int, Json], None]]:
        """The messages of an API model that already have a number, and a callback for new ones. `owner` distinguishes two
        models of a run."""
        return {}, lambda number, entry: None

    def judge(self, client: JudgeClient) -> JudgeClient:
        """The client that judges."""
        return client

    def replay_env(self, make: ReplayEnvMaker) -> ReplayEnvMaker:
        """The maker of the environments in which calls are replayed; asked for once for each environment of the run, in order."""
        return make

    def replays(self) -> Twins:
        """Player and store of the replays of calls."""
        return Twins()

    def scoring(self, context: Context) -> Context:
        """The context of a reward spec, with its judge and replay environments passed through this object."""
        judge = None if context.judge is None else self.judge(context.judge)
        if context.replay_env is None:
            return replace(context, judge=judge)
        return replace(context, judge=judge, replay_env=self.replay_env(context.replay_env), replays=self.replays())

    def ready(self, episode: str) -> Trajectory | None:
        """The episode's trajectory if the episode need not be run at all."""
        return None

    def ended(self, episode: str, trajectory: Trajectory) -> None:
        """The episode is over and scored."""

    def close(self) -> None:
        """Free all resources; idempotent."""


# The record of a run: every answer that came from outside the loop, one JSON line each, in order of arrival.
#
# {"episode": "heldout3.m0", "kind": "engine", "call": 2, "asked": digest, "ask": {...}, "answer": {...}, "sum": ...}
#
# `kind` is what was called: `engine`, `reset`, `step` and `end` (the environment: its answers include its tools and its
# simulated user), `judge`, `replay_env` (the environment of a replay of calls), `replay_failed` (a replay of calls, if it
# failed), `transcript` (an API model's numbered messages); `done` closes an episode with its outcome, `whole` holds an
# episode that a timeout cut, or its scoring. `call` counts within (episode, kind), `asked` is the digest of the whole
# request. `sum` chains every line to the previous ones, so an edited, missing or inserted line is detected when the record
# is read (protects against mistakes, not against attacks: anybody can compute a new chain).
#
# A `reset` starts its episode from scratch: what an interrupted attempt left before it does not count.

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
    """Content that a replay must reproduce: a trajectory without times measured around the whole episode, and without success,
    which follows from the rest (so that older records, which lack it, stay valid)."""
    row = trajectory.to_json()
    del row["timings"], row["cause"], row["success"]
    if isinstance(row["evidence"], dict):
        row["evidence"] = {key: value for key, value in row["evidence"].items() if key != "success"}
    return row


def outcome_of(trajectory: Trajectory) -> dict[str, Json]:
    """Outcome of an episode, as its record ends and as a replay of it must."""
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
            self._sum = _chain_digest(self._sum, row)
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
            raise divergence_error(self.path, row, row.ask, ask)
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


def divergence_error(path: Path, row: TapeRow, expected: Json, got: Json) -> ReplayError:
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
    """Return True if a call's key belongs to the episode: its own, or that of the model that writes its summaries."""
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
        got = _chain_digest(before, row)
        if stated != got:
            place = f"episode {row.get('episode')}, {row.get('kind')} call {row.get('call')}"
            raise ReplayError(
                f"{path}:{number}: {place}: the record was changed after it was written: expected sum {stated}, got {got}"
            )
        rows.append({**row, "sum": stated})
        before = stated
    return rows


def _chain_digest(before: str, row: Mapping[str, Json]) -> str:
    return digest([before, dict(row)])


# Replays of calls for rewards

_ANSWER = "replay_env"
_FAILED = "replay_failed"


def _begun(of: int, task: Task) -> str:
    return digest(["twin", of, asdict(task)])


class _Course:
    """State on which a twin's next answer depends, as a digest `at` that each turn extends."""

    def __init__(self, of: int, record: Trajectory, scripted: bool) -> None:
        self._heard: list[Json] = RecordedUser.of(record).row()["answers"]
        self._scripted, self._texts = scripted, 0
        self.at = digest([_begun(of, record.task), self._heard[:1]])

    def add(self, turn: Message | ToolCall) -> None:
        """Of a text only what a user hears counts: nobody does if the user is scripted, and so one pass serves many."""
        if isinstance(turn, ToolCall):
            done: Json = {"user": as_row(turn)}
        elif turn.tool_calls:
            done = as_row(turn)
        else:
            self._texts += 1
            said = None if self._scripted else turn.content
            done = {"said": said, "user": self._heard[self._texts : self._texts + 1]}
        self.at = digest([self.at, done])

    @property
    def state(self) -> str:
        return digest([self.at, "state"])


# -- recorded --------------------------------------------------------------------------------------


class RecordingTwins(Twins):
    """Passes of which the failed ones are recorded."""

    def __init__(self, writer: RecordWriter) -> None:
        super().__init__()
        self._writer = writer

    def gold(self, make: MakeEnv, record: Trajectory, gold: Json, rounds: GoldRounds, user_side: UserSide) -> TwinPass:
        return self._noted({"gold": gold}, super().gold(make, record, gold, rounds, user_side))

    def made(self, make: MakeEnv, record: Trajectory, rounds: Sequence[RoundTurns]) -> TwinPass:
        return self._noted({}, super().made(make, record, rounds))

    def _noted(self, ask: Json, played: TwinPass) -> TwinPass:
        number = self._writer.number(current_episode(), _FAILED)
        if isinstance(played.fault, FailedTwinError):
            answer = {"rounds": len(played.ends), "error": str(played.fault)}
            self._writer.add(current_episode(), _FAILED, number, ask, answer)
        return played


class _Log:
    """The rows of the twins of one task."""

    def __init__(self, writer: RecordWriter, of: int, task: Task) -> None:
        self._writer, self.of, self._task = writer, of, task

    def add(self, asked: str, what: str, answer: Json) -> None:
        self._writer.add("", _ANSWER, 0, {"task": self._task.id, "what": what}, answer, asked=asked)


class RecordingReplayEnv:
    """In place of an environment for replays: twins whose answers are recorded."""

    def __init__(self, make: Callable[[Task], Any], of: int, task: Task, writer: RecordWriter) -> None:
        self._make, self._task, self._log = make, task, _Log(writer, of, task)

    def as_twin(self) -> Twin:
        return RecordingTwin(twin_of(self._make(self._task)), self._log)


class RecordingTwin:
    """A twin whose answers are recorded."""

    def __init__(self, twin: Twin, log: _Log) -> None:
        self._twin, self._log = twin, log
        self.scripted = twin.scripted
        self._course: _Course

    @property
    def talks(self) -> bool:
        return self._twin.talks

    def open(self, record: Trajectory) -> None:
        self._twin.open(record)
        self.opened(record)
        self._log.add(_begun(self._log.of, record.task), "begin", {"scripted": self.scripted, "talks": self.talks})

    def opened(self, record: Trajectory) -> None:
        """The twin stands as the record's task begins."""
        self._course = _Course(self._log.of, record, self.scripted)

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        self._course.add(turn)
        taken = await self._twin.take(turn)
        results = [{"call_id": r.call_id, "name": r.name, "content": r.content, "error": r.error} for r in taken.results]
        self._log.add(self._course.at, "turn", {"answers": taken.answers, "results": results, "over": taken.over})
        return taken

    def state(self) -> Json:
        state = self._twin.state()
        self._log.add(self._course.state, "state", state)
        return state

    def copies(self) -> Copies | None:
        made = self._twin.copies()
        return None if made is None else RecordingCopies(made, self._log)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._twin.run(work)

    def close(self) -> None:
        self._twin.close()


class RecordingCopies:
    """Makes recording twins of copies."""

    def __init__(self, copies: Copies, log: _Log) -> None:
        self._copies, self._log, self.size = copies, log, copies.size

    def twin(self, record: Trajectory) -> Twin:
        twin = RecordingTwin(self._copies.twin(record), self._log)
        twin.opened(record)
        return twin


# -- replayed --------------------------------------------------------------------------------------


class TapedTwins(Twins):
    """Passes of which those fail that failed under the record."""

    def __init__(self, record: Recorded) -> None:
        super().__init__()
        self._tape, self._numbers = record, Numbers()

    def gold(self, make: MakeEnv, record: Trajectory, gold: Json, rounds: GoldRounds, user_side: UserSide) -> TwinPass:
        failed = self._failed({"gold": gold})
        if failed is None:
            return super().gold(make, record, gold, rounds, user_side)
        return self._until(failed, make, record, rounds()[0], gold=True)

    def made(self, make: MakeEnv, record: Trajectory, rounds: Sequence[RoundTurns]) -> TwinPass:
        failed = self._failed({})
        return super().made(make, record, rounds) if failed is None else self._until(failed, make, record, rounds)

    def _failed(self, ask: Json) -> Mapping[str, Json] | None:
        """Error of this replay. Raises ReplayError if it was another one that did."""
        episode = current_episode()
        number = self._numbers.next(episode, _FAILED)
        if (episode, _FAILED, number) not in self._tape.rows:
            return None
        found: Mapping[str, Json] = self._tape.take(episode, _FAILED, number, ask).answer
        return found

    def _until(
        self, failed: Mapping[str, Json], make: MakeEnv, record: Trajectory, rounds: Sequence[RoundTurns], gold: bool = False
    ) -> TwinPass:
        """The rounds before the fault, and the fault."""
        before = rounds[: failed["rounds"]]
        played = self._play(self._of(record.task), make, record, before, gold=gold) if before else TwinPass()
        played.fault = played.fault or FailedTwinError(failed["error"])
        return played


class TapedReplayEnv:
    """In place of an environment for replays: twins from the record."""

    def __init__(self, record: Recorded, of: int, task: Task) -> None:
        self._tape, self._of, self._task = record, of, task

    def as_twin(self) -> Twin:
        """Raises ReplayError if the record has none of the task."""
        row = self._tape.replay_envs.get(_begun(self._of, self._task))
        if row is None:
            raise ReplayError(
                f"{self._tape.path}: episode {current_episode()}: it has no replays of calls of task {self._task.id} (was it "
                "recorded by an older version, or with another reward spec?); record it again (--record)"
            )
        return TapedTwin(self._tape, self._of, row)


class TapedTwin:
    """A twin that answers what the recorded one answered."""

    def __init__(self, record: Recorded, of: int, row: Mapping[str, Json]) -> None:
        self._tape, self._of, self.scripted, self.talks = record, of, bool(row["scripted"]), bool(row["talks"])
        self._task, self._turns = "", 0
        self._course: _Course

    def open(self, record: Trajectory) -> None:
        self._course, self._task = _Course(self._of, record, self.scripted), record.task.id

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        self._course.add(turn)
        self._turns += 1
        answer = self._find(self._course.at, turn)
        results = [ToolResult(row["call_id"], row["name"], row["content"], None, row["error"]) for row in answer["results"]]
        return TurnOutcome(answer["answers"], results, answer["over"])

    def state(self) -> Json:
        return self._find(self._course.state, "the state")

    def copies(self) -> None:
        return None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        run_at_once(work)

    def close(self) -> None: ...

    def _find(self, asked: str, what: object) -> Json:
        if asked not in self._tape.replay_envs:
            raise ReplayError(
                f"{self._tape.path}: episode {current_episode()}, replay of calls {self._turns} of task {self._task}: "
                f"expected one of the recorded calls, got {what}"
            )
        return self._tape.replay_envs[asked]
