"""The data types of an episode: Message, ToolCall, Turn, TokenLedger, Trajectory, Group, StopReason.

A policy's episode is deliberately kept twice: as messages and turns (what a person and a reward spec
read) and as token ledgers (exactly what the model saw and sampled; the only thing the trainer reads).
Neither is ever derived from the other afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from agentrl import columns
from agentrl.images import Image, images_of
from agentrl.plain_data import detached, json_text

Json = Any  # a JSON value: None, bool, int, float, str, list[Json] or dict[str, Json]
Role = Literal["system", "user", "assistant", "tool"]


class StopReason(StrEnum):
    """Why an episode ended. `terminated` is the task's own end; every other end is a truncation or a fault.

    Time that the policy used up is a budget like turns and tokens (`max_turn_time`, `max_tool_time`,
    `max_episode_time`: scored); time that the infrastructure lost is a fault (`tool_timeout`, `episode_timeout`).
    An agent's own program that fails (docs/agents.md) is a fault (`agent_error`), unless the run says that its policy is to blame
    (`agent_failed`: scored).
    """

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    MAX_TURN_TIME = "max_turn_time"
    MAX_TOOL_TIME = "max_tool_time"
    MAX_EPISODE_TIME = "max_episode_time"
    TOOL_TIMEOUT = "tool_timeout"
    EPISODE_TIMEOUT = "episode_timeout"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    AGENT_FAILED = "agent_failed"
    AGENT_ERROR = "agent_error"
    CANCELLED = "cancelled"

    @property
    def infrastructure(self) -> bool:
        """True if the policy is not to blame: such an episode is unscored (reward None), never 0."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {
        StopReason.ENV_ERROR,
        StopReason.ENGINE_ERROR,
        StopReason.AGENT_ERROR,
        StopReason.CANCELLED,
        StopReason.TOOL_TIMEOUT,
        StopReason.EPISODE_TIMEOUT,
    }
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant turn.

    `arguments` is the parsed JSON object, or None if the call was malformed; `error` then says what
    was wrong with it, and `raw` keeps the text as sampled.
    """

    name: str
    arguments: dict[str, Json] | None
    id: str = ""
    raw: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Tool results are messages of role "tool" with `tool_call_id` and `name`. `images`: those whose lines
    (`Image.line`) stand in `content`."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if self.images:  # rows, if the message was made of one
            object.__setattr__(self, "images", images_of(self.images))


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered: `content` and `images` as the model sees them; `error` is the error's kind, or None."""

    call_id: str
    name: str
    content: str
    value: Json = None
    error: str | None = None
    seconds: float = 0.0
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if self.images:
            object.__setattr__(self, "images", images_of(self.images))


@dataclass(frozen=True, slots=True)
class UserCall:
    """One call that the simulated user made to a tool of its own; the policy sees neither the call nor its result.

    `turn`: index of the policy's turn that the user was answering (-1: it was opening the conversation), so the call stands
    between that turn's message and the user's own. `step`: which of the user's messages in that answer, from 0; calls of one
    message share it. `text`: what the user wrote beside the calls of that message, which nobody is told. `result` is None if
    the call got none (its tool failed, or the episode was cut).
    """

    turn: int
    step: int
    call: ToolCall
    result: ToolResult | None = None
    text: str = ""


@dataclass(slots=True)
class Turn:
    """One policy turn: its assistant message, the results of its calls, and its cost.

    `ledger` and `end` are the position of the turn's last sampled token (ledger index, token index), so
    that a reward for this turn is put on that token; -1 until the turn was sampled by an engine.
    `seconds` is the time of the sampling and of its tool calls; `usd` is what an API charged for it,
    None if unknown.
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


_ROOM = 64  # tokens that a ledger has room for after its first append; it then grows by a quarter


class TokenLedger:
    """One append-only token sequence as the model saw it, in five columns of equal length (15 bytes per token).

    Columns: `token_ids` int32, `sampled` bool (True exactly where the policy sampled the token),
    `logprobs` float32 (log softmax(z / T) of the sampled token, 0 elsewhere), `versions` int32 (version of the weights
    that sampled it, -1 elsewhere), `turns` int16 (index of the policy turn that the token belongs to or answers).
    A column is a read-only view of the tokens that were there when it was read; later appends do not
    show in it. `oldest` is the lowest version that sampled a token, None if no token was sampled;
    `sampled_tokens` is the number of sampled tokens.

    `experts`: if routers are replayed, the experts of a mixture-of-experts model that the engine sent the first tokens to,
    [tokens, routers, k] uint8 or int16; else None. It may be shorter than the ledger: the last token that an engine samples
    goes to no experts until it is computed for the next turn.
    """

    __slots__ = ("_length", "_room", "experts", "oldest", "sampled_tokens")

    def __init__(self) -> None:
        self._length = 0
        self.experts: npt.NDArray[Any] | None = None
        self._room = {name: np.empty(0, dtype=kind) for name, kind in columns.KINDS.items()}
        self.oldest: int | None = None
        self.sampled_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenLedger)
            and all(
                np.array_equal(self._column(name), other._column(name), equal_nan=name == "logprobs") for name in columns.KINDS
            )
            and columns.equal(self.experts, other.experts)
        )

    def __getstate__(self) -> dict[str, npt.NDArray[Any]]:
        # Without the room to grow, and without `oldest` and the count: they follow from the columns.
        state = {name: self._column(name).copy() for name in columns.KINDS}
        return state if self.experts is None else {**state, "experts": self.experts}

    def __setstate__(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.__init__()  # type: ignore[misc]
        # Through `_append`, which counts again: what is sent to another process cannot disagree with its columns.
        self._append(len(state["token_ids"]), {name: state[name] for name in columns.KINDS})
        self.experts = state.get("experts")

    @property
    def routed(self) -> int:
        """How many of the first tokens have `experts`."""
        return 0 if self.experts is None else len(self.experts)

    def add_experts(self, start: int, experts: npt.NDArray[Any]) -> None:
        """The experts of the tokens from `start` on, [tokens, routers, k]. A token that has some keeps them: they are those that
        later tokens were sampled with.

        Raises ValueError if they leave a gap, go beyond the tokens, or are of another shape or type than those before.
        """
        if start > self.routed or start + len(experts) > self._length:
            raise ValueError(
                f"experts of tokens {start} to {start + len(experts)}: the ledger has {self._length} tokens "
                f"and those of the first {self.routed}"
            )
        if experts.ndim != 3 or experts.dtype not in (np.uint8, np.int16):
            raise ValueError(f"experts are [tokens, routers, k] of uint8 or int16, got {experts.dtype} {experts.shape}")
        fresh = experts[self.routed - start :]
        if self.experts is not None and (self.experts.shape[1:], self.experts.dtype) != (experts.shape[1:], experts.dtype):
            raise ValueError(f"experts of shape {experts.shape[1:]} after some of shape {self.experts.shape[1:]}")
        self.experts = fresh.copy() if self.experts is None else np.concatenate((self.experts, fresh))

    def append_context(self, token_ids: Sequence[int], turn: int) -> None:
        """Append tokens that the policy did not sample (prompt, tool results, template text).

        Raises ValueError if an id does not fit int32, or `turn` is negative or above `MAX_TURN`.
        """
        ids = columns.numbers(token_ids, np.int32)
        given = {"token_ids": ids, "sampled": False, "logprobs": 0.0, "versions": -1, "turns": columns.turn_number(turn)}
        self._append(len(ids), given)

    def append_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn: int) -> None:
        """Append tokens that the policy sampled.

        Raises ValueError if the columns differ in length, an id or version does not fit int32, a version is negative,
        a log probability is not finite (a token of probability 0 is never sampled, so the engine is at fault), or
        `turn` is negative or above `MAX_TURN`.
        """
        # All checks before `_append`: a turn that is refused leaves the ledger as it was.
        n = len(token_ids)
        if len(logprobs) != n or len(versions) != n:
            raise ValueError(f"columns differ in length: {n} ids, {len(logprobs)} logprobs, {len(versions)} versions")
        found, weights = columns.numbers(logprobs, np.float32), columns.version_numbers(versions)
        if n and int(weights.min()) < 0:
            raise ValueError("a sampled token needs the version (>= 0) of the weights that sampled it")
        columns.check_finite(found, "sampled token")
        ids = columns.numbers(token_ids, np.int32)
        given = {"token_ids": ids, "sampled": True, "logprobs": found, "versions": weights, "turns": columns.turn_number(turn)}
        self._append(n, given)

    def _append(self, count: int, given: Mapping[str, Any]) -> None:
        """Add `count` tokens; per column, `given` has an array or one value for all of them."""
        begin, end = self._length, self._length + count
        # The first append is often a whole prompt and gets no spare room; growing by a quarter keeps later appends cheap
        # on average while at most a fifth of the memory is unused.
        if end > len(self._room["token_ids"]):
            self._grow(max(end, _ROOM, end + end // 4 if begin else end))
        for name, values in given.items():
            self._room[name][begin:end] = values
        # Last of all: if a column does not fit, none of its tokens has been added.
        self._length = end
        # By version and not by `sampled`: the two agree, which `from_json` checks.
        fresh = self._room["versions"][begin:end]
        fresh = fresh[fresh >= 0]
        self.sampled_tokens += len(fresh)
        if len(fresh):
            lowest = int(fresh.min())
            self.oldest = lowest if self.oldest is None else min(self.oldest, lowest)

    def _grow(self, room: int) -> None:
        for name, old in self._room.items():
            # A new array, never a resize in place: views that were handed out must keep their values.
            fresh = np.empty(room, dtype=old.dtype)
            fresh[: self._length] = old[: self._length]
            self._room[name] = fresh

    def _column(self, name: str) -> npt.NDArray[Any]:
        # No copy is needed: an append writes behind the view, or into new arrays.
        view = self._room[name][: self._length]
        view.flags.writeable = False  # a caller must not be able to change what the trainer learns from
        return view

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self._column("token_ids")

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        return self._column("sampled")

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        return self._column("logprobs")

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        return self._column("versions")

    @property
    def turns(self) -> npt.NDArray[np.int16]:
        return self._column("turns")

    @property
    def nbytes(self) -> int:
        """Memory of the columns in bytes, including room to grow."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return sum(column.nbytes for column in self._room.values()) + experts

    def ids(self) -> list[int]:
        """A copy of the token ids as a plain list: the prompt of the next engine call."""
        ids: list[int] = self.token_ids.tolist()
        return ids

    def fork(self, keep: int) -> TokenLedger:
        """A new ledger that begins with the first `keep` tokens as *context*.

        The sampled tokens of this ledger are trained here and only here, so in the fork none of them counts as sampled.
        Raises ValueError if this ledger has fewer tokens.
        """
        if not 0 <= keep <= self._length:
            raise ValueError(f"cannot fork the first {keep} tokens of a ledger of {self._length} tokens")
        child = TokenLedger()
        child._append(
            keep,
            {"token_ids": self.token_ids[:keep], "sampled": False, "logprobs": 0.0, "versions": -1, "turns": self.turns[:keep]},
        )
        # The same tokens at the same places: what the engine cached of them serves the fork too.
        child.experts = None if self.experts is None else self.experts[:keep]
        return child

    def to_json(self) -> dict[str, Any]:
        """Plain lists, one per column, and `experts` as in `packed`; `from_json` is the inverse."""
        plain: dict[str, Any] = {
            name: self._column(name).astype(np.int32 if name == "sampled" else kind).tolist()
            for name, kind in columns.KINDS.items()
        }
        return {**plain, **columns.packed_experts(self.experts)}

    def packed(self) -> dict[str, Json]:
        """The form in files, about 6 to 11 bytes per token; `from_json` is the inverse.

        `token_ids`: int32, `logprobs` of the sampled tokens only: float32, each as base64 of little-endian
        numbers. `spans`: [tokens, turn, version] of each run of tokens with equal turn and version, in order;
        version -1 is context. With `experts`: these as base64 too, their shape, and their numpy type.
        """
        return {**columns.packed({name: self._column(name) for name in columns.KINDS}), **columns.packed_experts(self.experts)}

    def json_chunks(self) -> Iterator[str]:
        """`packed` as JSON text, piece by piece: the long parts are base64, which needs no escaping, so they are not copied."""
        before = "{"
        for name, value in self.packed().items():
            yield f'{before}"{name}": '
            yield from ('"', value, '"') if isinstance(value, str) else (json.dumps(value),)
            before = ", "
        yield "}"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TokenLedger:
        """Inverse of `to_json` and of `packed`. Raises ValueError if the columns do not fit together."""
        ledger = cls()
        found = (
            columns.unpacked(row)
            if "spans" in row
            else {name: columns.numbers(row[name], kind) for name, kind in columns.KINDS.items()}
        )
        lengths = {name: len(column) for name, column in found.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"ledger columns differ in length: {lengths}")
        # Some code reads one column, some the other: if they differed, a token would be trained that no weights sampled.
        if not np.array_equal(found["sampled"], found["versions"] >= 0):
            raise ValueError("ledger columns disagree on what was sampled: `sampled` must be set exactly where `versions` >= 0")
        columns.check_finite(found["logprobs"], "token")
        ledger._append(lengths["token_ids"], found)
        if "experts" in row:
            ledger.add_experts(0, columns.unpacked_experts(row))
        return ledger


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance. `data` may reach the policy; `gold` never does (no observation, no info)."""

    id: str
    seed: int
    split: str = "train"
    data: Mapping[str, Json] = field(default_factory=dict)
    gold: Mapping[str, Json] = field(default_factory=dict)

    def copied(self) -> Task:
        """The same task, of which nothing is shared: who gets it may change it."""
        return replace(self, data=detached(dict(self.data)), gold=detached(dict(self.gold)))


class RowElsewhere(Protocol):
    """A trajectory's row of a file, written elsewhere. `whole`: the record in it is still what the trajectory says."""

    whole: bool

    def chunks(self, record: str | None) -> Iterator[str]:
        """The row's text, piece by piece; `record`, if given, takes the place of the one in the file."""
        ...


@dataclass(slots=True)
class Trajectory:
    """One complete episode: enough to train on it, to score it again offline, and to read it.

    `env`: the name of its environment in the run ("" in older files, from when a run had only one); `env_id`: the id of the
    environment.
    `reward` is None if the episode could not be scored (see StopReason.infrastructure); it is never
    replaced by 0. `success` is whether it solved its task, as decided by the reward spec; None if unknown
    (unscored, or recorded before specs said so). `state` is the environment's final state as JSON, for
    state-based reward leaves.
    `cause`: if the episode ended by a fault or a clock, who is to blame ("policy" or "infrastructure") and, for a clock, the
    seconds that each of the two had used. `tools` are the function schemas that the policy was offered, for schema-based
    leaves. `user_calls`: the calls that the simulated user made to tools of its own, in the order in which they were made;
    their results are not among `messages`. `parting`: what the user said as it left, of which nobody is told, so it is not
    among `messages` either; "" if nothing, or recorded before it was kept. `rewrites`: one entry per rewrite of the
    conversation by a context policy: before which turn, the ledger that begins with it, its tokens, and the messages that
    were inserted. `agent`: of an episode that an agent of somebody else's played (docs/agents.md), how its program ended and
    what it wrote; else None. `stored`: where the process that played the episode wrote its row, if it did; who changes what
    the episode scored unsets `stored.whole`. `horizon`: how many calls the task's gold solution has (`ToolEnv.horizon`), by which
    success is told apart; None if that is not known. `given`: so many of the first turns are those of the gold solution
    (`rollout.start`), which are context of the ledgers and earn the policy nothing. `parent`: of a branch (`rollout.branch`), the
    member of its group that it was forked from, and `branch_turn` the turn before which; the turns before are the parent's, and
    context here. None of an episode that was played from its beginning.
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
    stored: RowElsewhere | None = field(default=None, compare=False, repr=False)

    @property
    def images(self) -> dict[str, Image]:
        """All images of its messages and results, each once, by digest."""
        held = [message.images for message in self.messages if message.images]
        held += [result.images for turn in self.turns for result in turn.results if result.images]
        held += [made.result.images for made in self.user_calls if made.result is not None and made.result.images]
        return {image.sha256: image for images in held for image in images}

    @property
    def sampled_tokens(self) -> int:
        return sum(ledger.sampled_tokens for ledger in self.ledgers)

    @property
    def tokens(self) -> int:
        return sum(len(ledger) for ledger in self.ledgers)

    def calls(self) -> Iterator[tuple[Turn, ToolCall, ToolResult | None]]:
        """Every tool call in order, with its turn and its result (None if it has none)."""
        for turn in self.turns:
            answers = {result.call_id: result for result in turn.results}
            for call in turn.message.tool_calls:
                yield turn, call, answers.get(call.id)

    def to_json(self) -> dict[str, Json]:
        """A JSON object, its ledgers as `TokenLedger.packed`; `from_json` is the inverse."""
        return {
            **self._record(),
            "task": asdict(self.task),
            **{name: [asdict(item, dict_factory=_referring) for item in getattr(self, name)] for name in ("messages", "turns")},
            **({"user_calls": [asdict(made, dict_factory=_referring) for made in self.user_calls]} if self.user_calls else {}),
            "ledgers": [ledger.packed() for ledger in self.ledgers],
        }

    def record_text(self) -> str:
        """All but the ledgers, as JSON text."""
        return json_text(self._record(), default=_fields)

    def json_chunks(self, record: str | None = None) -> Iterator[str]:
        """`to_json` as JSON text, piece by piece, so that a writer needs no more memory than one ledger column. The first piece
        is all before the ledgers. `record`: the result of `record_text`, if it is known."""
        if self.stored is not None:
            yield from self.stored.chunks(None if self.stored.whole else _begun(self.record_text()))
            return
        yield _begun(self.record_text() if record is None else record)
        for place, ledger in enumerate(self.ledgers):
            if place:
                yield ", "
            yield from ledger.json_chunks()
        yield "]}"

    def _record(self) -> dict[str, Json]:
        """All fields except the ledgers; their values are not converted yet (see `_fields`)."""
        row = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_IN_RECORD}
        row["stop"] = self.stop.value
        for name in ("agent", "horizon", "parent"):
            if row[name] is None:  # the rows of all other episodes stay as they are
                del row[name]
        for name in ("user_calls", "parting", "given", "branch_turn"):
            if not row[name]:
                del row[name]
        if images := self.images:
            row["images"] = {sha256: asdict(image) for sha256, image in images.items()}
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Trajectory:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for a row of another shape."""
        fields = dict(row)
        fields["task"] = Task(**row["task"])
        images = {sha256: Image.from_row(item) for sha256, item in fields.pop("images", {}).items()}
        fields["messages"] = [message_of(item, images) for item in row["messages"]]
        fields["turns"] = [turn_of(item, images) for item in row["turns"]]
        fields["user_calls"] = user_calls_of(row.get("user_calls", ()), images)
        fields["ledgers"] = [TokenLedger.from_json(item) for item in row["ledgers"]]
        fields["stop"] = StopReason(row["stop"])
        return cls(**fields)


_NOT_IN_RECORD = frozenset({"ledgers", "stored"})


def _begun(record: str) -> str:
    """A record's text with the ledgers to follow."""
    return record[:-1] + ', "ledgers": ['


def _fields(item: object) -> dict[str, Json]:
    """The fields of a nested dataclass, for `json.dumps`: `asdict` copies recursively, which takes longer than all the rest."""
    if isinstance(item, Task | Message | ToolCall | Turn | ToolResult | UserCall):
        return _referring([(name, getattr(item, name)) for name in item.__dataclass_fields__])
    raise TypeError(f"Object of type {type(item).__name__} is not JSON serializable")


def _referring(pairs: list[tuple[str, Any]]) -> dict[str, Json]:
    """Fields with images as their digests: a record has each image once, however often it is in it. Without images: without the
    field."""
    row = dict(pairs)
    if images := row.pop("images", None):
        row["images"] = [image.sha256 if isinstance(image, Image) else image["sha256"] for image in images]
    return row


def as_row(item: Message | Turn | ToolResult | ToolCall | UserCall) -> dict[str, Json]:
    """A part of an episode as JSON, with its images in full; a field `images` that is empty is left out."""
    return asdict(item, dict_factory=lambda pairs: {name: value for name, value in pairs if name != "images" or value})


_Images = Mapping[str, Image]
_ALONE: _Images = {}


def message_of(row: Mapping[str, Json], images: _Images = _ALONE) -> Message:
    """Inverse of `as_row`; `images`: those that the row has by digest. Raises KeyError, TypeError or ValueError."""
    return Message(**{**_found(row, images), "tool_calls": tuple(ToolCall(**call) for call in row["tool_calls"])})


def result_of(row: Mapping[str, Json], images: _Images = _ALONE) -> ToolResult:
    """Likewise."""
    return ToolResult(**_found(row, images))


def turn_of(row: Mapping[str, Json], images: _Images = _ALONE) -> Turn:
    """Likewise."""
    results = [result_of(result, images) for result in row["results"]]
    return Turn(**{**row, "message": message_of(row["message"], images), "results": results})


def user_calls_of(rows: Sequence[Mapping[str, Json]], images: _Images = _ALONE) -> list[UserCall]:
    """Likewise, of several calls."""
    found = []
    for row in rows:
        result = None if row["result"] is None else result_of(row["result"], images)
        found.append(UserCall(**{**row, "call": ToolCall(**row["call"]), "result": result}))
    return found


def _found(row: Mapping[str, Json], images: _Images) -> Mapping[str, Json]:
    """The row with the images that it has by digest."""
    held = row.get("images")
    return {**row, "images": tuple(images[item] if isinstance(item, str) else item for item in held)} if held else row


@dataclass(slots=True)
class Group:
    """The trajectories of one task under one policy: the unit of admission and of advantage estimation.

    `baseline` is a greedy episode of the same task, if the advantage estimator needs one (ReMax): it
    is scored and never trained on. `env`: the name of its environment in the run, as in its trajectories.
    """

    index: int
    task_seed: int
    trajectories: list[Trajectory] = field(default_factory=list)
    baseline: Trajectory | None = None
    env: str = ""

    def to_json(self) -> dict[str, Json]:
        """A JSON object; `from_json` is the inverse."""
        return {
            "index": self.index,
            "task_seed": self.task_seed,
            "env": self.env,
            "trajectories": [member.to_json() for member in self.trajectories],
            "baseline": None if self.baseline is None else self.baseline.to_json(),
        }

    def json_chunks(self) -> Iterator[str]:
        """`to_json` as JSON text, chunk by chunk; see `Trajectory.json_chunks`."""
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
        """Inverse of `to_json`. Raises what `Trajectory.from_json` raises."""
        greedy = row.get("baseline")
        return cls(
            row["index"],
            row["task_seed"],
            [Trajectory.from_json(item) for item in row["trajectories"]],
            None if greedy is None else Trajectory.from_json(greedy),
            row.get("env", ""),
        )

    def scored(self) -> list[Trajectory]:
        """Members that have a reward; the others are dropped before any baseline is computed."""
        return [trajectory for trajectory in self.trajectories if trajectory.reward is not None]
