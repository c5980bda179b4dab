"""The carriers: Message, ToolCall, Turn, TokenLedger, Trajectory, Group, StopReason.

A policy's episode is kept twice, on purpose: as messages and turns (what a person and a reward spec
read) and as token ledgers (exactly what the model saw and sampled; the only thing the trainer reads).
Neither is ever derived again from the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Json = Any  # a JSON value: None, bool, int, float, str, list[Json] or dict[str, Json]
Role = Literal["system", "user", "assistant", "tool"]


class StopReason(StrEnum):
    """Why an episode ended. `terminated` is the task's own end; every other end is a truncation or fault."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TOOL_TIMEOUT = "tool_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    CANCELLED = "cancelled"

    @property
    def infrastructure(self) -> bool:
        """True where the policy is not to blame: such an episode is unscored (reward None), never 0."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {StopReason.ENV_ERROR, StopReason.ENGINE_ERROR, StopReason.CANCELLED, StopReason.TOOL_TIMEOUT,
     StopReason.EPISODE_TIMEOUT}
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant turn.

    `arguments` is the parsed JSON object, or None where the call was malformed; `error` then says what
    was wrong with it, and `raw` keeps the text as sampled.
    """

    name: str
    arguments: dict[str, Json] | None
    id: str = ""
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Tool results are messages of role "tool" with `tool_call_id` and `name`."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered: `content` as the model sees it; `error` is the error's kind, or None."""

    call_id: str
    name: str
    content: str
    value: Json = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Turn:
    """One policy turn: its assistant message, the answers to its calls, and what it cost.

    `ledger` and `end` say where the turn's last sampled token lies (ledger index, token position), so
    that a reward for this turn lands on that token; -1 until the turn was sampled by an engine.
    `seconds` are those of the sampling and of each of its tool calls; `usd` is what an API asked for it,
    None where nobody knows.
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


class TokenLedger:
    """One append-only token sequence as the model saw it, in five columns of equal length.

    Columns: `token_ids` int32, `sampled` bool (True exactly where the policy sampled the token),
    `logprobs` float32 (log pi of the sampled token, 0 elsewhere), `versions` int32 (weights that sampled
    it, -1 elsewhere), `turns` int16 (index of the policy turn that the token belongs to or answers to).
    """

    __slots__ = ("_logprobs", "_sampled", "_token_ids", "_turns", "_versions")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenLedger) and self.to_json() == other.to_json()

    def append_context(self, token_ids: Sequence[int], turn: int) -> None:
        """Append tokens that the policy did not sample (prompt, tool results, template glue)."""
        n = len(token_ids)
        self._token_ids.extend(token_ids)
        self._sampled.extend([False] * n)
        self._logprobs.extend([0.0] * n)
        self._versions.extend([-1] * n)
        self._turns.extend([turn] * n)

    def append_sampled(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn: int
    ) -> None:
        """Append tokens that the policy sampled.

        Raises ValueError where the columns differ in length or a version is negative.
        """
        n = len(token_ids)
        if len(logprobs) != n or len(versions) != n:
            raise ValueError(f"columns differ in length: {n} ids, {len(logprobs)} logprobs, {len(versions)} versions")
        if any(version < 0 for version in versions):
            raise ValueError("a sampled token needs the version (>= 0) of the weights that sampled it")
        self._token_ids.extend(token_ids)
        self._sampled.extend([True] * n)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._turns.extend([turn] * n)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return np.asarray(self._token_ids, dtype=np.int32)

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._sampled, dtype=np.bool_)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        return np.asarray(self._logprobs, dtype=np.float32)

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        return np.asarray(self._versions, dtype=np.int32)

    @property
    def turns(self) -> npt.NDArray[np.int16]:
        return np.asarray(self._turns, dtype=np.int16)

    def ids(self) -> list[int]:
        """A copy of the token ids as a plain list: the prompt of the next engine call."""
        return list(self._token_ids)

    def fork(self, keep: int) -> TokenLedger:
        """A new ledger that begins with the first `keep` tokens as *context*.

        What this ledger holds as sampled is trained here and only here, so the fork carries none of it.
        """
        child = TokenLedger()
        child._token_ids = self._token_ids[:keep]
        child._sampled = [False] * keep
        child._logprobs = [0.0] * keep
        child._versions = [-1] * keep
        child._turns = self._turns[:keep]
        return child

    def to_json(self) -> dict[str, list[Any]]:
        """Plain lists, one a column; `from_json` is the inverse."""
        return {
            "token_ids": list(self._token_ids),
            "sampled": [int(flag) for flag in self._sampled],
            "logprobs": list(self._logprobs),
            "versions": list(self._versions),
            "turns": list(self._turns),
        }

    @classmethod
    def from_json(cls, columns: Mapping[str, Sequence[Any]]) -> TokenLedger:
        """Inverse of `to_json`. Raises ValueError where the columns differ in length."""
        lengths = {name: len(columns[name]) for name in ("token_ids", "sampled", "logprobs", "versions", "turns")}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"ledger columns differ in length: {lengths}")
        ledger = cls()
        ledger._token_ids = [int(x) for x in columns["token_ids"]]
        ledger._sampled = [bool(x) for x in columns["sampled"]]
        ledger._logprobs = [float(x) for x in columns["logprobs"]]
        ledger._versions = [int(x) for x in columns["versions"]]
        ledger._turns = [int(x) for x in columns["turns"]]
        return ledger


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance. `data` may reach the policy; `gold` never does (no observation, no info)."""

    id: str
    seed: int
    split: str = "train"
    data: Mapping[str, Json] = field(default_factory=dict)
    gold: Mapping[str, Json] = field(default_factory=dict)


@dataclass(slots=True)
class Trajectory:
    """One episode, whole: enough to train on it, to score it again offline, and to read it.

    `reward` is None where the episode could not be scored (see StopReason.infrastructure); it is never
    replaced by 0. `state` is the environment's final state as JSON, for state-based reward leaves.
    `tools` are the function schemas the policy was offered, for schema-based leaves. `rewrites`: where a
    context policy (or the environment's `history`) rewrote the conversation: before which turn, the ledger that
    begins with it, its tokens, and the messages that were put in.
    """

    env_id: str
    task: Task
    seed: int = 0
    member: int = 0
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ledgers: list[TokenLedger] = field(default_factory=list)
    rewrites: list[dict[str, Json]] = field(default_factory=list)
    tools: list[dict[str, Json]] = field(default_factory=list)
    state: Json = None
    reward: float | None = None
    evidence: Json = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    stop: StopReason = StopReason.DONE
    terminated: bool = False
    truncated: bool = False
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def sampled_tokens(self) -> int:
        return sum(int(ledger.sampled.sum()) for ledger in self.ledgers)

    @property
    def tokens(self) -> int:
        return sum(len(ledger) for ledger in self.ledgers)

    def calls(self) -> Iterator[tuple[Turn, ToolCall, ToolResult | None]]:
        """Every tool call in order, with its turn and its result (None where it got none)."""
        for turn in self.turns:
            answers = {result.call_id: result for result in turn.results}
            for call in turn.message.tool_calls:
                yield turn, call, answers.get(call.id)

    def to_json(self) -> dict[str, Json]:
        """A JSON object; `from_json` is the inverse."""
        row = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ledgers"}
        row["task"] = asdict(self.task)
        row["messages"] = [asdict(message) for message in self.messages]
        row["turns"] = [asdict(turn) for turn in self.turns]
        row["stop"] = self.stop.value
        row["ledgers"] = [ledger.to_json() for ledger in self.ledgers]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Trajectory:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on a row of another shape."""
        fields = dict(row)
        fields["task"] = Task(**row["task"])
        fields["messages"] = [_message(item) for item in row["messages"]]
        fields["turns"] = [_turn(item) for item in row["turns"]]
        fields["ledgers"] = [TokenLedger.from_json(item) for item in row["ledgers"]]
        fields["stop"] = StopReason(row["stop"])
        return cls(**fields)


def _message(row: Mapping[str, Json]) -> Message:
    return Message(**{**row, "tool_calls": tuple(ToolCall(**call) for call in row["tool_calls"])})


def _turn(row: Mapping[str, Json]) -> Turn:
    results = [ToolResult(**result) for result in row["results"]]
    return Turn(**{**row, "message": _message(row["message"]), "results": results})


@dataclass(slots=True)
class Group:
    """The trajectories of one task under one policy: the unit of admission and of advantage.

    `baseline` is a greedy episode of the same task where the advantage estimator asks for one (REMAX): it
    is scored and never trained.
    """

    index: int
    task_seed: int
    trajectories: list[Trajectory] = field(default_factory=list)
    baseline: Trajectory | None = None

    def scored(self) -> list[Trajectory]:
        """Members that have a reward; the others leave before any baseline is formed."""
        return [trajectory for trajectory in self.trajectories if trajectory.reward is not None]
