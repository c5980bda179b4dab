"""Replay an episode's rounds on a twin environment, and freeze the states in between."""

from __future__ import annotations

import hashlib
import json
import logging
import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from agentrl.data.trajectory import Json, Message, Task, ToolCall, ToolResult, Trajectory
from agentrl.reward.values import FailedTwinError, UnscorableError, brief
from agentrl.utils.parsing import deep_copy_json, identical, is_unbounded
from agentrl.utils.threads import fork_safe

# Twin environments


class TurnOutcome(NamedTuple):
    """Outcome of one turn: the tools' answers as the policy reads them, their results, and whether the episode is over."""

    answers: list[str]
    results: Sequence[ToolResult]
    over: bool


class Twin(Protocol):
    """An environment that plays an episode once more; `agentrl.env.copying.EnvTwin` is that of a ToolEnv.

    `scripted`: what its user does depends on nothing that the policy says. `talks`: a user listens to a turn without calls.
    """

    scripted: bool

    @property
    def talks(self) -> bool: ...

    def open(self, record: Trajectory) -> None:
        """Begin the record's task, with the record's user in place of one that is a model."""
        ...

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        """Take one assistant turn, or make one call of the user's own."""
        ...

    def state(self) -> Json:
        """The state; of an episode that is over, as it was at its end."""
        ...

    def copies(self) -> Copies | None:
        """Maker of twins in the state of this one, which is left as it is; None if it cannot be copied."""
        ...

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what awaits `take` to its end."""
        ...

    def close(self) -> None: ...


class Copies(Protocol):
    """Makes twins that hold nothing outside of themselves, of `size` bytes each."""

    size: int

    def twin(self, record: Trajectory) -> Twin: ...


class PlainTwin:
    """A twin of an environment that has no more than `reset`, `step`, `state` and `close` (`agentrl.reward.leaf.ReplayEnv`)."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.scripted = bool(getattr(env, "scripted", True))

    @property
    def talks(self) -> bool:
        return bool(getattr(self._env, "has_user", False))

    def open(self, record: Trajectory) -> None:
        self._env.reset(seed=record.task.seed, options={"task": record.task})

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        if isinstance(turn, ToolCall):
            return TurnOutcome([], [self._env.user_call(turn)], False)
        outcome: Any = self._env.step(turn)
        record: Trajectory | None = getattr(self._env, "trajectory", None)
        results = record.turns[-1].results if turn.tool_calls and record is not None and record.turns else ()
        return TurnOutcome(tool_texts(outcome[0]), results, bool(outcome[2] or outcome[3]))

    def state(self) -> Json:
        return self._env.state()

    def copies(self) -> None:
        return None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        run_at_once(work)

    def close(self) -> None:
        self._env.close()


def twin_of(env: Any) -> Twin:
    """An environment as a twin: its own form of one, if it has any."""
    found: Twin = env.as_twin() if hasattr(env, "as_twin") else PlainTwin(env)
    return found


def run_at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run what awaits nothing that would have to be waited for. Raises RuntimeError if it does."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("a replay environment without an event loop was awaited")


def tool_texts(observation: Sequence[Message]) -> list[str]:
    """The tools' answers among the new messages."""
    return [message.content for message in observation if message.role == "tool"]


# Frozen states

_UNSET: Any = object()
_NONE = marshal.dumps(None, 2)


class FrozenState:
    """A JSON value, packed into bytes: thirty times as quick as a copy, and a tenth of its memory.

    What is not plain JSON (a dataclass, an array) cannot be packed; such a state is copied.
    """

    __slots__ = ("_digest", "_packed", "_parts", "_value")

    def __init__(self, value: Json) -> None:
        self._digest = ""
        self._parts: dict[Hashable, FrozenState] = {}
        try:
            # Version 2 has no references: equal values of equal types are packed into equal bytes.
            self._packed: bytes | None = marshal.dumps(value, 2)
            self._value: Json = _UNSET
        except ValueError:
            self._packed, self._value = None, deep_copy_json(value)

    @property
    def value(self) -> Json:
        """The state. It is the same object each time and must not be changed."""
        if self._value is _UNSET:
            assert self._packed is not None
            self._value = marshal.loads(self._packed)
        return self._value

    @property
    def empty(self) -> bool:
        """True if there is no state."""
        return self._packed == _NONE

    @property
    def size(self) -> int:
        """Bytes of memory, roughly; of one that could not be packed, as if each text had a thousand characters."""
        return len(self._packed) if self._packed is not None else 1000

    def same(self, other: FrozenState) -> bool:
        """Return True if it is the same value for sure; other values may still count as equal (1 and 1.0, a tuple and a list)."""
        return self._packed is not None and self._packed == other._packed

    def part(self, key: Hashable, cut: Callable[[Json], Json]) -> FrozenState:
        """`cut(value)`, made once for a key; for the key None this state."""
        if key is None:
            return self
        if key not in self._parts:
            self._parts[key] = FrozenState(cut(self.value))
        return self._parts[key]

    @property
    def digest(self) -> str:
        """`state_hash`, computed once. Raises as it."""
        if not self._digest:
            self._digest = state_hash(self.value)
        return self._digest

    def digests(self, other: FrozenState) -> tuple[str, str]:
        """Both digests; of equal states only the other's is computed. Raises as `state_hash`."""
        if self.same(other):
            self._digest = other.digest
        return self.digest, other.digest


def state_hash(state: Json) -> str:
    """SHA-256 of a state's canonical JSON: sorted keys, integral floats as integers. Raises ValueError for NaN."""
    text = json.dumps(_canonical(state), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A JSON text may hold half of a surrogate pair, which plain UTF-8 refuses.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _canonical(value: Json) -> Json:
    kind = type(value)
    if kind is str or kind is int:
        return hex(value) if kind is int and is_unbounded(value) else value  # Python writes no integer over 4,300 digits
    # 1 and 1.0 are the same JSON number, but not the same text, which is what is hashed.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is dict or isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value


# Passes over an episode's rounds, which twins (`agentrl.reward.twins`) play once more with its own calls or with the gold ones.
#
# A pass goes through all rounds of the episode on one twin: a round's calls, its state and answers, then the text that ends
# it, to
# which the twin's user replies as the record's did. All leaves and all rounds share a pass, and the members of a group the
# gold's.

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
    """State after a round: the state after its last call (None if nobody reads states) and the answers to its calls."""

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
    """Kept replays of one task: how to copy its twin, and the gold passes. By the locks one thread makes what others wait for."""

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
            twin = _open_twin(kept, make, record)
            twin.run(play(twin, rounds, played, states=self.states, gold=gold))
        except UnscorableError as error:
            played.fault = error
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


def _open_twin(kept: TaskReplays, make: MakeEnv, record: Trajectory) -> Twin:
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
