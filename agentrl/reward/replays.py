"""Replays of an episode's rounds on a new environment, the states between them, and a cache of gold replays."""

from __future__ import annotations

import hashlib
import json
import logging
import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl.data.trajectory import Json, Message, Task, ToolCall, Trajectory
from agentrl.reward.values import UnscorableError, exact, with_nfc_keys
from agentrl.utils.errors import fault_text, is_from_outside
from agentrl.utils.parsing import deep_copy_json, identical, is_unbounded
from agentrl.utils.threads import fork_safe

# Frozen states

_UNSET: Any = object()
_NONE = marshal.dumps(None, 2)


class FrozenState:
    """A JSON state packed into bytes: thirty times as fast as a copy, in a tenth of the memory.

    A state that is not plain JSON (a dataclass, an array) cannot be packed and is copied.
    """

    __slots__ = ("_digest", "_packed", "_parts", "_value")

    def __init__(self, value: Json) -> None:
        self._digest = ""
        self._parts: dict[Hashable, FrozenState] = {}
        try:
            # Version 2 has no object references, so equal values of equal types have equal bytes.
            self._packed: bytes | None = marshal.dumps(value, 2)
            self._value: Json = _UNSET
        except ValueError:
            self._packed, self._value = None, deep_copy_json(value)

    @property
    def value(self) -> Json:
        """The state, always the same object, which must not be changed."""
        if self._value is _UNSET:
            assert self._packed is not None
            self._value = marshal.loads(self._packed)
        return self._value

    @property
    def empty(self) -> bool:
        """True for a state of None."""
        return self._packed == _NONE

    @property
    def size(self) -> int:
        """Approximate bytes of memory; 1000 for a state that could not be packed."""
        return len(self._packed) if self._packed is not None else 1000

    def same(self, other: FrozenState) -> bool:
        """Return True if the packed values are identical; others may still be equal (1 and 1.0, a tuple and a list)."""
        return self._packed is not None and self._packed == other._packed

    def part(self, key: Hashable, cut: Callable[[Json], Json]) -> FrozenState:
        """Return `cut(value)`, cached by `key`; for the key None this state itself."""
        if key is None:
            return self
        if key not in self._parts:
            self._parts[key] = FrozenState(cut(self.value))
        return self._parts[key]

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: sorted keys, integral floats as integers; computed once. Raises ValueError for NaN."""
        if not self._digest:
            form = _canonical(self.value)
            text = json.dumps(form, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            # A JSON text may have half of a surrogate pair, which plain UTF-8 refuses.
            self._digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self._digest


def _canonical(value: Json) -> Json:
    kind = type(value)
    if kind is str:
        return exact(value)  # as texts are compared
    if kind is int:
        return hex(value) if is_unbounded(value) else value  # Python writes no integer over 4,300 digits
    # 1 and 1.0 are the same JSON number but different texts, and the text is hashed.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is dict or isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in with_nfc_keys(value).items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value


# Replays
#
# A replay plays all rounds of an episode on one environment: a round's calls, its state and answers, then the text that
# ends it, to which the user replies as in the record. All leaves and rounds share it, and a group's members that of gold calls.

log = logging.getLogger(__name__)
UserSide = Callable[[bool], tuple[Any, ...]]
GoldRounds = Callable[[], "tuple[Sequence[RoundTurns], UnscorableError | None]"]


MakeEnv = Callable[[Task], Any]
"""Factory of replay environments, `ToolEnv`s that are used once. `ToolEnv.replay` plays an episode's rounds from the task's
reset on, with the recorded user in place of a model, and appends the end of each round to `found`. It raises UnscorableError if
the episode ends before the last call, or if a `gold` call is refused, since the refusal would count as an expected answer.
`ToolEnv.user_repeats`: the user acts the same whatever the policy says."""


@dataclass(frozen=True, slots=True)
class RoundTurns:
    """A round to play: `turns`, assistant messages or user calls, and the `text` that ends it, None if a turn with calls
    does."""

    turns: Sequence[Message | ToolCall]
    text: Message | None = None

    @property
    def calls(self) -> int:
        return sum(1 if isinstance(turn, ToolCall) else len(turn.tool_calls) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The state after the last call of a round, and the texts of its calls' results."""

    state: FrozenState
    answers: list[str]


@dataclass(slots=True)
class Replay:
    """A replay of rounds. `fault`: the reason for a stop before the last round. `repeats`: `ToolEnv.user_repeats`."""

    ends: list[RoundEnd] = field(default_factory=list)
    fault: UnscorableError | None = None
    repeats: bool = False

    def end(self, number: int) -> RoundEnd:
        """Return the end of a round. Raises `fault` if the replay did not reach it."""
        if number >= len(self.ends):
            raise self.fault or UnscorableError(f"the replay has no round {number}")
        return self.ends[number]

    @property
    def size(self) -> int:
        """Approximate bytes of memory."""
        return sum(end.state.size + sum(map(len, end.answers)) for end in self.ends)


class GoldReplay(NamedTuple):
    """A replay with its gold rounds and the user side (texts and user actions) between them."""

    gold: Json
    side: tuple[Any, ...]
    played: Replay


@dataclass(slots=True)
class TaskReplays:
    """Cached gold replays of a task. The lock lets one thread play while others wait for the result."""

    task: Task
    held: int = 0
    golds: list[GoldReplay] = field(default_factory=list)
    playing: threading.Lock = field(default_factory=lambda: fork_safe(threading.Lock()))


class Replays:
    """Player of replays, with a cache of the gold replays of the last `most` tasks, about `most_bytes` in size."""

    def __init__(self, most: int = 256, most_bytes: int = 128 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lock = fork_safe(threading.Lock())
        self._kept: OrderedDict[tuple[str, int, str], TaskReplays] = OrderedDict()

    def __reduce__(self) -> tuple[type[Replays], tuple[int, int]]:
        """Copy and pickle as an empty cache."""
        return Replays, (self._most, self._most_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def gold(self, make: MakeEnv, record: Trajectory, gold: Json, rounds: GoldRounds, user_side: UserSide) -> Replay:
        """Return the replay of the gold rounds `gold`, from the cache if possible.

        `rounds` returns the gold rounds that the record reached, and the fault of the next one. `user_side` returns the record's
        texts and events between rounds that determine the user's actions; its argument is True if the user acts the same
        whatever the policy says. A replay whose user side is a prefix of another's is served by that one.
        """
        task, key = record.task, (record.task.id, record.task.seed, record.task.split)
        with self._lock:
            kept = self._kept.get(key)
            # Compared, not hashed, which takes ten times as long.
            if kept is None or not (identical(kept.task.data, task.data) and identical(kept.task.gold, task.gold)):
                kept = self._kept[key] = TaskReplays(task)
            kept.task = task  # mostly the next call has the same object, which compares fast
            self._kept.move_to_end(key)
        with kept.playing:
            for one in kept.golds:
                here = user_side(one.played.repeats)
                if one.side[: len(here)] == here and identical(one.gold, gold):
                    return one.played
            turns, wrong = rounds()
            played = self.play(make, record, turns, gold=True)
            played.fault = played.fault or wrong
            if played.fault is None:  # a fault may be temporary, so it is not cached
                here = user_side(played.repeats)
                others = [one for one in kept.golds if not identical(one.gold, gold) or here[: len(one.side)] != one.side]
                kept.golds = [*others[-7:], GoldReplay(gold, here, played)]
        with self._lock:  # evict the least recently used tasks
            kept.held = sum(one.played.size for one in kept.golds)
            while len(self._kept) > 1 and (
                len(self._kept) > self._most or sum(one.held for one in self._kept.values()) > self._most_bytes
            ):
                self._kept.popitem(last=False)
        return played

    def play(self, make: MakeEnv, record: Trajectory, rounds: Sequence[RoundTurns], *, gold: bool = False) -> Replay:
        """Play rounds on a new environment. A fault of the environment is returned in the replay."""
        found = Replay()
        try:
            env = make(record.task)
            found.repeats = env.user_repeats
            env.replay(record, rounds, found, gold=gold)
        except UnscorableError as error:
            found.fault = error
        except BaseException as error:  # environment code may raise anything, which must not stop a run
            if is_from_outside(error):
                raise
            log.exception("a replay failed (task %s)", record.task.id)
            found.fault = UnscorableError(f"the replay environment failed: {fault_text(error)}")
        return found
