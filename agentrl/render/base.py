"""The renderer contract, and text to token ids with markup kept apart.

From the bottom: tokenizers for parts of a text, encoding, settled text while it is sampled, the contract."""

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
    # Control tokens get names that no text contains: a unigram model matches a piece anywhere in a text. (In a BPE model a piece
    # that no merge produces matches only as a whole word.)
    model, secret = spec["model"], secrets.token_hex(16)
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        model["vocab"] = [[f"{secret}{i}" if piece in control else piece, score] for i, (piece, score) in enumerate(vocab)]
    elif isinstance(vocab, dict):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
        # Pieces that a merge uses keep their names: the tokenizers library refuses merges of unknown pieces.
        hidden = control - {piece for pair in pairs for piece in (*pair, "".join(pair))} - {model.get("unk_token")}
        model["vocab"] = {f"{secret}{number}" if piece in hidden else piece: number for piece, number in vocab.items()}
    made: dict[str, Tokenizer] = {}  # a large vocabulary takes a second to build, so equal places share one
    result: dict[Place, Tokenizer] = {}
    for place in Place:
        parts = {name: _at_place(spec[name], place) for name in ("normalizer", "pre_tokenizer")}
        key = json.dumps(parts)
        if key not in made:
            made[key] = Tokenizer.from_str(json.dumps({**spec, **parts}))
        result[place] = made[key]
    return result


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
        self.special = {entry.content for entry in entries.values() if entry.special}
        # A model also ends turns with its end of a text (a base model knows no other), and Llama calls with its end of a message.
        known = {tokenizer.eos_token_id, *getattr(tokenizer, "model_ends", ())}
        self.ends = [number for number, entry in entries.items() if entry.special and number in known]
        self._strip_after = {entry.content for entry in entries.values() if entry.rstrip}
        self._strip_before = {entry.content for entry in entries.values() if entry.lstrip}
        # The unknown token is what ordinary text may become, and it ends no turn.
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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, with control tokens by name; an id that the tokenizer does not have is a replacement character."""
        text, known = "", list[int]()
        for number in (*ids, None):
            # Ids are u32 there: others raise an OverflowError, and what was sampled must always be readable.
            if number is not None and 0 <= number < 2**32 and self._full.id_to_token(number) is not None:
                known.append(number)
                continue
            if len(known) >= LONG_TEXT:  # of a batch, as in `_encode`: other threads run meanwhile
                text += str(self._full.decode_batch([known], skip_special_tokens=False)[0])
            elif known:
                text += str(self._full.decode(known, skip_special_tokens=False))
            text, known = text if number is None else text + REPLACEMENT, []
        return text

    def piece(self, number: int) -> str:
        """The name of an id in the vocabulary; empty if the tokenizer does not have it."""
        return (self._full.id_to_token(number) or "") if 0 <= number < 2**32 else ""

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
    syntax: str = ""
    """Name of the syntax of its calls (render/syntaxes.py), or another one. If it is empty, turns have none of these three:"""
    codec: Codec
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an assistant turn."""
    frame: Marks = THINK
    """The marks around the reasoning of a turn."""
    in_reasoning: bool = False
    """Whether a turn begins within the reasoning, without its opening mark."""

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

    def spells_nothing(self, token_ids: Sequence[int]) -> bool:
        """Return True unless text in sampled ids only looks like the control tokens by which `parse` divides a turn."""
        return True

    async def astart(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """`start`, without holding up the event loop: long texts are rendered in a thread."""
        return await by_size(characters(messages), self.start, messages, tools)

    async def aextend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """`extend`, likewise."""
        return await by_size(characters(messages), self.extend, finish, messages, last)

    async def aparse(self, token_ids: Sequence[int], finish: str) -> Message:
        """`parse`, likewise."""
        return await by_size(CHARACTERS_PER_TOKEN * len(token_ids), self.parse, token_ids, finish)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """The renderer for an episode that offers these tools (function schemas). It differs only if the
        tool-call syntax has untyped values: `parse` then reads each value as its declared type."""
        return self


def characters(messages: Sequence[Message]) -> int:
    """The characters of messages, roughly: calls count as they were sampled."""
    said = sum(len(message.content) + len(message.reasoning or "") for message in messages)
    return said + sum(len(call.raw) for message in messages for call in message.tool_calls)
