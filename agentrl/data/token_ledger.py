"""`TokenLedger`: an append-only token sequence as the model saw it, in typed columns."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.data.images import Image

# Token ids with images


class PromptIds(list[int]):
    """Token ids of a prompt or a part of it, with the `images` of their placeholders.

    Renderers of vision models create them, ledgers store them, engines read them; for all other code they are a list of ids."""

    def __init__(self, ids: Iterable[int], images: Iterable[Image]) -> None:
        super().__init__(ids)
        self.images = tuple(images)


def images_in(ids: Sequence[int]) -> tuple[Image, ...]:
    """Return the images of token ids; () for a plain list."""
    return ids.images if isinstance(ids, PromptIds) else ()


def copy_ids(ids: Sequence[int]) -> list[int]:
    """Copy token ids, with their images if they have any."""
    images = images_in(ids)
    return PromptIds(ids, images) if images else list(ids)


# Columns of a ledger

# Narrow types: the driver holds and sends the ledgers of all episodes that are running or wait for their update.
KINDS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "sampled": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "turns": np.int16,
}
ROUNDING = 0.01
"""A log probability may be this much above 0."""
MAX_TURN = int(np.iinfo(np.int16).max)
"""Maximum turn number of a ledger: `turns` is int16."""


def to_column(values: Sequence[float], kind: type[np.generic]) -> npt.NDArray[Any]:
    """Convert numbers to an array of a ledger's type. Raises ValueError if a value does not fit."""
    if isinstance(values, np.ndarray):
        found = values.astype(kind, copy=False)
        # `astype` wraps integers around, which is an error; floats may round.
        if found is not values and np.issubdtype(kind, np.integer) and not np.array_equal(found, values):
            raise ValueError(f"a column of {np.dtype(kind)}: a value does not fit")
        return found
    out = np.empty(len(values), dtype=kind)
    try:
        # Twice as fast as np.asarray, which reads each item of a list twice.
        struct.pack_into(f"{len(values)}{out.dtype.char}", out.data, 0, *values)
    except struct.error as fault:
        raise ValueError(f"a column of {np.dtype(kind)}: {fault}") from None
    return out


def packed_experts(experts: npt.NDArray[Any] | None) -> dict[str, Any]:
    """Encode experts [tokens, routers, k], uint8 or int16, as base64 with shape and numpy type; {} for None."""
    if experts is None:
        return {}
    kind = "<i2" if experts.dtype == np.int16 else "|u1"
    return {"experts": encode_array(experts), "experts_shape": list(experts.shape), "experts_type": kind}


def encode_array(column: npt.NDArray[Any]) -> str:
    """Encode an array as base64 of little-endian numbers; `decode_array` is the inverse."""
    # A fixed byte order, because a file may be read on a machine with the other one.
    ordered = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<"))
    return base64.b64encode(ordered.data).decode("ascii")


def decode_array(text: str, kind: str) -> npt.NDArray[Any]:
    """Decode a base64 text to an array. `kind`: numpy type string, little-endian. Raises ValueError."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind).astype(np.dtype(kind).newbyteorder("="), copy=False)


# The ledger

Json = Any


_MIN_CAPACITY = 64  # minimum capacity in tokens after the first append; it then grows by a quarter
Kind = TypeVar("Kind", bound=np.generic)


class LedgerColumn(Generic[Kind]):
    """Descriptor of a ledger's column: a read-only view of its current tokens."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, ledger: TokenLedger, _: object = None) -> npt.NDArray[Kind]:
        # Not a copy: an append writes after the view, or into new arrays.
        view = ledger._buffers[self.name][: ledger._length]
        view.flags.writeable = False  # callers must not change training data
        return view


class TokenLedger:
    """An append-only token sequence as the model saw it, in five columns of equal length.

    Columns (15 bytes per token): `token_ids` int32, `sampled` bool (True exactly for tokens that the policy sampled), `logprobs`
    float32 (log softmax(z / T) of a sampled token, else 0), `versions` int32 (version of the weights that sampled the token, else
    -1), `turns` int16 (index of the policy turn that the token belongs to or answers). A column is a read-only view of the tokens
    at the time of access, without later appends. `oldest`: lowest version that sampled a token, or None; `sampled_tokens`: number
    of sampled tokens.

    `experts`: with router replay, the experts that the engine chose for the first tokens, [tokens, routers, k] uint8 or int16,
    else None. It may be shorter than the ledger: the engine routes the last sampled token only in the next turn. `images`: images
    of the placeholder tokens in the context, in order.
    """

    __slots__ = ("_buffers", "_length", "experts", "images", "oldest", "sampled_tokens")

    token_ids: LedgerColumn[np.int32] = LedgerColumn("token_ids")
    sampled: LedgerColumn[np.bool_] = LedgerColumn("sampled")
    logprobs: LedgerColumn[np.float32] = LedgerColumn("logprobs")
    versions: LedgerColumn[np.int32] = LedgerColumn("versions")
    turns: LedgerColumn[np.int16] = LedgerColumn("turns")

    def __init__(self) -> None:
        self._length = 0
        self.experts: npt.NDArray[Any] | None = None
        self.images: tuple[Image, ...] = ()
        self._buffers = {name: np.empty(0, dtype=kind) for name, kind in KINDS.items()}
        self.oldest: int | None = None
        self.sampled_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenLedger)
            and all(np.array_equal(getattr(self, one), getattr(other, one), equal_nan=one == "logprobs") for one in KINDS)
            and (self.experts is None) == (other.experts is None)
            and (self.experts is None or other.experts is None or np.array_equal(self.experts, other.experts))
            and self.images == other.images
        )

    def __getstate__(self) -> dict[str, Any]:
        # Without spare capacity, `oldest` and the count, which follow from the columns.
        state: dict[str, Any] = {name: getattr(self, name).copy() for name in KINDS}
        others = {"experts": self.experts, "images": self.images or None}
        return state | {name: value for name, value in others.items() if value is not None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        # `_append` counts again, so that the counts always agree with the columns.
        self._append(len(state["token_ids"]), {name: state[name] for name in KINDS})
        self.experts, self.images = state.get("experts"), state.get("images", ())

    @property
    def routed_tokens(self) -> int:
        """Return the number of tokens with `experts`, which are the first ones."""
        return 0 if self.experts is None else len(self.experts)

    def add_experts(self, start: int, experts: npt.NDArray[Any]) -> None:
        """Add the experts [tokens, routers, k] of the tokens from `start` on; tokens that have some keep theirs.

        Later tokens were sampled with the first choice. Raises ValueError for a gap, for experts beyond the last token, or for
        another shape or type than before.
        """
        if start > self.routed_tokens or start + len(experts) > self._length:
            raise ValueError(
                f"experts of tokens {start} to {start + len(experts)}: the ledger has {self._length} tokens "
                f"and those of the first {self.routed_tokens}"
            )
        if experts.ndim != 3 or experts.dtype not in (np.uint8, np.int16):
            raise ValueError(f"experts are [tokens, routers, k] of uint8 or int16, got {experts.dtype} {experts.shape}")
        fresh = experts[self.routed_tokens - start :]
        if self.experts is not None and (self.experts.shape[1:], self.experts.dtype) != (experts.shape[1:], experts.dtype):
            raise ValueError(f"experts of shape {experts.shape[1:]} after some of shape {self.experts.shape[1:]}")
        self.experts = fresh.copy() if self.experts is None else np.concatenate((self.experts, fresh))

    def append_context(self, token_ids: Sequence[int], turn: int) -> None:
        """Append context (prompt, tool results, template text), with its images.

        Raises ValueError if an id does not fit int32, or `turn` is negative or above `MAX_TURN`.
        """
        ids = to_column(token_ids, np.int32)
        self._append(len(ids), {"token_ids": ids, "sampled": False, "logprobs": 0.0, "versions": -1, "turns": turn})
        self.images += images_in(token_ids)

    def append_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn: int) -> None:
        """Append tokens that the policy sampled.

        Raises ValueError if the columns differ in length, an id or version does not fit int32 or is negative, a log
        probability is not finite or above 0 (an error of the engine, as tokens of probability 0 are never sampled), or
        `turn` is negative or above `MAX_TURN`.
        """
        # All checks before `_append`: a refused turn leaves the ledger unchanged.
        n = len(token_ids)
        if len(logprobs) != n or len(versions) != n:
            raise ValueError(f"columns differ in length: {n} ids, {len(logprobs)} logprobs, {len(versions)} versions")
        found = to_column(logprobs, np.float32)
        # Fast path for equal versions: weights rarely change while a turn is sampled.
        same = isinstance(versions, list) and n > 0 and versions.count(versions[0]) == n
        weights = np.repeat(to_column(versions[:1], np.int32), n) if same else to_column(versions, np.int32)
        if n and int(weights.min()) < 0:
            raise ValueError("a sampled token needs the version (>= 0) of the weights that sampled it")
        ids = to_column(token_ids, np.int32)
        if n and int(ids.min()) < 0:
            raise ValueError(f"sampled token {ids.argmin()} of {n} has the id {ids.min()}, below 0")
        self._append(n, {"token_ids": ids, "sampled": True, "logprobs": found, "versions": weights, "turns": turn})

    def _append(self, count: int, given: Mapping[str, Any]) -> None:
        """Append `count` tokens. `given`: by column, an array or one value for all tokens."""
        turn = given["turns"]
        if not isinstance(turn, np.ndarray) and not 0 <= turn <= MAX_TURN:
            raise ValueError(f"turn {turn}: a ledger counts turns from 0 to {MAX_TURN}")
        # Checked as float32, as stored: -1e39 is finite in Python and becomes -inf here.
        logprobs = given["logprobs"]
        possible = (logprobs > -np.inf) & (logprobs <= ROUNDING)  # NaN is neither
        if not np.all(possible):
            at, what = int(np.flatnonzero(~possible)[0]), "sampled token" if given["sampled"] is True else "token"
            why = "above 0: no probability is above 1" if np.isfinite(logprobs[at]) else "not a finite number"
            raise ValueError(f"the log probability of {what} {at} of {count} is {logprobs[at]}, {why}")
        begin, end = self._length, self._length + count
        # The first append is often a whole prompt and gets no spare capacity; growing by a quarter keeps later appends cheap on
        # average, with at most a fifth of the memory unused.
        if end > len(self._buffers["token_ids"]):
            capacity = max(end, _MIN_CAPACITY, end + end // 4 if begin else end)
            for name, old in self._buffers.items():
                # A new array, never a resize in place: existing views must keep their values.
                self._buffers[name] = np.empty(capacity, dtype=old.dtype)
                self._buffers[name][:begin] = old[:begin]
        for name, values in given.items():
            self._buffers[name][begin:end] = values
        # Last: if a column does not fit, no token has been added.
        self._length = end
        # By version instead of `sampled`: the two agree (`from_json` checks it).
        fresh = self._buffers["versions"][begin:end]
        fresh = fresh[fresh >= 0]
        self.sampled_tokens += len(fresh)
        if len(fresh):
            lowest = int(fresh.min())
            self.oldest = lowest if self.oldest is None else min(self.oldest, lowest)

    @property
    def nbytes(self) -> int:
        """Return the memory of the columns in bytes, including spare capacity."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return sum(column.nbytes for column in self._buffers.values()) + experts

    def ids(self) -> list[int]:
        """Copy the token ids to a list, the prompt of the next engine call."""
        ids: list[int] = self.token_ids.tolist()
        return PromptIds(ids, self.images) if self.images else ids

    def fork(self, keep: int) -> TokenLedger:
        """Create a ledger that begins with the first `keep` tokens as *context*.

        Sampled tokens are trained only in this ledger, so the fork has none of them as sampled. Raises ValueError if this ledger
        has fewer tokens, or images.
        """
        if not 0 <= keep <= self._length:
            raise ValueError(f"cannot fork the first {keep} tokens of a ledger of {self._length} tokens")
        if self.images:
            raise ValueError("cannot fork a ledger with images: it does not record which of its tokens they belong to")
        child = TokenLedger()
        child._append(
            keep,
            {"token_ids": self.token_ids[:keep], "sampled": False, "logprobs": 0.0, "versions": -1, "turns": self.turns[:keep]},
        )
        # The engine reuses its cache of these tokens for the fork, and so their experts.
        child.experts = None if self.experts is None else self.experts[:keep]
        return child

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, one per column, and `experts` as in `to_packed_json`; `from_json` is the inverse."""
        plain: dict[str, Any] = {
            name: getattr(self, name).astype(np.int32 if name == "sampled" else kind).tolist() for name, kind in KINDS.items()
        }
        return {**plain, **packed_experts(self.experts)}

    def to_packed_json(self) -> dict[str, Json]:
        """Return the format of files, about 6 to 11 bytes per token; `from_json` is the inverse.

        `token_ids` int32 and `logprobs` float32 (sampled tokens only): base64 of little-endian numbers. `spans`:
        [tokens, turn, version] of each run of tokens with equal turn and version, in order; version -1 is context. With experts:
        `experts` as base64, `experts_shape`, `experts_type` (numpy). With images: `images`, their digests.
        """
        versions, turns = self.versions, self.turns
        cuts = np.flatnonzero((versions[1:] != versions[:-1]) | (turns[1:] != turns[:-1])) + 1
        # An empty ledger has no run.
        starts = np.concatenate(([0], cuts)) if len(versions) else cuts
        return {
            "token_ids": encode_array(self.token_ids),
            "logprobs": encode_array(self.logprobs[self.sampled]),
            "spans": np.stack([np.diff(starts, append=len(versions)), turns[starts], versions[starts]], 1).tolist(),
            **packed_experts(self.experts),
            **({"images": [image.sha256 for image in self.images]} if self.images else {}),
        }

    def json_chunks(self) -> Iterator[str]:
        """Yield the JSON text of `to_packed_json` in pieces; base64 needs no escaping, so long parts are not copied."""
        before = "{"
        for name, value in self.to_packed_json().items():
            yield f'{before}"{name}": '
            yield from ('"', value, '"') if isinstance(value, str) else (json.dumps(value),)
            before = ", "
        yield "}"

    @classmethod
    def from_json(cls, row: Mapping[str, Any], images: Mapping[str, Image] | None = None) -> TokenLedger:
        """Parse a row of `to_json` or `to_packed_json`. `images`: images of the trajectory by digest.

        Raises ValueError if the columns do not fit together, OverflowError for a huge span, KeyError for a missing image or
        column."""
        ledger = cls()
        if "spans" in row:  # packed
            token_ids = decode_array(row["token_ids"], "<i4")
            # Reshaped, because an empty list would become an array without columns.
            spans = np.asarray(row["spans"], dtype=np.int64).reshape(-1, 3)
            total = spans[:, 0].sum()
            if total != len(token_ids):  # before expanding spans: a damaged digit could take all memory
                raise ValueError(f"ledger columns differ in length: {total} tokens in spans, {len(token_ids)} token_ids")
            turns, versions = (np.repeat(spans[:, at], spans[:, 0]) for at in (1, 2))
            sampled, given = versions >= 0, decode_array(row["logprobs"], "<f4")
            if len(given) != int(sampled.sum()):
                raise ValueError(f"ledger columns differ in length: {sampled.sum()} sampled tokens, {len(given)} logprobs")
            logprobs = np.zeros(len(sampled), dtype=np.float32)
            logprobs[sampled] = given
            found = {"token_ids": token_ids, "sampled": sampled, "logprobs": logprobs, "versions": versions, "turns": turns}
        else:
            found = {name: to_column(row[name], kind) for name, kind in KINDS.items()}
        lengths = {name: len(column) for name, column in found.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"ledger columns differ in length: {lengths}")
        # Code reads either column: if they differed, a token without a version would be trained.
        if not np.array_equal(found["sampled"], found["versions"] >= 0):
            raise ValueError("ledger columns disagree on the sampled tokens: `sampled` must be set exactly where `versions` >= 0")
        ledger._append(lengths["token_ids"], found)
        if "experts" in row:
            ledger.add_experts(0, decode_array(row["experts"], row["experts_type"]).reshape(row["experts_shape"]))
        ledger.images = tuple((images or {})[sha256] for sha256 in row.get("images", ()))
        return ledger
