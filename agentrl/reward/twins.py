"""Passes over an episode's rounds, which twins (`agentrl.reward.twin`) play once more with its own calls or with the gold ones.

A pass goes through all rounds of the episode on one twin: a round's calls, its state and answers, then the text that ends it, to
which the twin's user replies as the record's did. All leaves and all rounds share a pass, and the members of a group the gold's.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl.errors import ReplayError
from agentrl.executors import fork_safe
from agentrl.plain_data import identical
from agentrl.reward.frozen import FrozenState
from agentrl.reward.twin import Copies, Twin, twin_of
from agentrl.reward.unscorable import FailedTwinError as FailedTwinError
from agentrl.reward.unscorable import UnscorableError
from agentrl.reward.values import brief
from agentrl.trajectory import Json, Message, Task, ToolCall, ToolResult, Trajectory

log = logging.getLogger(__name__)
MakeEnv = Callable[[Task], Any]  # a ReplayEnv (`agentrl.reward.leaf`)
UserSide = Callable[[bool], tuple[Any, ...]]
GoldRounds = Callable[[], "tuple[Sequence[RoundTurns], UnscorableError | None]"]


@dataclass(frozen=True, slots=True)
class RoundTurns:
    """One round to play: `turns`, each an assistant message (or a call of the user's own), and the text that ends the round, None
    if a turn with calls does."""

    turns: Sequence[Message | ToolCall]
    text: Message | None = None

    @property
    def calls(self) -> int:
        return sum(1 if isinstance(turn, ToolCall) else len(turn.tool_calls) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """What a round left: the state after its last call (None if nobody reads states) and the answers to its calls."""

    state: FrozenState | None
    answers: list[str]


@dataclass(slots=True)
class TwinPass:
    """A pass over rounds; `fault` is why it stopped before the last of them."""

    ends: list[RoundEnd] = field(default_factory=list)
    fault: UnscorableError | None = None

    def end(self, number: int) -> RoundEnd:
        """Raises the fault if the pass did not come to the end of that round."""
        if number >= len(self.ends):
            raise self.fault or UnscorableError(f"the replay has no round {number}")
        return self.ends[number]

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return sum((end.state.size if end.state else 0) + sum(map(len, end.answers)) for end in self.ends)


class GoldPass(NamedTuple):
    """A pass over gold rounds: which, whether with states, and what its user heard and did between them."""

    gold: Json
    states: bool
    side: tuple[Any, ...]
    played: TwinPass


@dataclass(slots=True)
class TaskReplays:
    """What is kept of one task: how to copy its twin, and the gold passes. By the locks one thread makes what others wait for."""

    task: Task
    scripted: bool = True
    copyable: bool = True
    copies: Copies | None = None
    held: int = 0
    golds: list[GoldPass] = field(default_factory=list)
    opening: threading.Lock = field(default_factory=lambda: fork_safe(threading.Lock()))
    playing: threading.Lock = field(default_factory=lambda: fork_safe(threading.Lock()))

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task.id, self.task.seed, self.task.split

    @property
    def size(self) -> int:
        held = 0 if self.copies is None else self.copies.size
        return held + sum(one.played.size for one in self.golds)


class Twins:
    """The passes over gold calls of the last tasks, and an environment of each as its reset left it, from which twins are copied:
    of at most `most` tasks and about `most_bytes`.

    `states`: whether a leaf of the spec reads states; if none does, none is taken.
    """

    def __init__(self, most: int = 256, most_bytes: int = 128 << 20, states: bool = False) -> None:
        self._most, self._most_bytes, self.states = most, most_bytes, states
        self._lock = fork_safe(threading.Lock())
        self._held = 0
        self._kept: OrderedDict[tuple[str, int, str], TaskReplays] = OrderedDict()

    def __reduce__(self) -> tuple[type[Twins], tuple[int, int, bool]]:
        """A copy, here or in another process, starts empty."""
        return Twins, (self._most, self._most_bytes, self.states)

    def __len__(self) -> int:
        return len(self._kept)

    def gold(self, make: MakeEnv, record: Trajectory, gold: Json, rounds: GoldRounds, user_side: UserSide) -> TwinPass:
        """The pass over the gold rounds `gold`, of which `rounds` gives those that the record came to, and what is wrong
        with the next one.

        `user_side`: what happened in the record between the rounds, as far as it decides what a twin's user does; its argument
        says whether that is scripted, whatever the policy says. A pass of which it begins with another's serves both.
        """
        kept = self._of(record.task)
        with kept.playing:
            for one in kept.golds:
                here = user_side(kept.scripted)
                if one.states >= self.states and one.side[: len(here)] == here and identical(one.gold, gold):
                    return one.played
            turns, wrong = rounds()
            played = self._play(kept, make, record, turns, gold=True)
            played.fault = played.fault or wrong
            if played.fault is None:  # else the next one tries again, as a fault may pass
                here = user_side(kept.scripted)
                others = [one for one in kept.golds if not identical(one.gold, gold) or here[: len(one.side)] != one.side]
                kept.golds = [*others[-7:], GoldPass(gold, self.states, here, played)]
        self._trim(kept)
        return played

    def made(self, make: MakeEnv, record: Trajectory, rounds: Sequence[RoundTurns]) -> TwinPass:
        """The pass over the record's own rounds."""
        kept = self._of(record.task)
        first = kept.copies is None
        played = self._play(kept, make, record, rounds)
        if first and kept.copies is not None:
            self._trim(kept)
        return played

    def _play(
        self, kept: TaskReplays, make: MakeEnv, record: Trajectory, rounds: Sequence[RoundTurns], gold: bool = False
    ) -> TwinPass:
        played, twin = TwinPass(), None
        try:
            twin = _open(kept, make, record)
            twin.run(play(twin, rounds, played, states=self.states, gold=gold))
        except UnscorableError as error:
            played.fault = error
        except ReplayError:  # a record lacks it: no fault of the environment
            raise
        except (Exception, SystemExit) as error:  # an author's code may raise anything, which must not stop a run
            log.exception("a replay failed (task %s)", record.task.id)
            played.fault = FailedTwinError(f"the replay environment failed: {type(error).__name__}: {error}")
        finally:
            if twin is not None:
                twin.close()
        return played

    def _of(self, task: Task) -> TaskReplays:
        new = TaskReplays(task)
        with self._lock:
            kept = self._kept.get(new.key)
            # Compared and not hashed: that takes a tenth of the time.
            if kept is None or not (identical(kept.task.data, task.data) and identical(kept.task.gold, task.gold)):
                self._held -= 0 if kept is None else kept.held
                kept = self._kept[new.key] = new
            kept.task = task  # the next question is about the same object, mostly
            self._kept.move_to_end(new.key)
        return kept

    def _trim(self, kept: TaskReplays) -> None:
        """Count what a task holds anew, and let go of those not asked for longest."""
        with self._lock:
            if self._kept.get(kept.key) is not kept:
                return
            self._held += kept.size - kept.held
            kept.held = kept.size
            while len(self._kept) > 1 and (len(self._kept) > self._most or self._held > self._most_bytes):
                self._held -= self._kept.popitem(last=False)[1].held


def _open(kept: TaskReplays, make: MakeEnv, record: Trajectory) -> Twin:
    """A twin as its reset leaves it: a copy of the task's first one, if it can be copied."""
    with kept.opening:
        if kept.copies is None and kept.copyable:
            twin = _fresh(kept, make, record)
            kept.copies = twin.copies()
            kept.copyable = kept.copies is not None
            if not kept.copyable:
                return twin
    return _fresh(kept, make, record) if kept.copies is None else kept.copies.twin(record)


def _fresh(kept: TaskReplays, make: MakeEnv, record: Trajectory) -> Twin:
    twin = twin_of(make(record.task))
    kept.scripted = twin.scripted
    try:
        twin.open(record)
    except BaseException:
        twin.close()
        raise
    return twin


async def play(twin: Twin, rounds: Sequence[RoundTurns], played: TwinPass, *, states: bool, gold: bool = False) -> None:
    """Play the rounds on a twin that was just reset, and add each one's end to `played`.

    Raises UnscorableError if the twin ends before the last call: an environment's fault is never a 0. Of `gold` calls none may be
    refused either: the text of a refusal would be what an episode has to read.
    """
    calls, done, over = sum(one.calls for one in rounds), 0, False
    for one in rounds:
        answers: list[str] = []
        for turn in (*one.turns, *(() if one.text is None or one is rounds[-1] else (one.text,))):
            if turn is one.text:
                played.ends.append(RoundEnd(FrozenState(twin.state()) if states else None, answers))
            made = turn.tool_calls if isinstance(turn, Message) else (turn,)
            if not made and (over or not twin.talks):
                continue  # nobody listens
            if over:
                raise UnscorableError(f"the replay environment ended after {done} of {calls} replayed calls")
            taken = await twin.take(turn)
            done, over = done + len(made), taken.over
            if gold:
                _check_accepted(taken.results, made, f"{done} of {calls}")
            answers += taken.answers
        if one.text is None or one is rounds[-1]:
            played.ends.append(RoundEnd(FrozenState(twin.state()) if states else None, answers))


def _check_accepted(results: Sequence[ToolResult], calls: Sequence[ToolCall], place: str) -> None:
    for result in results:
        if result.error is not None:
            raise UnscorableError(
                f"the replay environment refused gold call {place}, {calls[-1].name}: {result.error}: {brief(result.content)}"
            )
