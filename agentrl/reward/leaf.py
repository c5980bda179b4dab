"""The leaf contract: from a part of an episode to a value in [0, 1], or to None with a reason."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from agentrl.reward.once import Once
from agentrl.reward.view import View
from agentrl.trajectory import Json, Message, Task

Args = Mapping[str, Any]

REF: dict[str, Any] = {"$ref": "#/$defs/ref"}


class Reading(NamedTuple):
    """What a leaf says: a value in [0, 1], or None (could not score), and why, as JSON."""

    value: float | None
    evidence: Json


class UnscorableError(Exception):
    """A leaf cannot score this episode (a gold answer of the wrong shape, no state): null, never 0."""


class PendingError(Exception):
    """A leaf waits for an answer from outside; the scorer fetches it and asks the leaf again."""

    def __init__(self, key: str, request: Any) -> None:
        super().__init__(key)
        self.key = key
        self.request = request


class ReplayEnv(Protocol):
    """What a replay needs of an environment; `agentrl.env.ToolEnv` has it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any: ...

    def step(self, action: Message) -> Any: ...

    def state(self) -> Json: ...

    def close(self) -> None: ...


class JudgeClient(Protocol):
    """Asks a judge model; `agentrl.reward.judge.Judge` is one. Answers a Verdict, also where it failed."""

    def ask(self, key: str, request: Any) -> Any: ...

    async def aask(self, key: str, request: Any) -> Any: ...


class Replayed(NamedTuple):
    """Where calls led on a replay environment: its state, and what its tools answered, in order."""

    state: Json
    answers: list[str]


PythonLeaf = Callable[[View, Json], "float | tuple[float | None, Json] | None"]


@dataclass(frozen=True, slots=True)
class Context:
    """What a spec may use beside the trajectory; a run's config decides, a spec cannot.

    `replay_env` builds a fresh environment of a task's kind for gold replays; `python` are the functions that
    the `python` leaf may call, by name; `judge` asks the judge model. `replays` keeps the gold replays of
    the last 256 tasks or so: the members of a group share their task's.
    """

    replay_env: Callable[[Task], ReplayEnv] | None = None
    python: Mapping[str, PythonLeaf] = field(default_factory=dict)
    judge: JudgeClient | None = None
    replays: Once[Replayed] = field(default_factory=Once, repr=False, compare=False)


class Leaf(ABC):
    """One kind of leaf, bound to the arguments of one place in a spec. It has no state."""

    kind: ClassVar[str]
    formula: ClassVar[str]
    schema: ClassVar[dict[str, Any]] = {"type": "object", "additionalProperties": False, "properties": {}}
    example: ClassVar[dict[str, Any]]
    scopes: ClassVar[tuple[str, ...]] = ("episode", "round", "turn", "call")

    def __init__(self, args: Args, context: Context) -> None:
        """`args` as in the spec, references not yet followed. Raises ValueError where they cannot work."""
        self.args = args
        self.context = context

    def blocks(self) -> bool:
        """Whether `read` may take long (a replay, a user's function) and so must stay off an event loop."""
        return False

    @abstractmethod
    def read(self, view: View, args: Args) -> Reading:
        """The value of this leaf for `view`; `args` with references followed.

        Raises UnscorableError where the episode's data do not fit.
        """


def need_replay_env(args: Args, context: Context) -> None:
    """Raises ValueError where a leaf replays and the run gives no environment for it."""
    if "replay" in args and context.replay_env is None:
        raise ValueError(
            "replay: needs an environment to replay the gold calls on; name it with --env ID (in Python: Context(replay_env=...))"
        )


def object_schema(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON Schema of an argument object that knows its keys."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def or_ref(schema: dict[str, Any]) -> dict[str, Any]:
    """A value of that schema, or a reference to one."""
    return {"if": {"type": "object", "required": ["$"]}, "then": REF, "else": schema}
