"""The renderer interface, and encoding of text that keeps markup apart from ordinary text."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from agentrl.data.trajectory import Message
from agentrl.utils.errors import ModelError, RenderError
from agentrl.utils.threads import LONG_TEXT, by_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Tokenizers for parts of a text: what a tokenizer adds at the start of a text must not be added in the middle. One of
# SentencePiece's style adds a space to a whole conversation, either only at its start ("first") or after every control token as
# well; encoding in parts would add one before each part.


class Place(Enum):
    """The predecessor of a piece of ordinary text."""

    START = "nothing"
    TOKEN = "a control token"
    TEXT = "more text"


def plain_tokenizers(full: Tokenizer, control: frozenset[str]) -> dict[Place, Tokenizer]:
    """Make a tokenizer per place that reads control tokens as ordinary text."""
    spec = json.loads(full.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if entry["content"] not in control]
    # These apply to whole texts: each piece would get a begin token, or be truncated.
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    # Control tokens get random names, since a unigram model matches its pieces anywhere in a text (a BPE model matches a piece
    # without a merge only as a whole word).
    model, secret = spec["model"], secrets.token_hex(16)
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        model["vocab"] = [[f"{secret}{i}" if piece in control else piece, score] for i, (piece, score) in enumerate(vocab)]
    elif isinstance(vocab, dict):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
        # Pieces that a merge uses keep their names: the tokenizers library refuses merges of unknown pieces.
        hidden = control - {piece for pair in pairs for piece in (*pair, "".join(pair))} - {model.get("unk_token")}
        model["vocab"] = {f"{secret}{number}" if piece in hidden else piece: number for piece, number in vocab.items()}
    made: dict[str, Tokenizer] = {}  # a large vocabulary takes a second to build, so places with equal settings share one
    result: dict[Place, Tokenizer] = {}
    for place in Place:
        parts = {name: _at_place(spec[name], place) for name in ("normalizer", "pre_tokenizer")}
        key = json.dumps(parts)
        if key not in made:
            made[key] = Tokenizer.from_str(json.dumps({**spec, **parts}))
        result[place] = made[key]
    return result


def _at_place(part: Any, place: Place) -> Any:
    """Return the spec of a normalizer or pre-tokenizer for `place`; None if nothing of it remains."""
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
# prints them could end its turn and forge another. Here only `Markup`, which only renderers write, can become a control token;
# a plain `str` is always encoded as ordinary text.

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Markup(str):
    """Text written by the template, in which the tokenizer's added tokens are recognized."""

    __slots__ = ()


class Codec:
    """Encoder and decoder for one tokenizer (of transformers, with a `tokenizers` backend)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, written: str = "") -> None:
        """`written`: sample text of the chat template. Raises ModelError if the tokenizer has no `tokenizers` backend or turns
        ordinary text into a control token."""
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
        self.special = {entry.content for entry in entries.values() if entry.special}
        # A model may also end turns with its end-of-text token (a base model has no other), Llama calls with its end of message.
        known = {tokenizer.eos_token_id, *getattr(tokenizer, "model_ends", ())}
        self.ends = [number for number, entry in entries.items() if entry.special and number in known]
        self._strip_after = {entry.content for entry in entries.values() if entry.rstrip}
        self._strip_before = {entry.content for entry in entries.values() if entry.lstrip}
        # Ordinary text may become the unknown token, which ends no turn.
        self._forbidden = {self.added[content] for content in self.control} - {tokenizer.unk_token_id}
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._plain = plain_tokenizers(self._full, self.control)
        for content in self.control:
            try:
                self.encode(content)
            except RenderError as problem:
                raise ModelError(f"the tokenizer cannot encode {content!r} as ordinary text: {problem}") from None

    def encode(self, *parts: str, after: Place = Place.TOKEN) -> list[int]:
        """Encode the joined parts, by default `after` a control token. Ordinary text between two added tokens is encoded as one
        piece, as the tokenizer would, even if it comes from several parts."""
        ids: list[int] = []
        run: list[str] = []
        strip = False
        for part in parts:
            # After the split at added tokens, every second piece is one. Only the template may write them.
            for number, piece in enumerate(self._pattern.split(part) if isinstance(part, Markup) else (part,)):
                if number % 2:
                    text = "".join(run)
                    # Some added tokens strip the white space next to them, as the tokenizer would here.
                    text = text.rstrip() if piece in self._strip_before else text
                    ids += self._encode_ordinary(text.lstrip() if strip else text, after)
                    ids.append(self.added[piece])
                    run, strip, after = [], piece in self._strip_after, Place.TOKEN
                else:
                    run.append(piece)
        text = "".join(run)
        return ids + self._encode_ordinary(text.lstrip() if strip else text, after)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, with control tokens by name; unknown ids become the replacement character."""
        text, known = "", list[int]()
        for number in (*ids, None):
            # The tokenizers library raises OverflowError for ids beyond u32, but sampled ids must always be decodable.
            if number is not None and 0 <= number < 2**32 and self._full.id_to_token(number) is not None:
                known.append(number)
                continue
            if len(known) >= LONG_TEXT:  # as a batch, which lets other threads run (see `_encode`)
                text += str(self._full.decode_batch([known], skip_special_tokens=False)[0])
            elif known:
                text += str(self._full.decode(known, skip_special_tokens=False))
            text, known = text if number is None else text + REPLACEMENT, []
        return text

    def piece(self, number: int) -> str:
        """Return an id's name in the vocabulary; "" for an unknown id."""
        return (self._full.id_to_token(number) or "") if 0 <= number < 2**32 else ""

    def _encode_ordinary(self, text: str, after: Place) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:  # no tokenizer accepts lone surrogates: U+FFFD instead
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = _encode(self._plain[after], text)
        if not self._forbidden.isdisjoint(ids):
            raise RenderError(f"ordinary text became a control token: {text[:80]!r}")
        return ids


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # `encode` holds the GIL, so 1 MB of text blocks all threads, including the event loop's, for 0.7 s. A batch releases it; for
    # a short text, taking it again would only cost time.
    if len(text) < LONG_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids
    of_batch: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return of_batch


# The renderer interface


@dataclass(frozen=True)
class Marks:
    """The marks around the reasoning of a turn."""

    open: str
    close: str
    gap: str = ""  # between the closing mark and the content

    def split(self, text: str) -> tuple[str | None, str]:
        """Split text into leading reasoning and the rest; without the closing mark all of it is reasoning."""
        head = text.lstrip()
        if not head.startswith(self.open):
            return None, text
        # Without the closing mark there are no calls: those within the reasoning do not count.
        reasoning, _, rest = head.removeprefix(self.open).partition(self.close)
        return reasoning.strip("\n"), rest

    def wrap(self, reasoning: str) -> str:
        """Put reasoning between the marks, on separate lines."""
        return f"{self.open.rstrip()}\n{reasoning}\n{self.close}{self.gap}"


THINK = Marks("<think>", "</think>", "\n\n")

CHARACTERS_PER_TOKEN = 4  # rough average for English text and a large vocabulary


class Renderer(ABC):
    """Converts a conversation to token ids by appending only; stateless and shared by all episodes."""

    tools_need_system = False
    """True if tools are shown only in prompts that begin with a system message."""
    syntax: str = ""
    """Name of its call syntax (render/syntaxes.py), or of another one; "" if `codec`, `stop_token_ids` and `frame` are unset."""
    codec: Codec
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an assistant turn."""
    frame: Marks = THINK
    """The marks around the reasoning of a turn."""
    in_reasoning: bool = False
    """True if turns begin within the reasoning, without its opening mark."""

    @abstractmethod
    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode the opening messages, up to and including the opening of the assistant's turn."""

    @abstractmethod
    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """Encode the suffix after a sampled assistant turn: its end (without its stop token if that was sampled, which `finish`
        "stop" means), `messages`, and the opening of the next assistant turn.

        `last` is the last sampled id. If several tokens can end a turn, each also implies what follows (GLM ends a turn of calls
        with the token that opens their results); None: the one that fits `messages`. Raises RenderError if the template would
        rewrite earlier text.
        """

    @abstractmethod
    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        """Decode sampled ids to an assistant message. Malformed tool calls become ToolCall with `arguments=None` and
        `error` set; never raises for any ids."""

    @abstractmethod
    def assistant(self, message: Message) -> list[int]:
        """Encode an assistant turn as a policy would sample it, with the stop token; the inverse of `parse`.

        For supervised training on scripted transcripts. Raises RenderError for a message of another role.
        """

    def keeps(self, message: Message, following: Sequence[Message], earlier: Sequence[Message] = (), begun: int = 0) -> bool:
        """Return True if the ledger is unchanged once `following` is appended to the sampled turn `message`.

        False, for example, if the chat template then drops the reasoning of earlier turns: the ledger forks, and the new one
        begins with `start` of all messages. `earlier`: the messages before `message`; the ledger began with the first
        `begun` of them. Without them only this turn is checked.
        """
        return True

    def spells_nothing(self, token_ids: Sequence[int]) -> bool:
        """Return True if no text in sampled ids merely looks like a control token that `parse` uses."""
        return True

    async def astart(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Run `start` without blocking the event loop: long texts are rendered in a thread."""
        return await by_size(characters(messages), self.start, messages, tools)

    async def aextend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """Run `extend` like `astart`."""
        return await by_size(characters(messages), self.extend, finish, messages, last)

    async def aparse(self, token_ids: Sequence[int], finish: str) -> Message:
        """Run `parse` like `astart`."""
        return await by_size(CHARACTERS_PER_TOKEN * len(token_ids), self.parse, token_ids, finish)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """Return the renderer for an episode that offers these tools (function schemas). For a call syntax with untyped values,
        its `parse` reads each value as the declared type."""
        return self


def characters(messages: Sequence[Message]) -> int:
    """Count the characters of messages, approximately: calls count as sampled."""
    said = sum(len(message.content) + len(message.reasoning or "") for message in messages)
    return said + sum(len(call.raw) for message in messages for call in message.tool_calls)
