"""`TokenLedger`: one append-only token sequence as the model saw it, with its typed columns."""

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
    """Token ids of a prompt, or of a part of one, with the `images` whose placeholders stand among them, in order. A renderer of
    a model that takes images makes them, a ledger keeps them, and an engine is given them; any other reads a list of ids."""

    def __init__(self, ids: Iterable[int], images: Iterable[Image]) -> None:
        super().__init__(ids)
        self.images = tuple(images)


def images_in(ids: Sequence[int]) -> tuple[Image, ...]:
    """The images of token ids; none of a plain list."""
    return ids.images if isinstance(ids, PromptIds) else ()


def own(ids: Sequence[int]) -> list[int]:
    """A copy of token ids, with their images if they have any."""
    images = images_in(ids)
    return PromptIds(ids, images) if images else list(ids)


# Columns of a ledger

# Narrow types: the driver holds the ledgers of all episodes that run or wait for their update, and sends them on.
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
"""The last turn that a ledger can count: `turns` is int16."""


def numbers(values: Sequence[float], kind: type[np.generic]) -> npt.NDArray[Any]:
    """Numbers as int32 or float32. Raises ValueError if a value is not such a number."""
    if isinstance(values, np.ndarray):
        found = values.astype(kind, copy=False)
        # `astype` wraps integers around; floats may round.
        if found is not values and np.issubdtype(kind, np.integer) and not np.array_equal(found, values):
            raise ValueError(f"a column of {np.dtype(kind)}: a value does not fit")
        return found
    out = np.empty(len(values), dtype=kind)
    try:
        # Takes half the time of np.asarray, which reads each item of a list twice.
        struct.pack_into(f"{len(values)}{out.dtype.char}", out.data, 0, *values)
    except struct.error as fault:
        raise ValueError(f"a column of {np.dtype(kind)}: {fault}") from None
    return out


def packed_experts(experts: npt.NDArray[Any] | None) -> dict[str, Any]:
    """A ledger's experts, [tokens, routers, k] uint8 or int16, as base64 with their shape and numpy type; nothing for None."""
    if experts is None:
        return {}
    kind = "<i2" if experts.dtype == np.int16 else "|u1"
    return {"experts": encode_array(experts), "experts_shape": list(experts.shape), "experts_type": kind}


def encode_array(column: npt.NDArray[Any]) -> str:
    """Numbers as base64, for `decode_array`."""
    # The order of bytes is fixed here, because a file may be read on a machine of the other order.
    ordered = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<"))
    return base64.b64encode(ordered.data).decode("ascii")


def decode_array(text: str, kind: str) -> npt.NDArray[Any]:
    """The numbers of a base64 text; `kind`: their type in numpy's words, little-endian. Raises ValueError."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind).astype(np.dtype(kind).newbyteorder("="), copy=False)


# The ledger

Json = Any


_ROOM = 64  # tokens that a ledger has room for after its first append; it then grows by a quarter
Kind = TypeVar("Kind", bound=np.generic)


class LedgerColumn(Generic[Kind]):
    """A column of a ledger as a read-only view of the tokens that are there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, ledger: TokenLedger, _: object = None) -> npt.NDArray[Kind]:
        # No copy is needed: an append writes behind the view, or into new arrays.
        view = ledger._room[self.name][: ledger._length]
        view.flags.writeable = False  # a caller must not be able to change what the trainer learns from
        return view


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
    goes to no experts until it is computed for the next turn. `images`: those whose placeholder tokens stand among the context,
    in order.
    """

    __slots__ = ("_length", "_room", "experts", "images", "oldest", "sampled_tokens")

    token_ids: LedgerColumn[np.int32] = LedgerColumn("token_ids")
    sampled: LedgerColumn[np.bool_] = LedgerColumn("sampled")
    logprobs: LedgerColumn[np.float32] = LedgerColumn("logprobs")
    versions: LedgerColumn[np.int32] = LedgerColumn("versions")
    turns: LedgerColumn[np.int16] = LedgerColumn("turns")

    def __init__(self) -> None:
        self._length = 0
        self.experts: npt.NDArray[Any] | None = None
        self.images: tuple[Image, ...] = ()
        self._room = {name: np.empty(0, dtype=kind) for name, kind in KINDS.items()}
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
        # Without the room to grow, and without `oldest` and the count: they follow from the columns.
        state: dict[str, Any] = {name: getattr(self, name).copy() for name in KINDS}
        others = {"experts": self.experts, "images": self.images or None}
        return state | {name: value for name, value in others.items() if value is not None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        # Through `_append`, which counts again: what is sent to another process cannot disagree with its columns.
        self._append(len(state["token_ids"]), {name: state[name] for name in KINDS})
        self.experts, self.images = state.get("experts"), state.get("images", ())

    @property
    def routed_tokens(self) -> int:
        """Number of the first tokens that have `experts`."""
        return 0 if self.experts is None else len(self.experts)

    def add_experts(self, start: int, experts: npt.NDArray[Any]) -> None:
        """The experts of the tokens from `start` on, [tokens, routers, k]. A token that has some keeps them: they are those that
        later tokens were sampled with.

        Raises ValueError if they leave a gap, go beyond the tokens, or are of another shape or type than those before.
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
        """Append tokens that the policy did not sample (prompt, tool results, template text), and the images among them.

        Raises ValueError if an id does not fit int32, or `turn` is negative or above `MAX_TURN`.
        """
        ids = numbers(token_ids, np.int32)
        self._append(len(ids), {"token_ids": ids, "sampled": False, "logprobs": 0.0, "versions": -1, "turns": turn})
        self.images += images_in(token_ids)

    def append_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], turn: int) -> None:
        """Append tokens that the policy sampled.

        Raises ValueError if the columns differ in length, an id or version does not fit int32 or is negative,
        a log probability is not finite or above 0 (a token of probability 0 is never sampled, so the engine is at fault), or
        `turn` is negative or above `MAX_TURN`.
        """
        # All checks before `_append`: a turn that is refused leaves the ledger as it was.
        n = len(token_ids)
        if len(logprobs) != n or len(versions) != n:
            raise ValueError(f"columns differ in length: {n} ids, {len(logprobs)} logprobs, {len(versions)} versions")
        found = numbers(logprobs, np.float32)
        # Fast if all are equal, as they usually are: weights seldom change while a turn is sampled.
        same = isinstance(versions, list) and n > 0 and versions.count(versions[0]) == n
        weights = np.repeat(numbers(versions[:1], np.int32), n) if same else numbers(versions, np.int32)
        if n and int(weights.min()) < 0:
            raise ValueError("a sampled token needs the version (>= 0) of the weights that sampled it")
        ids = numbers(token_ids, np.int32)
        if n and int(ids.min()) < 0:
            raise ValueError(f"sampled token {ids.argmin()} of {n} has the id {ids.min()}, below 0")
        self._append(n, {"token_ids": ids, "sampled": True, "logprobs": found, "versions": weights, "turns": turn})

    def _append(self, count: int, given: Mapping[str, Any]) -> None:
        """Add `count` tokens; per column, `given` has an array or one value for all of them."""
        turn = given["turns"]
        if not isinstance(turn, np.ndarray) and not 0 <= turn <= MAX_TURN:
            raise ValueError(f"turn {turn}: a ledger counts turns from 0 to {MAX_TURN}")
        # Looked at as float32, the way it is stored: -1e39 is a number to Python and becomes -inf here.
        logprobs = given["logprobs"]
        possible = (logprobs > -np.inf) & (logprobs <= ROUNDING)  # NaN is neither
        if not np.all(possible):
            at, what = int(np.flatnonzero(~possible)[0]), "sampled token" if given["sampled"] is True else "token"
            why = "above 0: no probability is above 1" if np.isfinite(logprobs[at]) else "not a finite number"
            raise ValueError(f"the log probability of {what} {at} of {count} is {logprobs[at]}, {why}")
        begin, end = self._length, self._length + count
        # The first append is often a whole prompt and gets no spare room; growing by a quarter keeps later appends cheap
        # on average while at most a fifth of the memory is unused.
        if end > len(self._room["token_ids"]):
            room = max(end, _ROOM, end + end // 4 if begin else end)
            for name, old in self._room.items():
                # A new array, never a resize in place: views that were handed out must keep their values.
                self._room[name] = np.empty(room, dtype=old.dtype)
                self._room[name][:begin] = old[:begin]
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

    @property
    def nbytes(self) -> int:
        """Memory of the columns in bytes, including room to grow."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return sum(column.nbytes for column in self._room.values()) + experts

    def ids(self) -> list[int]:
        """A copy of the token ids as a list: the prompt of the next engine call."""
        ids: list[int] = self.token_ids.tolist()
        return PromptIds(ids, self.images) if self.images else ids

    def fork(self, keep: int) -> TokenLedger:
        """A new ledger that begins with the first `keep` tokens as *context*.

        The sampled tokens of this ledger are trained here and only here, so in the fork none of them counts as sampled.
        Raises ValueError if this ledger has fewer tokens.
        """
        if not 0 <= keep <= self._length:
            raise ValueError(f"cannot fork the first {keep} tokens of a ledger of {self._length} tokens")
        if self.images:
            raise ValueError("cannot fork a ledger with images: which of them the first tokens have is not known")
        child = TokenLedger()
        child._append(
            keep,
            {"token_ids": self.token_ids[:keep], "sampled": False, "logprobs": 0.0, "versions": -1, "turns": self.turns[:keep]},
        )
        # The same tokens at the same places: what the engine cached of them serves the fork too.
        child.experts = None if self.experts is None else self.experts[:keep]
        return child

    def to_json(self) -> dict[str, Any]:
        """Plain lists, one per column, and `experts` as in `to_packed_json`; `from_json` is the inverse."""
        plain: dict[str, Any] = {
            name: getattr(self, name).astype(np.int32 if name == "sampled" else kind).tolist() for name, kind in KINDS.items()
        }
        return {**plain, **packed_experts(self.experts)}

    def to_packed_json(self) -> dict[str, Json]:
        """The form in files, about 6 to 11 bytes per token; `from_json` is the inverse.

        `token_ids`: int32, `logprobs` of the sampled tokens only: float32, each as base64 of little-endian
        numbers. `spans`: [tokens, turn, version] of each run of tokens with equal turn and version, in order;
        version -1 is context. With `experts`: these as base64 too, their shape, and their numpy type.
        """
        versions, turns = self.versions, self.turns
        cuts = np.flatnonzero((versions[1:] != versions[:-1]) | (turns[1:] != turns[:-1])) + 1
        # An empty ledger has no run: position 0 is outside of its columns.
        starts = np.concatenate(([0], cuts)) if len(versions) else cuts
        return {
            "token_ids": encode_array(self.token_ids),
            "logprobs": encode_array(self.logprobs[self.sampled]),
            "spans": np.stack([np.diff(starts, append=len(versions)), turns[starts], versions[starts]], 1).tolist(),
            **packed_experts(self.experts),
            **({"images": [image.sha256 for image in self.images]} if self.images else {}),
        }

    def json_chunks(self) -> Iterator[str]:
        """`packed` as JSON text, piece by piece: the long parts are base64, which needs no escaping, so they are not copied."""
        before = "{"
        for name, value in self.to_packed_json().items():
            yield f'{before}"{name}": '
            yield from ('"', value, '"') if isinstance(value, str) else (json.dumps(value),)
            before = ", "
        yield "}"

    @classmethod
    def from_json(cls, row: Mapping[str, Any], images: Mapping[str, Image] | None = None) -> TokenLedger:
        """Inverse of `to_json` and of `packed`; `images`: those of the trajectory by digest. Raises ValueError if the columns do
        not fit together, OverflowError for a huge span, KeyError for an image that is not there."""
        ledger = cls()
        if "spans" in row:  # packed
            token_ids = decode_array(row["token_ids"], "<i4")
            # The shape is said, because an empty list would become a table without columns.
            spans = np.asarray(row["spans"], dtype=np.int64).reshape(-1, 3)
            total = spans[:, 0].sum()
            if total != len(token_ids):  # before they are written out: a damaged digit would take all memory
                raise ValueError(f"ledger columns differ in length: {total} tokens in spans, {len(token_ids)} token_ids")
            turns, versions = (np.repeat(spans[:, at], spans[:, 0]) for at in (1, 2))
            sampled, given = versions >= 0, decode_array(row["logprobs"], "<f4")
            if len(given) != int(sampled.sum()):
                raise ValueError(f"ledger columns differ in length: {sampled.sum()} sampled tokens, {len(given)} logprobs")
            logprobs = np.zeros(len(sampled), dtype=np.float32)
            logprobs[sampled] = given
            found = {"token_ids": token_ids, "sampled": sampled, "logprobs": logprobs, "versions": versions, "turns": turns}
        else:
            found = {name: numbers(row[name], kind) for name, kind in KINDS.items()}
        lengths = {name: len(column) for name, column in found.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"ledger columns differ in length: {lengths}")
        # Some code reads one column, some the other: if they differed, a token would be trained that no weights sampled.
        if not np.array_equal(found["sampled"], found["versions"] >= 0):
            raise ValueError("ledger columns disagree on the sampled tokens: `sampled` must be set exactly where `versions` >= 0")
        ledger._append(lengths["token_ids"], found)
        if "experts" in row:
            ledger.add_experts(0, decode_array(row["experts"], row["experts_type"]).reshape(row["experts_shape"]))
        ledger.images = tuple((images or {})[sha256] for sha256 in row.get("images", ()))
        return ledger
