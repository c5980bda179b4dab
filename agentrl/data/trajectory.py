"""The data types of an episode: Message, ToolCall, Turn, TokenLedger, Trajectory, Group, StopReason.

An episode is deliberately stored twice: as messages and turns (for people and reward specs) and as token ledgers (the exact
tokens that the model saw and sampled, all that the trainer reads). Neither is ever derived from the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from operator import index
from types import UnionType
from typing import Any, Literal, SupportsIndex, TypeVar, cast, get_args, get_origin, get_type_hints

from agentrl.data.images import Image, by_digest
from agentrl.data.token_ledger import TokenLedger
from agentrl.utils.parsing import deep_copy_json, json_form, json_text
from agentrl.utils.redaction import redact

Json = Any  # a JSON value: None, bool, int, float, str, list[Json] or dict[str, Json]
Role = Literal["system", "user", "assistant", "tool"]
ROLES = get_args(Role)
Blame = Literal["policy", "infrastructure"]


def kind_of_json(value: Any) -> str:
    """Return the JSON type of a value with its article, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


class StopReason(StrEnum):
    """Reason for the end of an episode: the task's regular end (`Trajectory.terminated`), a truncation, or a fault."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    MAX_TOOL_TIME = "max_tool_time"
    MAX_EPISODE_TIME = "max_episode_time"
    TOOL_TIMEOUT = "tool_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ENGINE_TIMEOUT = "engine_timeout"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    AGENT_FAILED = "agent_failed"
    AGENT_ERROR = "agent_error"
    CANCELLED = "cancelled"

    @property
    def blame(self) -> Blame | None:
        """Return the cause of the end: None for the task's regular end or a budget of turns or tokens.

        A policy is responsible for its tokens, turns, and the run time of its code, but never for the time of an engine.
        """
        match self:
            case StopReason.DONE | StopReason.MAX_TURNS | StopReason.MAX_TOKENS | StopReason.CONTEXT_FULL:
                return None
            # Run time of the policy's code, per call or in total; an external agent whose failures count as the policy's.
            case StopReason.MAX_TOOL_TIME | StopReason.MAX_EPISODE_TIME | StopReason.AGENT_FAILED:
                return "policy"
            case _:
                return "infrastructure"

    @property
    def infrastructure(self) -> bool:
        """Return True if the episode is unscored (reward None, never 0) and retried."""
        return self.blame == "infrastructure"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant turn.

    `arguments`: the parsed JSON object, or None for a malformed call; then `error` describes the fault. `raw`: text as sampled.
    """

    name: str
    arguments: dict[str, Json] | None
    id: str = ""
    raw: str = ""
    error: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and isinstance(self.id, str)):
            raise TypeError(f"tool call: name = {self.name!r:.80}, id = {self.id!r:.80}; expected two texts")


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Tool results have role "tool", `tool_call_id` and `name`.

    `images`: images whose placeholder lines (`Image.line`) are in `content`."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.content, str) or self.role not in ROLES:
            raise TypeError(
                f"message: role = {self.role!r}, content = {self.content!r:.80}; expected one of {', '.join(ROLES)} and a text"
            )
        if not all(isinstance(call, ToolCall) for call in self.tool_calls):
            raise TypeError(
                f"message: tool_calls = {self.tool_calls!r:.80}, expected ToolCalls. A task's data holds them as dicts"
            )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call: `content` and `images` as the model sees them; `error`: kind of the error, or None."""

    call_id: str
    name: str
    content: str
    value: Json = None
    error: str | None = None
    seconds: float = 0.0
    images: tuple[Image, ...] = ()

    @property
    def message(self) -> Message:
        return Message("tool", self.content, tool_call_id=self.call_id, name=self.name, images=self.images)


@dataclass(frozen=True, slots=True)
class UserCall:
    """One tool call of the simulated user, which the policy never sees, nor its result.

    `turn`: index of the policy's turn that the user answers (-1: before the first), so the call is between that turn's message
    and the user's. `step`: index of the user's message within that answer, from 0; calls of one message share it. `text`: the
    hidden text of that message. `result`: None if its tool failed or the episode was cut.
    """

    turn: int
    step: int
    call: ToolCall
    result: ToolResult | None = None
    text: str = ""


@dataclass(slots=True)
class Turn:
    """One policy turn: its assistant message, the results of its calls, and its cost.

    `ledger`, `end`: position of the turn's last sampled token (ledger index, token index), which gets the turn's reward; -1 if
    no engine sampled the turn. `seconds`: time of sampling and tool calls. `usd`: charge of an API, None if unknown. `value`:
    success rate of continuations sampled from before this turn (`agentrl rollout --values`), None if not sampled.
    """

    index: int
    message: Message
    results: list[ToolResult] = field(default_factory=list)
    reward: float | None = None
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    ledger: int = -1
    end: int = -1
    seconds: float = 0.0
    finish: str = "stop"
    usd: float | None = None
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance. The policy may see `data`, never `gold` (in no observation or info)."""

    id: str
    seed: int
    split: str = "train"
    data: Mapping[str, Json] = field(default_factory=dict)
    gold: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.id) is not str or type(self.seed) is not int:  # e.g. numpy numbers
            if not isinstance(self.id, str | SupportsIndex) or not isinstance(self.seed, SupportsIndex):
                raise TypeError(f"task: id = {self.id!r:.80}, seed = {self.seed!r:.80}; expected a text and a whole number")
            object.__setattr__(self, "id", str(self.id))
            object.__setattr__(self, "seed", index(self.seed))
        for name in ("data", "gold"):
            given = getattr(self, name)
            try:
                form = json_form(given if isinstance(given, dict) else dict(given))
            except (TypeError, ValueError) as problem:
                raise TypeError(f"task {self.id!r}: {name} = {given!r:.80}, expected a dict of JSON values: {problem}") from None
            if form is not given:  # e.g. numpy numbers, which never equal a number in a policy's answer
                object.__setattr__(self, name, form)

    def copied(self) -> Task:
        """Return a deep copy, which the receiver may change."""
        made = copy(self)  # `replace` would check the fields again
        for name in ("data", "gold"):
            object.__setattr__(made, name, deep_copy_json(dict(getattr(self, name))))
        return made


@dataclass(slots=True)
class Trajectory:
    """One complete episode: sufficient to train on it, to rescore it offline, and to read it.

    `env`: name of the environment in the run; `env_id`: id of the environment. `reward`: None if unscored
    (StopReason.infrastructure), never replaced by 0. `success`: True if the task was solved, by the reward spec; None if
    unscored. `state`: final state of the environment as JSON, for state-based leaves. `cause`: after a fault or a timeout, the
    responsible side ("policy" or "infrastructure") and, for a timeout, the seconds that both sides used. `tools`: function
    schemas offered to the policy, for schema-based leaves. `user_calls`: tool calls of the simulated user in order; their results
    are not in `messages`. `parting`: last words of the simulated user, which the policy does not see and `messages` lacks; "" if
    none or not recorded. `rewrites`: one entry per rewrite of the messages by a context policy: the turn after it, the ledger
    that begins with it, its tokens, and the inserted messages. `agent`: exit and output of the external agent's program
    (docs/agents.md), else None. `horizon`: number of calls of the task's gold solution (`ToolEnv.horizon`), None if unknown;
    success is reported by it. `given`: number of first turns taken from the gold solution (`rollout.start`), which are context in
    the ledgers and earn no reward. `parent`, `branch_turn`: for a branch (`rollout.branch`), the member from which and the turn
    before which it was forked; the parent's turns are context here.
    """

    env_id: str
    task: Task
    seed: int = 0
    member: int = 0
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ledgers: list[TokenLedger] = field(default_factory=list)
    rewrites: list[dict[str, Json]] = field(default_factory=list)
    user_calls: list[UserCall] = field(default_factory=list)
    parting: str = ""
    agent: dict[str, Json] | None = None
    tools: list[dict[str, Json]] = field(default_factory=list)
    state: Json = None
    cause: dict[str, Json] | None = None
    reward: float | None = None
    success: bool | None = None
    evidence: Json = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    stop: StopReason = StopReason.DONE
    terminated: bool = False
    truncated: bool = False
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    env: str = ""
    horizon: int | None = None
    given: int = 0
    parent: int | None = None
    branch_turn: int = 0

    @property
    def images(self) -> dict[str, Image]:
        """Return all images of messages, results and ledgers by digest."""
        held = [item.images for items in (self.messages, self.ledgers) for item in items if item.images]
        held += [result.images for turn in self.turns for result in turn.results if result.images]
        held += [made.result.images for made in self.user_calls if made.result is not None and made.result.images]
        return {image.sha256: image for images in held for image in images}

    @property
    def sampled_tokens(self) -> int:
        return sum(ledger.sampled_tokens for ledger in self.ledgers)

    @property
    def tokens(self) -> int:
        return sum(len(ledger) for ledger in self.ledgers)

    @property
    def task_key(self) -> str:
        """Return a unique key of the task: ids may repeat over tasks, environments and seeds."""
        task = self.task
        content = [task.data, task.gold] if task.data or task.gold else [task.seed]
        # Redacted, as in a file: a resumed evaluation has both kinds of one task.
        return redact(json.dumps([self.env or self.env_id, task.id, *content], sort_keys=True, default=str))

    def calls(self) -> Iterator[tuple[Turn, ToolCall, ToolResult | None]]:
        """Yield the tool calls in order with their turn and result (None if missing)."""
        for turn in self.turns:
            answers = {result.call_id: result for result in turn.results}
            for call in turn.message.tool_calls:
                yield turn, call, answers.get(call.id)

    def to_json(self) -> dict[str, Json]:
        """Return a JSON object, with ledgers as in `TokenLedger.to_packed_json`; `from_json` is the inverse."""
        row: dict[str, Json] = json.loads("".join(self.json_chunks()))
        return row

    def json_chunks(self) -> Iterator[str]:
        """Yield the JSON text of `to_json` in pieces of at most one ledger column.

        This saves memory. The first piece is all text before the ledgers."""
        row = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ledgers"}
        row["stop"] = self.stop.value
        for name in ("agent", "horizon", "parent"):
            if row[name] is None:  # keeps the rows of other episodes unchanged
                del row[name]
        for name in ("user_calls", "parting", "given", "branch_turn"):
            if not row[name]:
                del row[name]
        if images := self.images:
            row["images"] = {sha256: asdict(image) for sha256, image in images.items()}
        yield json_text(row, default=_json_fields)[:-1] + ', "ledgers": ['
        for place, ledger in enumerate(self.ledgers):
            if place:
                yield ", "
            yield from ledger.json_chunks()
        yield "]}"

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Trajectory:
        """Parse a row of `to_json`. Raises KeyError, TypeError or ValueError for any other row."""
        fields = dict(row)
        fields["task"] = _build(Task, row["task"])
        images = by_digest(fields.pop("images", {}))
        fields["messages"] = [message_of(item, images) for item in row["messages"]]
        fields["turns"] = [turn_of(item, images) for item in row["turns"]]
        fields["user_calls"] = user_calls_of(row.get("user_calls", ()), images)
        fields["ledgers"] = [TokenLedger.from_json(item, images) for item in row["ledgers"]]
        fields["stop"] = StopReason(row["stop"])
        if not all(isinstance(tool, Mapping) for tool in row.get("tools", ())):
            raise ValueError("tools: expected a list of objects")
        made = _build(cls, fields)
        rewards = {"reward": made.reward, **{f"turns.{turn.index}.reward": turn.reward for turn in fields["turns"]}}
        for name, value in rewards.items():
            if value is not None and (isinstance(value, bool) or not math.isfinite(value)):
                raise ValueError(f"{name}: {value!r} is not a finite number")
        return made


def _json_fields(item: object) -> dict[str, Json]:
    """Return the fields of a nested dataclass for `json.dumps`; `asdict` would copy recursively, which is far slower.

    Images become digests, since a record stores each image once; an empty `images` is omitted."""
    if not isinstance(item, Task | Message | ToolCall | Turn | ToolResult | UserCall):
        raise TypeError(f"Object of type {type(item).__name__} is not JSON serializable")
    row = {name: getattr(item, name) for name in item.__dataclass_fields__}
    if images := row.pop("images", None):
        row["images"] = [image.sha256 for image in images]
    if isinstance(item, Turn) and item.value is None:  # keeps the rows of other episodes unchanged
        del row["value"]
    return row


def as_row(item: Message | Turn | ToolResult | ToolCall | UserCall) -> dict[str, Json]:
    """Convert a part of an episode to JSON with full images; an empty `images` is omitted."""
    return asdict(item, dict_factory=lambda pairs: {name: value for name, value in pairs if name != "images" or value})


T = TypeVar("T")


@cache
def _field_types(cls: type) -> list[tuple[str, tuple[type, ...]]]:
    """Return the fields of a dataclass that `isinstance` can check, with their types."""
    found = []
    for name, hint in get_type_hints(cls).items():
        kinds = tuple(get_origin(part) or part for part in (get_args(hint) if isinstance(hint, UnionType) else (hint,)))
        if Any not in kinds and all(isinstance(kind, type) for kind in kinds):
            found.append((name, (*kinds, int) if float in kinds else kinds))
    return found


def _build(cls: type[T], row: Mapping[str, Any]) -> T:
    """Build a dataclass from its fields. Raises TypeError for a field that does not have the annotated type."""
    made = cls(**row)
    for name, kinds in _field_types(cast(Any, cls)):
        if not isinstance(value := getattr(made, name), kinds):
            expected = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "null")
            raise TypeError(f"{cls.__name__}.{name} = {value!r:.80}; expected {expected}")
    return made


_Images = Mapping[str, Image]
_NO_IMAGES: _Images = {}


def message_of(row: Mapping[str, Json], images: _Images = _NO_IMAGES) -> Message:
    """Parse a row of `as_row` to a message. `images`: images that the row refers to by digest.

    Raises KeyError, TypeError or ValueError, like the functions below."""
    return _build(
        Message, {**_with_images(row, images), "tool_calls": tuple(_build(ToolCall, call) for call in row["tool_calls"])}
    )


def result_of(row: Mapping[str, Json], images: _Images = _NO_IMAGES) -> ToolResult:
    """Parse a row of `as_row` to a tool result."""
    return _build(ToolResult, _with_images(row, images))


def turn_of(row: Mapping[str, Json], images: _Images = _NO_IMAGES) -> Turn:
    """Parse a row of `as_row` to a turn."""
    results = [result_of(result, images) for result in row["results"]]
    return _build(Turn, {**row, "message": message_of(row["message"], images), "results": results})


def user_calls_of(rows: Sequence[Mapping[str, Json]], images: _Images = _NO_IMAGES) -> list[UserCall]:
    """Parse rows of `as_row` to user calls."""
    found = []
    for row in rows:
        result = None if row["result"] is None else result_of(row["result"], images)
        found.append(_build(UserCall, {**row, "call": _build(ToolCall, row["call"]), "result": result}))
    return found


def _with_images(row: Mapping[str, Json], images: _Images) -> Mapping[str, Json]:
    """Replace images of a row, given by digest or in full, by Image objects."""
    held = {**row}.get("images")
    if held is None:
        return row
    return {**row, "images": tuple(images[one] if isinstance(one, str) else Image.from_row(one) for one in held)}


@dataclass(slots=True)
class Group:
    """The trajectories of one task under one policy: the unit of admission and of advantage estimation.

    `baseline`: a greedy episode of the same task, if the advantage estimator needs one (ReMax); it is scored, never trained on.
    `env`: name of the environment in the run, as in the trajectories.
    """

    index: int
    task_seed: int
    trajectories: list[Trajectory] = field(default_factory=list)
    baseline: Trajectory | None = None
    env: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return a JSON object; `from_json` is the inverse."""
        row: dict[str, Json] = json.loads("".join(self.json_chunks()))
        return row

    def json_chunks(self) -> Iterator[str]:
        """Yield the JSON text of `to_json` in pieces, like `Trajectory.json_chunks`."""
        yield json.dumps({"index": self.index, "task_seed": self.task_seed, "env": self.env})[:-1] + ', "trajectories": ['
        for place, member in enumerate(self.trajectories):
            if place:
                yield ", "
            yield from member.json_chunks()
        yield '], "baseline": '
        yield from ("null",) if self.baseline is None else self.baseline.json_chunks()
        yield "}"

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Group:
        """Parse a row of `to_json`. Raises as `Trajectory.from_json`."""
        greedy = row.get("baseline")
        return cls(
            row["index"],
            row["task_seed"],
            [Trajectory.from_json(item) for item in row["trajectories"]],
            None if greedy is None else Trajectory.from_json(greedy),
            row.get("env", ""),
        )

    def scored(self) -> list[Trajectory]:
        """Return the members with a reward; the others are dropped before any baseline is computed."""
        return [trajectory for trajectory in self.trajectories if trajectory.reward is not None]


Spot = tuple[int, int, float]
"""Ledger index, token index, reward at that token."""


def terminal_reward(value: float, turns: Mapping[int, float]) -> float:
    """Return `value` minus the rewards of turns; exactly 0 if only a rounding error is left."""
    rest = math.fsum([value, *(-amount for amount in turns.values())])
    return 0.0 if abs(rest) <= 1e-12 * math.fsum(map(abs, turns.values())) else rest


def reward_spots(trajectory: Trajectory, terminal: float | None, turns: Mapping[int, float]) -> list[Spot]:
    """Place the rewards of a trajectory on sampled tokens, at most one spot per token; they sum to its reward.

    `turns`: turn index -> reward; `terminal`: the rest of the episode's reward. A turn's reward is at its last sampled token
    (`Turn.ledger`, `Turn.end`), the terminal reward at that of the last sampled turn. The reward of a turn without sampled tokens
    goes to the next turn with some, else to the last one before it, so that none is lost. Raises ValueError without a `terminal`,
    for a reward at a token that was not sampled, or for one in a trajectory without sampled turns.
    """
    if terminal is None:
        raise ValueError("an unscored trajectory has no rewards; it leaves the batch")
    sampled = [turn for turn in trajectory.turns if turn.ledger >= 0 and turn.end >= 0]
    if not sampled:
        if terminal != 0.0 or turns:
            raise ValueError("no turn of the trajectory was sampled, so no token can carry its reward")
        return []
    placed = [(next((turn for turn in sampled if turn.index >= index), sampled[-1]), amount) for index, amount in turns.items()]
    spots: dict[tuple[int, int], float] = {}
    for turn, amount in [*placed, (sampled[-1], terminal)]:
        place = f"turn {turn.index} ends at token {turn.end} of ledger {turn.ledger}"
        if turn.ledger >= len(trajectory.ledgers) or turn.end >= len(trajectory.ledgers[turn.ledger]):
            raise ValueError(f"{place}, which does not exist")
        if not trajectory.ledgers[turn.ledger].sampled[turn.end]:
            raise ValueError(f"{place}: not a sampled token")
        spots[turn.ledger, turn.end] = spots.get((turn.ledger, turn.end), 0.0) + amount
    return [(ledger, token, amount) for (ledger, token), amount in spots.items()]
