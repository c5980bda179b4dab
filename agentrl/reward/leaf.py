"""The leaf contract: from a part of an episode to a value in [0, 1], or to None with a reason."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from agentrl.reward.twin import Twin
from agentrl.reward.twins import Twins
from agentrl.reward.unscorable import UnscorableError as UnscorableError
from agentrl.reward.view import View
from agentrl.trajectory import Json, Message, Task, ToolCall, ToolResult

Args = Mapping[str, Any]

REF: dict[str, Any] = {"$ref": "#/$defs/ref"}


class Reading(NamedTuple):
    """A leaf's result: a value in [0, 1], or None (could not score), and the evidence as JSON. `turns`: of a leaf that `spreads`,
    each turn's share of the value (turn index: share); they add up to it."""

    value: float | None
    evidence: Json
    turns: Mapping[int, float] | None = None


class PendingError(Exception):
    """A leaf needs an answer from outside; the scorer gets it and calls the leaf again."""

    def __init__(self, key: str, request: Any) -> None:
        super().__init__(key)
        self.key = key
        self.request = request


class ReplayEnv(Protocol):
    """What a replay needs from an environment; `agentrl.env.ToolEnv` has it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any: ...

    def step(self, action: Message) -> Any: ...

    def user_call(self, call: ToolCall) -> ToolResult: ...

    def state(self) -> Json: ...

    def close(self) -> None: ...


class AsTwin(Protocol):
    """What plays an episode once more in a way of its own (`agentrl.reward.twin.Twin`), with its user's turns."""

    def as_twin(self) -> Twin: ...


class JudgeClient(Protocol):
    """Asks a judge model; `agentrl.reward.judge.Judge` is one. Always answers a Verdict, even on failure."""

    def ask(self, key: str, request: Any) -> Any: ...

    async def aask(self, key: str, request: Any) -> Any: ...


PythonLeaf = Callable[[View, Json], "float | tuple[float | None, Json] | None"]


@dataclass(frozen=True, slots=True)
class Context:
    """What a spec may use besides the trajectory; the run's config decides, not the spec.

    `replay_env` builds a fresh environment for gold replays of a task; `python` are the functions that
    the `python` leaf may call, by name; `judge` asks the judge model. `replays` keeps the gold replays of
    about the last 256 tasks: the members of a group share that of their task.
    """

    replay_env: Callable[[Task], ReplayEnv | AsTwin] | None = None
    python: Mapping[str, PythonLeaf] = field(default_factory=dict)
    judge: JudgeClient | None = None
    replays: Twins = field(default_factory=Twins, repr=False, compare=False)


class Leaf(ABC):
    """One kind of leaf, bound to the arguments of one node of a spec. Stateless."""

    kind: ClassVar[str]
    formula: ClassVar[str]
    schema: ClassVar[dict[str, Any]] = {"type": "object", "additionalProperties": False, "properties": {}}
    example: ClassVar[dict[str, Any]]
    scopes: ClassVar[tuple[str, ...]] = ("episode", "round", "turn", "call")
    optional: ClassVar[frozenset[str]] = frozenset()
    """Arguments whose reference may lead nowhere, and is null then: what the policy was to make, and did not."""

    def __init__(self, args: Args, context: Context) -> None:
        """`args` as in the spec, references not yet followed. Raises ValueError for invalid ones."""
        self.args = args
        self.context = context

    @classmethod
    def spreads(cls, args: Args) -> bool:
        """Whether a value by these arguments is a sum of turns' shares, so that a node without a scope can emit it at them."""
        return False

    def blocks(self) -> bool:
        """Whether `read` may take long (a replay, a user's function) and so must not run on an event loop."""
        return False

    def longest(self) -> tuple[Hashable, float] | None:
        """Seconds that `read` may take by the limits in its arguments, behind a key: leaves of one key take them once. None: of a
        leaf without such limits."""
        return None

    def gold_fault(self, args: Args) -> str | None:
        """Why no episode of a task can be scored by these arguments (references followed), told before a run starts; None if it
        can. May block. Raises UnscorableError as `read`."""
        return None

    @abstractmethod
    def read(self, view: View, args: Args) -> Reading:
        """The value of this leaf for `view`; `args` with references followed.

        Raises UnscorableError if the leaf does not apply to the episode's data.
        """


def need_replay_env(args: Args, context: Context) -> None:
    """Raises ValueError if a leaf replays and the run provides no environment for it."""
    if "replay" in args and context.replay_env is None:
        raise ValueError(
            "replay: needs an environment to replay the gold calls on; name it with --env ID (in Python: Context(replay_env=...))"
        )


def object_schema(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON Schema of an argument object with exactly these keys."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


BY: dict[str, Any] = {"enum": ["assistant", "user", "both"]}
"""Whose calls a leaf reads: the policy's (the default), those of the simulated user to tools of its own, or both."""


def or_ref(schema: dict[str, Any]) -> dict[str, Any]:
    """A value of that schema, or a reference to one."""
    return {"if": {"type": "object", "required": ["$"]}, "then": REF, "else": schema}
