"""The renderer contract, and text to token ids with markup kept apart.

From the bottom: tokenizers for parts of a text, encoding, settled text while it is sampled, the contract."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Tokenizer

from agentrl.data.trajectory import Json, Message
from agentrl.utils.errors import ModelError, RenderError
from agentrl.utils.threads import LONG_TEXT, by_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Tokenizers for parts of a text: what a tokenizer adds at the start of a text must not be repeated in the middle.
# SentencePiece-style ones put a space before their input: of a whole conversation only at its start ("first"), or after every
# control token as well; of one that is encoded in parts, before each part.


class Place(Enum):
    """Predecessor of a piece of ordinary text."""

    START = "nothing"
    TOKEN = "a control token"
    TEXT = "more text"


def plain_tokenizers(full: Tokenizer, control: frozenset[str]) -> dict[Place, Tokenizer]:
    """For each place, the tokenizer without its control tokens, which it therefore reads as ordinary text."""
    spec = json.loads(full.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["content"] not in control]
    # They are made for whole texts: each piece would get a begin token, or be cut.
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    spec["model"]["vocab"] = _unspellable(spec["model"], control)
    made: dict[str, Tokenizer] = {}  # a large vocabulary takes a second to build, so equal places share one
    result: dict[Place, Tokenizer] = {}
    for place in Place:
        parts = {name: _at_place(spec[name], place) for name in ("normalizer", "pre_tokenizer")}
        key = json.dumps(parts)
        if key not in made:
            made[key] = Tokenizer.from_str(json.dumps({**spec, **parts}))
        result[place] = made[key]
    return result


def _unspellable(model: dict[str, Any], control: frozenset[str]) -> Any:
    """The model's vocabulary with control tokens renamed to strings that no text contains: a unigram model matches
    a piece anywhere in a text. (In a BPE model a piece that no merge produces matches only as a whole word.)"""
    vocab = model.get("vocab")
    secret = secrets.token_hex(16)
    if isinstance(vocab, list):
        return [[f"{secret}{i}" if piece in control else piece, score] for i, (piece, score) in enumerate(vocab)]
    if not isinstance(vocab, dict):
        return vocab
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    # Pieces that a merge uses keep their names: the tokenizers library refuses merges of unknown pieces.
    kept = {piece for pair in pairs for piece in (*pair, "".join(pair))} | {model.get("unk_token")}
    hidden = control - kept
    return {f"{secret}{number}" if piece in hidden else piece: number for piece, number in vocab.items()}


def _at_place(part: Any, place: Place) -> Any:
    """A normalizer or pre-tokenizer as it acts at `place`; None if nothing remains of it."""
    if not isinstance(part, dict):
        return part
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [_at_place(item, place) for item in part[key]]
        return {**part, key: [item for item in inner if item is not None]}
    if part["type"] == "Prepend":
        return None if place is Place.TEXT else part
    if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
        return {**part, "add_prefix_space": place is not Place.TEXT}
    if part["type"] == "Metaspace":
        scheme = part["prepend_scheme"]
        never = place is Place.TEXT or (place is Place.TOKEN and scheme == "first")
        return {**part, "prepend_scheme": "never" if never else scheme}
    return part


# Text to token ids. A tokenizer turns the characters `<|im_end|>` into the control token wherever they occur, so a tool that
# prints them could end its own turn and forge another. Here only `Markup`, which only renderers write, may become an added
# token; a plain `str` is always encoded as ordinary text.

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Markup(str):
    """Text written by the template, in which the tokenizer's added tokens are recognized."""

    __slots__ = ()


class Codec:
    """Encodes and decodes for one tokenizer (a `tokenizers`-backed one of transformers)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, written: str = "") -> None:
        """`written`: text of the chat template for some messages. Raises ModelError if the tokenizer has no `tokenizers` backend
        or turns ordinary text into a control token."""
        if not tokenizer.is_fast:
            raise ModelError(f"{type(tokenizer).__name__} has no `tokenizers` backend (no tokenizer.json)")
        self._full: Tokenizer = tokenizer.backend_tokenizer
        entries = self._full.get_added_tokens_decoder()
        self.added = {entry.content: number for number, entry in entries.items()}
        # An added token is a control token if it is special or the template uses it (`<tool_call>`); the others
        # (runs of spaces, HTML tags) are ordinary vocabulary, which plain text may use.
        template = written + tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        self.control: frozenset[str] = frozenset(
            entry.content
            for entry in entries.values()
            if entry.special or (entry.content in template and not entry.content.isspace())
        )
        self._special = {entry.content for entry in entries.values() if entry.special}
        self._strip_after = {entry.content for entry in entries.values() if entry.rstrip}
        self._strip_before = {entry.content for entry in entries.values() if entry.lstrip}
        # The unknown token is what ordinary text may become, and it ends no turn.
        unknown = tokenizer.unk_token_id
        self._forbidden = {self.added[content] for content in self.control} - {unknown}
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._plain = plain_tokenizers(self._full, self.control)
        for content in self.control:
            try:
                self.encode(content)
            except RenderError as problem:
                raise ModelError(f"the tokenizer cannot encode {content!r} as ordinary text: {problem}") from None

    def encode(self, *parts: str, after: Place = Place.TOKEN) -> list[int]:
        """Ids of the joined parts, which by default come `after` a control token. Ordinary text between two added tokens is
        encoded as one piece, as the tokenizer itself would do, even if it comes from several parts."""
        ids: list[int] = []
        run: list[str] = []
        strip = False
        for part in parts:
            # Cut at added tokens, every other piece is one. Only the template may write them.
            for number, piece in enumerate(self._pattern.split(part) if isinstance(part, Markup) else (part,)):
                if number % 2:
                    text = "".join(run)
                    # Some added tokens swallow the white space next to them; the tokenizer would do the same here.
                    text = text.rstrip() if piece in self._strip_before else text
                    ids += self._ordinary(text.lstrip() if strip else text, after)
                    ids.append(self.added[piece])
                    run, strip, after = [], piece in self._strip_after, Place.TOKEN
                else:
                    run.append(piece)
        text = "".join(run)
        return ids + self._ordinary(text.lstrip() if strip else text, after)

    def place_after(self, text: str) -> Place:
        """The place of a piece that comes after `text`, which the template wrote."""
        if not text:
            return Place.START
        return Place.TOKEN if any(text.endswith(token) for token in self.added) else Place.TEXT

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, with control tokens by name; an id that the tokenizer does not have is a replacement character."""
        text, known = "", []
        for number in ids:
            # Ids are u32 there: others raise an OverflowError, and what was sampled must always be readable.
            if 0 <= number < 2**32 and self._full.id_to_token(number) is not None:
                known.append(number)
            else:
                text += self._decode(known) + REPLACEMENT
                known = []
        return text + self._decode(known)

    def mark(self, text: str) -> str:
        """Form of special tokens in a grammar: special tokens by number, since no text matches them."""
        return f"<[{self.added[text]}]>" if text in self._special else json.dumps(text)

    def piece(self, number: int) -> str:
        """The name of an id in the vocabulary; empty if the tokenizer does not have it."""
        return (self._full.id_to_token(number) or "") if 0 <= number < 2**32 else ""

    def _decode(self, ids: list[int]) -> str:
        # As in `_encode`: of a batch, other threads run meanwhile.
        if len(ids) >= LONG_TEXT:
            return str(self._full.decode_batch([ids], skip_special_tokens=False)[0])
        return str(self._full.decode(ids, skip_special_tokens=False)) if ids else ""

    def _ordinary(self, text: str, after: Place) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates are not characters, and no tokenizer accepts them: U+FFFD instead
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = _encode(self._plain[after], text)
        if not self._forbidden.isdisjoint(ids):
            raise RenderError(f"ordinary text became a control token: {text[:80]!r}")
        return ids


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # `encode` keeps the interpreter's lock: with 1 MB of text no other thread runs for 0.7 s, the event loop's neither. A batch
    # gives it up; for a short text that would only be another chance to wait for it.
    if len(text) < LONG_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids
    of_batch: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return of_batch


# A turn's text while it is sampled: as much of it as is settled, whatever comes next. A character of which only some bytes were
# sampled, white space that may end the turn, and what may begin a tool call are held until more is known. Calls are read from
# whole turns only, so nothing after the first one is told before the turn is over.

_LONGEST_CHARACTER = 32  # ids, with those of a joined emoji
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TurnReader:
    """Reads a turn's ids in order. This one settles nothing before the turn is over, which is right for any renderer."""

    def read(self, token_ids: Sequence[int]) -> str:
        """Text that the next ids add to the result of `parse` at the beginning of the turn's content, however it goes on."""
        return ""


class SettledText:
    """The text of ids that come one after the other, in pieces that together are the text of all."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._told: list[int] = []  # the ids of the last piece, without which the next ones may decode otherwise
        self._new: list[int] = []
        self._tried = 0

    def read(self, token_ids: Sequence[int]) -> str:
        """The next piece; empty while a character is incomplete."""
        self._new += token_ids
        # Bytes that stand for themselves are read together: those before may still turn out to be no characters.
        if not self._new or _BYTE.fullmatch(self._codec.piece(self._new[-1])):
            return ""
        # Ids that never make a whole character are tried again only once they are twice as many.
        if len(self._new) < 2 * self._tried:
            return ""
        before, text = self._codec.decode(self._told), self._codec.decode([*self._told, *self._new])
        if text.endswith(REPLACEMENT) or not text.startswith(before):
            self._tried = len(self._new) if len(self._new) > _LONGEST_CHARACTER else 0
            return ""
        self._told, self._new, self._tried = self._new, [], 0
        return text[len(before) :]


class ProseReader(TurnReader):
    """For turns in which an optional reasoning between marks comes first, and calls begin with one of some marks."""

    def __init__(
        self,
        codec: Codec,
        frame: tuple[str, str],
        ends: Sequence[str],
        *,
        last: Sequence[int] = (),
        thinking: bool = False,
        thinks: Callable[[Sequence[int]], bool] = lambda ids: True,
    ) -> None:
        """`frame`: the marks around a reasoning; `ends`: texts from which on nothing is settled (of calls, stop strings).
        `last`: ids after which nothing is. `thinking`: the turn begins within the reasoning. `thinks`: whether the mark of a
        reasoning that is in the text of these ids is one, and no text that only looks like it."""
        self._text = SettledText(codec)
        self._open, self._close = frame
        self._ends, self._last = [end for end in ends if end], frozenset(last)
        self._thinks = thinks
        self._ids: list[int] = []
        self._pending = ""
        self._state: Literal["beginning", "thinking", "prose", "silent"] = "thinking" if thinking else "beginning"
        self._said = False
        self._blanks: list[str] = []
        self._blank_ends = any(letter.isspace() for end in self._ends for letter in end)

    def read(self, token_ids: Sequence[int]) -> str:
        over = next((place for place, number in enumerate(token_ids) if number in self._last), None)
        told = self._next(token_ids[:over])
        if over is not None:
            self._state = "silent"
        return told

    def _next(self, token_ids: Sequence[int]) -> str:
        if self._state == "silent":
            return ""
        if self._state != "prose":
            self._ids += token_ids
        piece = self._text.read(token_ids)
        may_wait = not self._blank_ends and (not self._pending or self._pending.isspace())
        if piece.isspace() and self._state == "prose" and may_wait:
            self._blanks.append(piece)  # put together once: each read would look through all of them again
            return ""
        self._pending += "".join(self._blanks) + piece
        self._blanks.clear()
        if self._state == "beginning":
            self._pending = head = self._pending.lstrip()
            if not head or (len(head) < len(self._open) and self._open.startswith(head)):
                return ""
            if not head.startswith(self._open):
                self._state = "prose"
            else:
                self._pending, self._state = head.removeprefix(self._open), "thinking" if self._thinks(self._ids) else "silent"
        if self._state == "thinking":
            before, mark, self._pending = self._pending.partition(self._close)
            if not mark:
                self._pending = before[-len(self._close) :]
                return ""
            self._state = "prose" if self._thinks(self._ids) else "silent"
        return self._prose() if self._state == "prose" else ""

    def _prose(self) -> str:
        if not self._said:
            self._pending = self._pending.lstrip()
        found = [at for end in self._ends if (at := self._pending.find(end)) >= 0]
        if found:
            self._state = "silent"
            return self._pending[: min(found)].rstrip()
        # What is blank may be stripped, and what begins like an end may become one.
        cut = min((_partial(self._pending, end) for end in self._ends), default=len(self._pending))
        told = self._pending[:cut].rstrip()
        self._pending = self._pending[len(told) :]
        self._said = self._said or bool(told)
        return told


def _partial(text: str, end: str) -> int:
    """Start of the longest beginning of `end` that `text` ends with."""
    for length in range(min(len(end) - 1, len(text)), 0, -1):
        if text.endswith(end[:length]):
            return len(text) - length
    return len(text)


# The renderer contract


@dataclass(frozen=True)
class Marks:
    """The marks around the reasoning of a turn."""

    open: str
    close: str
    gap: str = ""  # between the closing mark and what is said

    def split(self, text: str) -> tuple[str | None, str]:
        """Split off a leading reasoning; without the closing mark the whole text is reasoning."""
        head = text.lstrip()
        if not head.startswith(self.open):
            return None, text
        # Without the closing mark nothing is left for calls: one that the policy only thought of was not made.
        reasoning, _, rest = head.removeprefix(self.open).partition(self.close)
        return reasoning.strip("\n"), rest

    def around(self, reasoning: str) -> str:
        """A reasoning between the marks, each on a line of its own."""
        return f"{self.open.rstrip()}\n{reasoning}\n{self.close}{self.gap}"


THINK = Marks("<think>", "</think>", "\n\n")

CHARACTERS_PER_TOKEN = 4  # of English text with a large vocabulary, roughly


class Renderer(ABC):
    """Turns a conversation into token ids by appending only; stateless and shared by all episodes."""

    tools_need_system = False
    """Whether tools are shown only in prompts that begin with a system message."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @abstractmethod
    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the opening messages, up to and including the opening of the assistant's turn."""

    @abstractmethod
    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """The suffix after a sampled assistant turn: closes that turn (in full if `finish` is not
        "stop", so that no stop token was sampled), adds `messages` and opens the next assistant turn.

        `last` is the id that was sampled last. Where several tokens end a turn, each also says what follows it (GLM ends a turn
        of calls with the token that opens their answers); None stands for the one that `messages` follow.

        Raises RenderError if the template would rewrite what came before.
        """

    @abstractmethod
    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        """The assistant message that sampled ids decode to. Malformed tool calls are kept as ToolCall with
        `arguments=None` and `error` set; never raises, whatever the ids."""

    @abstractmethod
    def assistant(self, message: Message) -> list[int]:
        """The inverse of `parse`: ids of an assistant turn as a policy would have sampled them, ending in
        the stop token (for supervised training on scripted transcripts).

        Raises RenderError if the message is not an assistant's.
        """

    def keeps(self, message: Message, following: Sequence[Message], earlier: Sequence[Message] = (), begun: int = 0) -> bool:
        """Return True if a ledger stays as it is once `following` is appended to the sampled turn `message`.

        False if the chat template then drops the reasoning of turns in it, say: the ledger forks, and the new
        one begins with `start` of all messages. `earlier` is what came before `message`, and the ledger began with the first
        `begun` of it; without them only this turn is looked at.
        """
        return True

    def reader(self, stops: Sequence[str] = ()) -> TurnReader:
        """Reads one turn while it is sampled, which one of the texts `stops` may end."""
        return TurnReader()

    async def astart(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """`start`, without holding up the event loop: long texts are rendered in a thread."""
        return await by_size(characters(messages), self.start, messages, tools)

    async def aextend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """`extend`, likewise."""
        return await by_size(characters(messages), self.extend, finish, messages, last)

    async def aparse(self, token_ids: Sequence[int], finish: str) -> Message:
        """`parse`, likewise."""
        return await by_size(CHARACTERS_PER_TOKEN * len(token_ids), self.parse, token_ids, finish)

    def grammar(
        self, schema: Json = None, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, reasons: bool = True
    ) -> str:
        """The grammar (`Sampling.grammar`) of a turn that is JSON which fits `schema`, if that is not None, or calls of
        `tools`: one, or one or more if `several`; `reasons`: after a reasoning, if it likes. Raises RenderError if none is known
        for this renderer's turns."""
        raise RenderError(f"{type(self).__name__} knows no grammar of its turns")

    @property
    def call_end(self) -> str:
        """The text that ends a call; empty if the syntax has none."""
        return ""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """The renderer for an episode that offers these tools (function schemas). It differs only if the
        tool-call syntax has untyped values: `parse` then reads each value as its declared type."""
        return self


def characters(messages: Sequence[Message]) -> int:
    """The characters of messages, roughly: calls count as they were sampled."""
    return sum(
        len(message.content) + len(message.reasoning or "") + sum(len(call.raw) for call in message.tool_calls)
        for message in messages
    )
