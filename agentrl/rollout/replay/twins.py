"""Twins of a recorded run: what a replay of calls answered is stored by what was done so far, because episodes share it."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from agentrl.env.userside import RecordedUser
from agentrl.errors import ReplayError
from agentrl.reward.twins import Taken, Twin, run_at_once, twin_of
from agentrl.rollout.replay.tape import Recorded, RecordWriter, current_episode, digest
from agentrl.trajectory import Json, Message, Task, ToolCall, ToolResult, Trajectory

_KIND = "replay_env"


class Deeds:
    """What was done on a twin so far, as JSON: its task, its turns, and what its user, who answers as the record's did, answered.
    What the policy said is left out if that decides nothing (`scripted`)."""

    def __init__(self, record: Trajectory, scripted: bool) -> None:
        self.done: list[Json] = [asdict(record.task)]
        self._heard: list[Json] = RecordedUser.of(record).row()["answers"]
        self._scripted, self._texts = scripted, 0
        if any(made.turn < 0 for made in record.user_calls):
            self.done.append({"opening": self._heard[0]})

    def add(self, turn: Message | ToolCall) -> None:
        if isinstance(turn, ToolCall):
            self.done.append({"user": asdict(turn)})
        elif turn.tool_calls:
            self.done.append(asdict(turn))
        else:
            self._texts += 1
            answer = self._heard[self._texts] if self._texts < len(self._heard) else None
            self.done.append({"answer": answer, "text": None if self._scripted else turn.content})


class RecordingReplayEnv:
    """An environment for replays whose answers are recorded."""

    def __init__(self, env: Any, writer: RecordWriter) -> None:
        self._env, self._writer = env, writer

    def as_twin(self) -> Twin:
        return RecordingTwin(twin_of(self._env), self._writer)


class RecordingTwin:
    """A twin whose answers are recorded."""

    def __init__(self, twin: Twin, writer: RecordWriter) -> None:
        self._twin, self._writer = twin, writer
        self.scripted = twin.scripted
        self._course: Deeds

    @property
    def talks(self) -> bool:
        return self._twin.talks

    def open(self, record: Trajectory) -> None:
        self._course = Deeds(record, self.scripted)
        self._twin.open(record)
        self._write("twin", {"scripted": self.scripted, "talks": self.talks}, [asdict(record.task), "twin"])

    async def take(self, turn: Message | ToolCall) -> Taken:
        self._course.add(turn)
        taken = await self._twin.take(turn)
        done = self._course.done
        results = [{"call_id": r.call_id, "name": r.name, "content": r.content, "error": r.error} for r in taken.results]
        self._write({"last": done[-1]}, {"answers": taken.answers, "results": results, "over": taken.over}, done)
        return taken

    def state(self) -> Json:
        state = self._twin.state()
        self._write("state", state, [*self._course.done, "state"])
        return state

    def copies(self) -> None:
        return None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._twin.run(work)

    def close(self) -> None:
        self._twin.close()

    def _write(self, ask: Json, answer: Json, done: list[Json]) -> None:
        self._writer.add("", _KIND, len(self._course.done) - 1, ask, answer, asked=digest(done))


class TapedReplayEnv:
    """An environment for replays, from the record."""

    def __init__(self, record: Recorded, task: Task) -> None:
        self._record, self._task = record, task

    def as_twin(self) -> Twin:
        return TapedTwin(self._record, self._task)


class TapedTwin:
    """A twin that answers what the recorded one answered."""

    def __init__(self, tape: Recorded, task: Task) -> None:
        known = tape.replay_envs.get(digest([asdict(task), "twin"]), {"scripted": True, "talks": False})
        self.scripted: bool = known["scripted"]
        self._talks: bool = known["talks"]
        self._tape = tape
        self._course: Deeds

    @property
    def talks(self) -> bool:
        return self._talks

    def open(self, record: Trajectory) -> None:
        self._course = Deeds(record, self.scripted)

    async def take(self, turn: Message | ToolCall) -> Taken:
        self._course.add(turn)
        answer = self._find(self._course.done)
        if not isinstance(answer, dict) or "over" not in answer:
            raise ReplayError(f"{self._tape.path}: its replays of calls were recorded by an older version; record it again")
        results = [ToolResult(row["call_id"], row["name"], row["content"], None, row["error"]) for row in answer["results"]]
        return Taken(answer["answers"], results, answer["over"])

    def state(self) -> Json:
        return self._find([*self._course.done, "state"])

    def copies(self) -> None:
        return None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        run_at_once(work)

    def close(self) -> None: ...

    def _find(self, done: list[Json]) -> Json:
        asked = digest(done)
        if asked not in self._tape.replay_envs:
            raise ReplayError(
                f"{self._tape.path}: episode {current_episode()}, replay of calls {len(done) - 1} of task "
                f"{done[0]['id']}: expected one of the recorded calls, got {done[-1]}"
            )
        return self._tape.replay_envs[asked]
