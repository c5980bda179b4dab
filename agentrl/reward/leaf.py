"""The interface of reward leaves, and the view of an episode that they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from agentrl.config.schema import RewardConfig
from agentrl.data.trajectory import Json, Message, ToolCall, ToolResult, Trajectory, Turn
from agentrl.reward.replays import MakeEnv, Replays
from agentrl.reward.values import ABSENT, NORMALIZERS, Absent, EpisodeRounds, course_of, follow, parse_pointer
from agentrl.utils.registry import Registry

# The view of an episode

SCOPES = ("group", "episode", "round", "turn", "call")
"""Scopes, widest first. A round is the policy's turns between two user messages."""


class Made(NamedTuple):
    """A call that was made, with its turn and its result (None without one)."""

    turn: Turn
    call: ToolCall
    result: ToolResult | None


def calls_made(turns: Sequence[Turn]) -> list[Made]:
    """List the calls of the turns in order, with their results: by call id within the turn, or by position if the ids are not
    unique (in imported records)."""
    made: list[Made] = []
    for turn in turns:
        calls = turn.message.tool_calls
        if not calls:
            continue
        if len(calls) == len(turn.results) == 1:  # a fast path for the common case
            made.append(Made(turn, calls[0], turn.results[0] if turn.results[0].call_id == calls[0].id else None))
            continue
        answers = {result.call_id: result for result in turn.results}
        if len(answers) == len(turn.results):
            for call in calls:
                made.append(Made(turn, call, answers.get(call.id)))
        else:
            made.extend(Made(turn, call, r) for call, r in zip_longest(calls, turn.results) if call)
    return made


_OPENING = Turn(-1, Message("assistant"))
"""Placeholder turn of user calls that precede the policy's first turn."""


@dataclass(slots=True)
class View:
    """A part of one trajectory: the episode, a round, a turn or a call.

    `index` is its number among the parts of its scope (0 for an episode), `answers` are the services' answers by request key,
    `memo` is a cache that the leaves and parts of an episode share.
    """

    trajectory: Trajectory
    scope: str
    turns: Sequence[Turn]
    calls: Sequence[Made]
    index: int = 0
    answers: dict[str, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def place(self) -> tuple[Hashable, ...]:
        """A key of this part, unique within the episode."""
        if self.scope == "call":
            # By object identity: call ids need not be unique in an imported record.
            return "call", self.index, id(self.calls[0].call)
        return self.scope, self.index, self.last_turn

    @property
    def last_turn(self) -> int | None:
        """Index of the turn at which this part's reward is emitted; None without turns."""
        return self.turns[-1].index if self.turns else None

    def made(self, by: str) -> Sequence[Made]:
        """List this part's calls in order: of the policy ("assistant"), of the simulated user ("user"), or of "both". A user call
        belongs to the turn that it answers; one before the first turn belongs to that turn."""
        if by == "assistant":
            return self.calls
        turns = {turn.index: turn for turn in self.turns}
        first = self.trajectory.turns[0].index if self.trajectory.turns else None
        opens = self.scope == "episode" or first in turns
        found = [
            Made(turns.get(one.turn, _OPENING), one.call, one.result)
            for one in self.trajectory.user_calls
            if one.turn in turns or (one.turn < 0 and opens)
        ]
        if by == "user":
            return found
        # The sort is stable: a turn's own calls precede the user's answer to it.
        return sorted([*self.calls, *found], key=lambda one: one.turn.index)

    def answer(self) -> str | None:
        """Return this part's final answer; see `final_answer`."""
        return final_answer(self.turns)

    def parts(self, scope: str) -> list[View]:
        """Split this part into narrower ones, in order."""
        key = ("parts", self.place, scope)
        if key not in self.memo:  # several nodes may need them
            if scope == "call":
                cuts = [(i, [made.turn], [made]) for i, made in enumerate(self.calls)]
            elif scope == "turn":
                cuts = [(turn.index, [turn], calls_made([turn])) for turn in self.turns]
            else:
                place = self.rounds
                groups = [(n, list(turns)) for n, turns in groupby(self.turns, key=lambda turn: place.get(turn.index))]
                cuts = [(number, turns, calls_made(turns)) for number, turns in groups if number is not None]
            self.memo[key] = [
                View(self.trajectory, scope, turns, calls, index, self.answers, self.memo) for index, turns, calls in cuts
            ]
        found: list[View] = self.memo[key]
        return found

    @property
    def round(self) -> int:
        """Index of the round that this part is in."""
        if self.scope == "round" or not self.turns:
            return self.index
        return self.rounds.get(self.turns[-1].index, 0)

    @property
    def rounds(self) -> dict[int, int]:
        """Turn index -> round index, counted from the episode's first turn, without the opening history."""
        return {turn.index: number for turn, number in zip(self.trajectory.turns, self.course.rounds, strict=True)}

    @property
    def course(self) -> EpisodeRounds:
        """The user's messages after each turn, and the rounds that they delimit."""
        if "course" not in self.memo:
            self.memo["course"] = course_of(self.trajectory)
        found: EpisodeRounds = self.memo["course"]
        return found

    def read(self, tokens: tuple[str, ...], at: str | None) -> Json | Absent:
        """Resolve the reference `{"$": "/<tokens>", "at": at}` for this part; ABSENT if there is no value."""
        part = tokens[0]
        value: Json | Absent = ABSENT
        source: Any = self.trajectory
        if part == "task":
            source = self.trajectory.task
        elif part == "turn":
            source = self.turns[-1] if self.turns else None
        elif part == "call":
            source = self.calls[0] if self.scope == "call" else None
        fields = _FIELDS[part]
        if tokens[:2] == ("episode", "state"):
            value = follow(self.trajectory.state, tokens[2:])
        elif len(tokens) == 1:
            value = {} if source is None else {name: read(source) for name, read in fields.items()}
        elif source is not None and tokens[1] in fields:
            value = follow(fields[tokens[1]](source), tokens[2:])
        if at is None or value is ABSENT:
            return value
        position = {"round": self.round, "turn": self.turns[-1].index if self.turns else -1}.get(at, self.index)
        if not isinstance(value, (list, tuple)) or not 0 <= position < len(value):
            return ABSENT
        return value[position]

    def value_at(self, ref: Mapping[str, Json]) -> Json | Absent:
        """Resolve a reference of a spec; ABSENT if there is no value."""
        return self.read(parse_pointer(str(ref["$"])), ref.get("at"))


def episode_view(trajectory: Trajectory, answers: dict[str, Any] | None = None) -> View:
    """Make the view of a whole episode."""
    made = calls_made(trajectory.turns)
    return View(trajectory, "episode", trajectory.turns, made, answers={} if answers is None else answers)


def final_answer(turns: Sequence[Turn]) -> str | None:
    """Return the last turn's text, the answer to the user, if it makes no call; else None."""
    return turns[-1].message.content if turns and not turns[-1].message.tool_calls else None


def _errors(turns: Sequence[Turn]) -> int:
    return sum(one.call.arguments is None or one.result is None or one.result.error is not None for one in calls_made(turns))


_FIELDS: Mapping[str, Mapping[str, Callable[[Any], Json]]] = {
    "task": {name: attrgetter(name) for name in ("id", "seed", "split", "data", "gold")},
    "episode": {
        "env_id": lambda whole: whole.env_id,
        "answer": lambda whole: final_answer(whole.turns),
        "stop": lambda whole: whole.stop.value,
        "terminated": lambda whole: whole.terminated,
        "truncated": lambda whole: whole.truncated,
        "turns": lambda whole: len(whole.turns),
        "calls": lambda whole: len(calls_made(whole.turns)),
        "errors": lambda whole: _errors(whole.turns),
        "sampled_tokens": lambda whole: sum(turn.sampled_tokens for turn in whole.turns),
        "images": lambda whole: len(whole.images),
        "metrics": lambda whole: dict(whole.metrics),
        "tools": lambda whole: [tool.get("function", {}).get("name") for tool in whole.tools],
    },
    "turn": {
        "index": lambda turn: turn.index,
        "content": lambda turn: turn.message.content,
        "reasoning": lambda turn: turn.message.reasoning,
        "finish": lambda turn: turn.finish,
        "calls": lambda turn: [
            {"name": call.name, "arguments": call.arguments, "error": call.error} for call in turn.message.tool_calls
        ],
        "results": lambda turn: [result.content for result in turn.results],
        "images": lambda turn: [image.about for result in turn.results for image in result.images],
        "sampled_tokens": lambda turn: turn.sampled_tokens,
        "errors": lambda turn: _errors([turn]),
    },
    "call": {
        "name": lambda made: made.call.name,
        "arguments": lambda made: made.call.arguments,
        "error": lambda made: made.call.error or (made.result.error if made.result else None),
        "result": lambda made: made.result.content if made.result else None,
        "images": lambda made: [image.about for image in made.result.images] if made.result else [],
    },
}
"""Accessors of a Task, Trajectory, Turn or Made, by the first and second token of a reference."""
FIELDS = {part: (*(("state",) if part == "episode" else ()), *fields) for part, fields in _FIELDS.items()}
"""Allowed second tokens of a reference, by first token."""


# The interface of leaves

Args = Mapping[str, Any]

REF: dict[str, Any] = {"$ref": "#/$defs/ref"}


class Reading(NamedTuple):
    """A leaf's result: a value in [0, 1], or None (could not score), and evidence as JSON. `turns`, for a leaf that `spreads`:
    turn index -> its share of the value; the shares add up to the value."""

    value: float | None
    evidence: Json
    turns: Mapping[int, float] | None = None


class PendingError(Exception):
    """Signal that a leaf needs an answer of its service; the scorer requests it and calls the leaf again.

    `request` goes to the service in `Leaf.asks`; its `assumption(best)` returns the possible answer with the highest value, or
    the lowest, for scoring without services."""

    def __init__(self, key: str, request: Any) -> None:
        super().__init__(key)
        self.key = key
        self.request = request


@runtime_checkable
class Client(Protocol):
    """Interface of a service: it answers leaves' requests, equal keys with equal answers.

    A failure is returned as an answer; a UserError ends the run.
    """

    def ask(self, key: str, request: Any) -> Any: ...

    async def aask(self, key: str, request: Any) -> Any: ...


SERVICES: Registry[type[Any]] = Registry("reward.service", "SERVICES", "agentrl.reward", given=1)
"""Service classes that answer leaves, such as judges, by the name in `Leaf.asks` (agentrl.run.services.Service); the config
section of service NAME is `reward.NAME`."""


class Services(dict[str, Any]):
    """The services of a run by name, each created when a leaf first needs it."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config

    def __missing__(self, name: str) -> Client:
        made: Client = self.setdefault(name, SERVICES.build(name, {}, self._config, kind=Client))
        return made


PythonLeaf = Callable[[View, Json], "float | tuple[float | None, Json] | None"]


@dataclass(frozen=True, slots=True)
class Context:
    """Resources for a spec apart from the trajectory; the run's config selects them, not the spec.

    `replay_env` builds a new environment for replays of a task; `python` are the functions that the `python` leaf may call, by
    name; `services` answer leaves, by `Leaf.asks`. `replays` caches the gold replays of about the last 256 tasks, which the
    members of a group share.
    """

    replay_env: MakeEnv | None = None
    python: Mapping[str, PythonLeaf] = field(default_factory=dict)
    services: Mapping[str, Client] = field(default_factory=dict)
    replays: Replays = field(default_factory=Replays, repr=False, compare=False)


class Leaf(ABC):
    """Base class of leaf kinds; an instance is stateless and has the arguments of one spec node."""

    kind: str
    """Name in LEAVES, set by the compiler."""
    formula: ClassVar[str]
    schema: ClassVar[dict[str, Any]] = {"type": "object", "additionalProperties": False, "properties": {}}
    example: ClassVar[dict[str, Any]]
    scopes: ClassVar[tuple[str, ...]] = ("episode", "round", "turn", "call")
    optional: ClassVar[frozenset[str]] = frozenset()
    """Arguments whose reference may resolve to nothing, and is then null, because the policy may not have made the value."""
    asks: ClassVar[str | None] = None
    """Name in SERVICES of the service for its requests (PendingError)."""

    def __init__(self, args: Args, context: Context) -> None:
        """`args` as in the spec, with unresolved references. Raises ValueError for invalid ones."""
        self.args = args
        self.context = context

    @classmethod
    def spreads(cls, args: Args) -> bool:
        """Return True if the value is a sum of shares per turn with these arguments. A node without a scope can then emit it at
        the turns."""
        return False

    def blocks(self) -> bool:
        """Return True if `read` may be slow (a replay, custom code). It then runs in a thread."""
        return False

    def longest(self) -> tuple[Hashable, float] | None:
        """Return (key, seconds): the longest `read` by the limits in the arguments; leaves with equal keys share that time. None
        without such limits."""
        return None

    def lint(self) -> tuple[str, str] | None:
        """Return code and message of a warning about the arguments, or None; for `agentrl reward lint`."""
        return None

    def gold_fault(self, args: Args) -> str | None:
        """Return the reason why no episode of a task can be scored, or None; for checks before a run. `args` have references
        resolved. May block. Raises UnscorableError as `read`."""
        return None

    @abstractmethod
    def read(self, view: View, args: Args) -> Reading:
        """Score `view`; `args` have their references resolved.

        Raises UnscorableError if the leaf does not apply to the episode's data.
        """


def need_replay_env(args: Args, context: Context) -> None:
    """Raise ValueError if a leaf replays but the run provides no replay environment."""
    if "replay" in args and context.replay_env is None:
        raise ValueError(
            "replay: needs an environment to replay the gold calls on; name it with --env ID (in Python: Context(replay_env=...))"
        )


def object_schema(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the JSON Schema of an argument object with only these keys."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


BY: dict[str, Any] = {"enum": ["assistant", "user", "both"]}
"""The caller whose calls a leaf reads: the policy (default), the simulated user (calls to its tools), or both."""


EQUALITY: dict[str, Any] = {
    "strings": {"enum": list(NORMALIZERS)},
    "abs": {"type": "number", "minimum": 0},
    "rel": {"type": "number", "minimum": 0},
}
"""Schemas of the arguments of `EqualityRule.of`."""


def or_ref(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value or a reference to one."""
    return {"if": {"type": "object", "required": ["$"]}, "then": REF, "else": schema}


LEAVES: Registry[type[Leaf]] = Registry("reward.leaf", "LEAVES", "agentrl.reward")
"""Kinds of leaves in a spec: `{"use": NAME, "args": {...}}`."""
