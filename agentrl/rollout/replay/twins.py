"""Replays of calls under a record: twins (`agentrl.reward.twin`) that write down their answers, and twins that answer from them.

A twin's answer (a row of kind `replay_env`) is found by what it depends on: which of the run's environments it is of (`of`, its
number), the task, what the record's user did, and the turns so far; episodes that do the same share it. A replay that failed
(`replay_failed`) is its own episode's, found by its number there: the next replay of the same calls may not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.env.userside import RecordedUser
from agentrl.errors import ReplayError
from agentrl.reward.twin import Copies, TurnOutcome, Twin, run_at_once, twin_of
from agentrl.reward.twins import FailedTwinError, GoldRounds, MakeEnv, RoundTurns, TwinPass, Twins, UserSide
from agentrl.rollout.replay.tape import Numbers, Recorded, RecordWriter, current_episode, digest
from agentrl.trajectory import Json, Message, Task, ToolCall, ToolResult, Trajectory, as_row

_ANSWER = "replay_env"
_FAILED = "replay_failed"


def _begun(of: int, task: Task) -> str:
    return digest(["twin", of, asdict(task)])


class _Course:
    """What a twin's next answer depends on, as a digest `at` that each turn extends."""

    def __init__(self, of: int, record: Trajectory, scripted: bool) -> None:
        self._heard: list[Json] = RecordedUser.of(record).row()["answers"]
        self._scripted, self._texts = scripted, 0
        self.at = digest([_begun(of, record.task), self._heard[:1]])

    def add(self, turn: Message | ToolCall) -> None:
        """Of a text only what somebody hears counts: nobody does if the user is scripted, and so one pass serves many."""
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
        """How this replay failed. Raises ReplayError if it was another one that did."""
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
