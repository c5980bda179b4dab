"""Probing of a chat template: how it writes messages and turns."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from functools import partial
from itertools import accumulate, product
from types import FrameType
from typing import TYPE_CHECKING, Any

from agentrl.data.images import Image, split_at_images
from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.render.base import THINK, Codec, Marks, Markup, Place
from agentrl.render.chatml import advice
from agentrl.render.tool_calls import Syntax
from agentrl.utils.errors import ModelError, RenderError
from agentrl.utils.redaction import map_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_LINES = 20_000_000
"""Lines that a chat template may execute while it is probed, 200 times the need of the longest known one: some seconds."""


class EndlessTemplateError(BaseException):
    """A chat template runs too long. Not an Exception, which callers of `render` would treat as a refused conversation."""


@contextmanager
def limit_lines() -> Iterator[None]:
    """Raise EndlessTemplateError in this thread once chat templates have executed `MOST_LINES` lines in total: nothing else can
    interrupt a loop in a thread."""
    left, before = MOST_LINES, sys.gettrace()

    def count(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            line = frame.f_globals["__jinja_template__"].get_corresponding_lineno(frame.f_lineno)
            raise EndlessTemplateError(f"it ran {MOST_LINES} lines, the last of them line {line}")
        return count

    sys.settrace(lambda frame, event, value: count if frame.f_code.co_filename == "<template>" else None)
    try:
        yield
    finally:
        sys.settrace(before)


# Untrusted text goes through the template with placeholders for control tokens, so that a tool that prints `<|im_end|>` does
# not end its turn; likewise in the other direction, when sampled ids become text for a parser.

# Letters, which every filter of a template copies (JSON and Python escape private characters); a _HIDE in the text itself is
# replaced like a control token.
_HIDE, _SHOW = "Qhiddenx", "q"
_PICTURE = 1 << 40  # a number n from here on stands for an image of n - _PICTURE tokens
_HIDDEN = re.compile(f"{_HIDE}([0-9]+){_SHOW}")


FRAMES = (
    THINK,
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel>thought\n", "<channel|>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|channel|>analysis<|message|>", "<|end|>"),
    Marks("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)


@dataclass(frozen=True)
class Form:
    """The form of messages that a template expects.

    reasoning: the key of the reasoning; "chunk" for a content part of type "thinking", "inline" for text within the content, or
        "none" if the template drops reasoning in any case.
    arguments_as_text: arguments are a JSON string, not an object.
    calls_in_content: calls are written into the content in this syntax, since the template writes none.
    one_call: the syntax for several calls in the content, since the template takes only one call per turn.
    malformed_as_calls: a malformed call is passed as one without arguments, since the template shows no answer to text.
    content_as_reasoning: text next to calls is passed as reasoning, since the template takes only one of the two.
    nothing: the content of a turn in which nothing was sampled. empty: the content of an empty message to the policy.
    no_list: without tools the template gets None, not an empty list.
    """

    reasoning: str = "reasoning_content"
    frame: Marks = FRAMES[0]
    arguments_as_text: bool = False
    calls_in_content: Syntax | None = None
    one_call: Syntax | None = None
    malformed_as_calls: bool = False
    content_as_reasoning: bool = False
    nothing: str = ""
    empty: str = ""
    no_list: bool = True


@dataclass(frozen=True)
class Placeholders:
    """A model's image tokens: `begin`, `count(image)` times `pad`, `end`."""

    begin: str
    pad: str
    end: str
    count: Callable[[Image], int]


class TemplateText:
    """A tokenizer's chat template, with encoding and decoding of its text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: date | None = None) -> None:
        """`day`: the date for a template that writes one; by default the day on which this object is made."""
        self._tokenizer = tokenizer
        # transformers gives templates the current date, so a prompt rendered after midnight would differ.
        moment = datetime.combine(day or date.today(), time.min)
        given = {"strftime_now": moment.strftime} | ({"date_string": moment.strftime("%d %b %Y")} if day else {})
        self._dates = {name: value for name, value in given.items() if name in str(tokenizer.chat_template)}
        plain = ""  # messages that show control tokens which a template composes: '<|' + role + '|>'
        for roles in ("system user", "user assistant user", "user assistant tool"):
            rows = [{"role": role, "content": "Text"} for role in roles.split()]
            with suppress(Exception):  # as in `render`
                plain += str(tokenizer.apply_chat_template(rows, add_generation_prompt=True, tokenize=False))
        self.codec = Codec(tokenizer, plain)
        self.form = Form()
        self.advice = advice(tokenizer)
        # Longest first: of two tokens with the same beginning, the pattern must match the one that the tokenizer would.
        self.control = sorted(self.codec.control, key=len, reverse=True)
        self._control_ids = {self.codec.added[content] for content in self.control}
        self._names = [*self.control, _HIDE]
        self.pictures: Placeholders | None = None
        self._pattern = re.compile("|".join(map(re.escape, self._names)))

    def change(self, **form: Any) -> None:
        """Change the form of messages."""
        self.form = replace(self.form, **form)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, generate: bool) -> str:
        """Render messages by the template. Raises RenderError if it refuses them."""
        turns = accumulate(message.role == "assistant" for message in messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [self._row(message, turn) for message, turn in zip(messages, turns, strict=True)],
                tools=[self.hide(tool) for tool in tools] or (None if self.form.no_list else []),
                add_generation_prompt=generate,
                tokenize=False,
                **self._dates,
            )
        except Exception as problem:  # a template is a program, which may raise anything for an unexpected form of message
            raise RenderError(f"the chat template refused the messages: {str(problem) or type(problem).__name__}") from problem
        return str(text)

    def encode(self, text: str, after: Place = Place.TOKEN) -> list[int]:
        """Encode the text of `render`, or a part of it that comes `after` another one."""
        parts: list[str] = []
        position = 0
        for match in _HIDDEN.finditer(text):
            tokens = int(match.group(1)) - _PICTURE
            parts.append(Markup(text[position : match.start()]))
            if (pictures := self.pictures) is None or tokens < 0:
                parts.append(self._name(match))
            else:
                parts.append(Markup(pictures.begin + pictures.pad * tokens + pictures.end))
            position = match.end()
        return self.codec.encode(*parts, Markup(text[position:]), after=after)

    def direct(self, text: str) -> list[int]:
        """Encode a text by the tokenizer itself."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode sampled ids; text that only looks like a control token is replaced by a placeholder."""
        text = self.codec.decode(ids)
        if self.spells_nothing(ids, text):
            return text
        parts: list[str] = []
        run: list[int] = []
        for number in [*ids, None]:
            if number is not None and number not in self._control_ids:
                run.append(number)
                continue
            # Decoded after the control token, so that a tokenizer that strips the start of a text strips nothing.
            ordinary = self.codec.decode(run).removeprefix(parts[-1] if parts else "")
            parts.append(self.hide(ordinary))
            if number is not None:
                parts.append(self.codec.decode([number]))
                run = [number]
        return "".join(parts)

    def spells_nothing(self, ids: Sequence[int], text: str | None = None) -> bool:
        """Return True if all text of sampled ids that looks like a control token is one. `text`: the decoded ids, if known."""
        text = self.codec.decode(ids) if text is None else text
        return sum(1 for i in ids if i in self._control_ids) == sum(1 for _ in self._pattern.finditer(text))

    def fill_placeholders(self, value: Any) -> Any:
        """Replace the placeholders in all strings of a value by their control tokens."""
        return map_texts(value, partial(_HIDDEN.sub, self._name))

    def hide(self, value: Any) -> Any:
        """Replace the control tokens in all strings of a value by placeholders of ordinary text."""
        by = partial(self._pattern.sub, lambda match: f"{_HIDE}{self._names.index(match.group())}{_SHOW}")
        return map_texts(value, by)

    def _name(self, match: re.Match[str]) -> str:
        number = int(match.group(1))
        return self._names[number] if number < len(self._names) else match.group()

    def _row(self, message: Message, turn: int) -> dict[str, Json]:
        """Convert a message of the conversation's turn `turn` to the template's form."""
        form = self.form
        calls = [call for call in message.tool_calls if call.arguments is not None or form.malformed_as_calls]
        malformed = [call.raw for call in message.tool_calls if call.arguments is None and not form.malformed_as_calls]
        blank = form.empty if message.role != "assistant" else "" if calls else form.nothing
        if self.pictures is None or not message.images:
            content = self.hide(message.content) or blank
        else:  # with placeholders for images
            parts, count = split_at_images(message.content, message.images), self.pictures.count
            content = "".join(self.hide(p) if isinstance(p, str) else f"{_HIDE}{_PICTURE + count(p)}{_SHOW}" for p in parts)
            content = content or blank
        if malformed:  # no template can render a malformed call; as text it is kept as sampled
            content = self.hide("\n".join([message.content, *malformed]).strip())
        syntax = form.calls_in_content or (form.one_call if len(calls) > 1 else None)
        if calls and syntax is not None and syntax.write is not None:
            hidden = [ToolCall(self.hide(call.name), self.hide(call.arguments), id=call.id) for call in calls]
            content, calls = content + syntax.write(hidden), []
        row: dict[str, Json] = {"role": message.role, "content": content}
        for call in calls:
            arguments: Json = self.hide(call.arguments or {})
            if form.arguments_as_text:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": self.hide(call.name or "unknown"), "arguments": arguments}
            row.setdefault("tool_calls", []).append({"type": "function", "id": short_id(call.id, turn), "function": function})
        if message.role == "tool":
            row["tool_call_id"] = short_id(message.tool_call_id or "", turn)
            row["name"] = self.hide(message.name or "")
        reasoning = self.hide(message.reasoning)
        if calls and content and form.content_as_reasoning:
            row["content"], reasoning = "", "\n".join(filter(None, (reasoning, content)))
        # The reasoning goes where the template expects it.
        if reasoning is not None and form.reasoning == "chunk":
            thoughts: list[Json] = [{"type": "thinking", "thinking": reasoning}]
            row["content"] = [*thoughts, {"type": "text", "text": row["content"]}] if row["content"] else thoughts
        elif reasoning is not None and form.reasoning == "inline":
            row["content"] = f"{form.frame.wrap(reasoning)}{row['content']}"
        elif reasoning is not None and form.reasoning != "none":
            row[form.reasoning] = reasoning
        return row


def short_id(call_id: str, turn: int = 0) -> str:
    """Make an id of nine letters or digits, as some templates (Mistral) require. Others find a result's call by its id, so ids of
    parsers, which are unique only within a turn, depend on the turn too."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    counted = f"{call_id} {turn}" if call_id.startswith("call_") else call_id
    return hashlib.sha256(counted.encode()).hexdigest()[:9]


# The shape of a conversation: the order of roles, and the presence of reasoning and calls. Chat templates decide only by these
# what they keep of earlier turns, so the result for a shape holds for every conversation of this shape.

MARK = "Qmarkq"
"""A word that no template is likely to contain, and that JSON and filters do not escape."""
CALL = ToolCall("probe_tool", {"key": MARK}, id="probecall")
SECOND = ToolCall("probe_tool", {"key": MARK}, id="probecal2")
QUESTION = Message("user", "Question")
ANSWER = Message("tool", "result", tool_call_id="probecall", name="probe_tool")
SECOND_ANSWER = Message("tool", "result", tool_call_id="probecal2", name="probe_tool")
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
Round = tuple[Message, tuple[Message, ...]]
"""An assistant's turn and the messages that followed it."""
EQUAL_ROUNDS = 2
"""Number of equal rounds kept in a shape, apart from the last round: a template may treat the first of a kind differently."""
MANY = 30
"""Number of rounds that suffice to detect a template that counts messages."""
# (reasoning: 0 none, 1 empty, 2 some; calls: 0, 1, or 2 for more; True if there is content)
_Turn = tuple[int, int, bool]
_Rounds = tuple[tuple[_Turn, tuple[str, ...]], ...]
Shape = tuple[tuple[str, ...], _Rounds, _Rounds]
"""Roles before the first turn, rounds in the ledger's opening, rounds sampled in the ledger. Hashable."""


@dataclass(frozen=True)
class Skeleton:
    """A ledger's conversation. `opening`: its first messages. `rounds`: its sampled turns and the answers."""

    opening: tuple[Message, ...]
    rounds: tuple[Round, ...]


def skeleton(shape: Shape) -> Skeleton:
    """Make a conversation of probe messages in a shape."""
    lead, opening, sampled = shape
    began = [Message("system" if role == "system" else "user", "Question") for role in lead]
    began += [item for turn, answers in map(_probe, opening) for item in (turn, *answers)]
    return Skeleton(tuple(began), tuple(map(_probe, sampled)))


def rounds_of(messages: Sequence[Message], equal: int) -> tuple[tuple[str, ...], _Rounds]:
    """Return the roles before the first turn, and the rounds: at most `equal` equal ones, and the last."""
    lead: list[str] = []
    rounds: list[tuple[_Turn, list[str]]] = []
    for message in messages:
        if message.role == "assistant":
            reasoning = 2 if message.reasoning else 1 if message.reasoning is not None else 0
            rounds.append(((reasoning, min(len(message.tool_calls), 2), bool(message.content)), []))
            continue
        roles = rounds[-1][1] if rounds else lead
        if not roles or roles[-1] != message.role:
            roles.append(message.role)
    kept: list[tuple[_Turn, tuple[str, ...]]] = []
    seen: Counter[tuple[_Turn, tuple[str, ...]]] = Counter()
    for index, (turn, roles) in enumerate(rounds):
        item = (turn, tuple(roles))
        seen[item] += 1
        if seen[item] <= equal or index == len(rounds) - 1:
            kept.append(item)
    return tuple(lead), tuple(kept)


def _probe(item: tuple[_Turn, tuple[str, ...]]) -> Round:
    (reasoning, calls, said), roles = item
    turn = Message(
        "assistant", "Said" if said or not calls else "", (CALL, SECOND)[:calls], reasoning=(None, "", "Thought")[reasoning]
    )
    more = {"tool": (ANSWER, SECOND_ANSWER)[: max(1, calls)], "system": (Message("system", "More"),)}
    return turn, tuple(answer for role in roles for answer in more.get(role, (Message("user", "More"),)))


def _first_lost(messages: Sequence[Message], sort: str, write: Callable[[Sequence[Message]], str]) -> int | None:
    """Return the index of the first message that `write` does not show in its place, else None.

    Marks replace the messages' texts, since templates trim and escape these.
    """
    probes = [
        replace(message, content=message.content and f"Qsaid{number}q", images=(), tool_calls=tuple(
            call if call.arguments is None else replace(call, arguments={"key": f"Qcall{number}x{place}q"})
            for place, call in enumerate(message.tool_calls)
        ))
        for number, message in enumerate(messages)
    ]  # fmt: skip
    text, at, begun = write(probes), 0, sort == "suffix"
    for number, probe in enumerate(probes):
        begun = begun or probe.role != "system"  # an opening system message may be anywhere: Mistral puts it at the last user
        # The calls of a single turn are checked by the parser.
        calls = [call.arguments["key"] for call in probe.tool_calls if call.arguments is not None and sort != "turn"]
        # Mistral Nemo's template drops the first system message while tools answer, also outside of agentrl.
        first = number == 0 and probe.role == "system" and any(message.role == "assistant" for message in messages)
        if sort != "turn" and (first or any(call.raw for call in probe.tool_calls)):
            continue
        for mark in filter(None, (probe.content, *calls)):
            found = text.find(mark, at)
            if found < 0 and (mark not in text or (probe.role == "system" and begun)):
                return number
            at = max(at, found) if begun else at
    return None


# Turns of a template


class LostTextError(RenderError):
    """A template drops a part of a conversation."""


_WHOLE = 'Qaq <Qbq> "Qcq" {{ Qdq }}\n\n\tQeq </think> Qfq' + " word" * 20_000 + " Qgq"
"""Text with characters and a length that a filter, a split or a limit may cut."""
_THOUGHT = "Qthoughtq"
_SHAPES_CHECKED = 4096
_FIXES = {
    "assistant": "Leave out what it says next to a call, and let it make one call a turn",
    "system": "Put it into the first system message or a user's",
}
_ASKED = Message("assistant", MARK)
_CALLED = Message("assistant", "", (CALL,))
_FIELDS = ("reasoning_content", "reasoning", "thinking", "chunk")


class TurnText:
    """The template's turns as text. The constructor raises ModelError if turns have no end token."""

    def __init__(self, text: TemplateText) -> None:
        self._text = text
        self._lost: dict[str, int | None] = {}
        self.tools_need_system = False
        if not self._render_text([QUESTION], ()):  # a template may iterate over the tools without a check for None
            text.change(no_list=False)
        # The text after a turn within a conversation, and after a last turn: some templates differ between them.
        probes = ([QUESTION, _ASKED, QUESTION], [QUESTION, _ASKED])
        after = [text.render(probe, generate=False).partition(MARK)[2].lstrip() for probe in probes]
        # The longest matching token of each, since `control` is sorted by length.
        self.written_stop, last = (next((token for token in text.control if one.startswith(token)), "") for one in after)
        if not self.written_stop:
            raise ModelError(
                f"the chat template ends an assistant turn with {after[0][:40]!r}, which is not a control token, so a policy "
                f"could not end its turn; if it should be one, add it to the tokenizer (add_special_tokens), or {text.advice}"
            )
        self.stop = last or self.written_stop
        self.call_stop = self.stop
        self.opening, *others = {text.render([QUESTION], generate=True) for _ in range(8)}
        if others:
            raise ModelError("the chat template renders the same messages differently each time. Remove its random parts")
        # Without an opening for sampling, the turn must begin with its content or a reasoning mark.
        written = text.render([QUESTION, _ASKED], generate=False)
        head = written.removeprefix(self.opening).partition(MARK)[0].strip() if written.startswith(self.opening) else ""
        frames = tuple(frame.open for frame in FRAMES)
        if head and not head.startswith(frames) and text.render([QUESTION], generate=False) == self.opening:
            raise ModelError(
                f"the chat template begins an assistant turn with {head[:40]!r}, but does not write that for "
                f"add_generation_prompt, so a policy would have to say it. Write it there, or {text.advice}"
            )
        if not self._render_text([QUESTION, Message("assistant"), QUESTION], ()):  # a turn in which the policy said nothing
            text.change(nothing=" ")
        self._learn_reasoning()
        frame = text.form.frame
        opened, closed = self.opening.rfind(frame.open), self.opening.rfind(frame.close)
        # If the template opens the reasoning itself, sampling begins within it, without the mark.
        self.in_reasoning = opened > closed and not self.opening[opened + len(frame.open) :].strip()
        self.past_reasoning = self.opening.rstrip().endswith(frame.close)
        inside = opened >= 0 and not self.opening[opened + len(frame.open) : max(closed, opened)].strip()
        cut = opened if self.in_reasoning or inside else closed
        self.bare = self.opening[:cut] if self.in_reasoning or self.past_reasoning else self.opening

    def turn(self, message: Message) -> str:
        """Render a turn as a policy would sample it after the opening, with its stop token.

        Raises RenderError if the template does not write it after its own opening, or drops a part of it.
        """
        self._require_shown([message], "turn", lambda probes: self._turn(*probes))
        return self._turn(message)

    def _turn(self, message: Message) -> str:
        frame = self._text.form.frame
        body = self._body(message, [])
        if message.reasoning is None and not self.in_reasoning and frame.split(body) != (None, body):
            # Such a template adds empty reasoning only to a last turn, so messages are appended.
            asked = [call for call in message.tool_calls if call.arguments is not None]
            reply = [Message("tool", "result", tool_call_id=call.id, name=call.name) for call in asked]
            body = self._body(message, reply or [QUESTION])
        # If the template drops reasoning, the policy still samples it, and closes an opened one.
        if self.in_reasoning and frame.close not in body:
            body = f"{self._text.hide(message.reasoning or '')}\n{frame.close}{frame.gap}{body}"
        elif message.reasoning and frame.close not in body:
            body = frame.wrap(self._text.hide(message.reasoning)) + body
        stop = self.call_stop if any(call.arguments is not None for call in message.tool_calls) else self.stop
        # A template may write the end only before a next turn; a policy always samples it.
        return body.partition(stop)[0] + stop

    def suffix(self, messages: Sequence[Message]) -> str:
        """Render the text after the end of an assistant turn for `messages`, up to the next opening.

        Raises RenderError if the template changes the turn or drops a message.
        """
        self._require_shown(messages, "suffix", self._suffix)
        return self._suffix(messages)

    def _suffix(self, messages: Sequence[Message], generate: bool = True) -> str:
        answered = [message for message in messages if message.role == "tool"]
        if self._text.form.one_call and len({message.name for message in answered}) > 1:
            # One result after each call: the template of gpt-oss gives all results the name of its last call.
            cut = messages.index(answered[1])
            return self._suffix(messages[:cut], False) + self._suffix(messages[cut:], generate)
        # Some templates refuse tool results without calls, so the probe turn makes matching calls.
        shown = answered[:1] if self._text.form.one_call else answered
        calls = tuple(ToolCall(m.name or "unknown", {"key": MARK}, id=m.tool_call_id or "") for m in shown)
        turn = Message("assistant", "", calls) if calls else _ASKED
        marks, after = max(1, len(calls)), self._text.render([QUESTION, turn, *messages], generate=generate)
        _, stop, suffix = after.split(MARK, marks)[-1].partition(self.call_stop if calls else self.written_stop)
        if after.count(MARK) < marks or not stop:
            raise RenderError("the chat template rewrote the turn that came before the new messages")
        return suffix

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation's prompt. Raises RenderError if the template drops a part or moves a later system message.

        Losses that the model has elsewhere too are allowed; `keeps` then starts a new ledger: the reasoning of earlier turns,
        the policy's text next to its calls, and the first system message after a turn.
        """
        shown = [TOOL] if tools else []
        self._require_shown(messages, f"prompt {bool(tools)}", lambda probes: self._text.render(probes, shown, generate=True))
        return self._text.render(messages, tools, generate=True)

    def _require_shown(self, messages: Sequence[Message], sort: str, write: Callable[[Sequence[Message]], str]) -> None:
        """Raise LostTextError for the first message that `write` does not show in its place; cached by shape."""
        key, ids = sort, {call.id for message in messages for call in message.tool_calls}
        for m in messages:
            calls = "".join(f"({call.raw == ''}{call.arguments is None})" for call in m.tool_calls)
            key += f" {m.role[0]}{bool(m.content):d}{m.reasoning and 1}{m.tool_call_id in ids:d}{calls}"
        if key not in self._lost:
            if len(self._lost) >= _SHAPES_CHECKED:
                self._lost.clear()
            self._lost[key] = _first_lost(messages, sort, write)
        if (number := self._lost[key]) is not None:
            role, said = messages[number].role, messages[number].content.strip()[:80]
            raise LostTextError(
                f"the chat template does not show all of a message of role {role!r} in its place: {said!r}. "
                f"{_FIXES.get(role, 'Leave it out')}, or {self._text.advice}"
            )

    def require_whole(self, turn: Message, answer: Message) -> None:
        """Learn the form of an empty answer. Raises LostTextError if the template cuts long messages, or drops earlier ones of
        many."""
        begun, tools = [QUESTION, turn], [TOOL] if turn.tool_calls else []
        for empty in ("", " ", "(empty)"):
            self._text.change(empty=empty or self._text.form.empty)
            if self._render_text([*begun, replace(answer, content="")], tools):
                break
        long = [*begun, replace(answer, content=_WHOLE), *(turn, answer) * MANY]
        text = self._text.render(long, tools, generate=True)
        texts = {answer.role: text}
        if not tools:
            said = _WHOLE.replace("</think>", "")  # the content of a turn may begin only after it
            texts["assistant"] = self._render_text([QUESTION, Message("assistant", said), QUESTION], ())
            texts["system"] = self._render_text([Message("system", said), QUESTION], ())
        if QUESTION.content not in text or text.count(answer.content) < MANY:
            raise LostTextError(f"the chat template leaves out messages once there are {2 * MANY}. Remove the limit")
        for role, written in texts.items():
            seen = "".join(re.findall("Q[a-g]q", written))
            if seen != "".join(re.findall("Q[a-g]q", _WHOLE)) and (seen or role != "system"):  # some templates ignore it
                raise LostTextError(
                    f"the chat template cuts long or marked text of a message of role {role!r}: of {_WHOLE[:54]!r}... it shows "
                    f"{seen!r}. Remove the limit or the filter"
                )

    def ledger_text(self, shape: Skeleton, tools: bool) -> str:
        """Render a conversation as a ledger has it: turns as sampled, answers as appended."""
        text, parts = self._text.render(shape.opening, [TOOL] if tools else [], generate=True), dict[int, str]()
        for one in shape.rounds:
            if id(one) not in parts:  # a round may be repeated
                parts[id(one)] = self.turn(one[0]) + self.suffix(one[1])
            text += parts[id(one)]
        return text

    def whole(self, shape: Skeleton, tools: bool) -> str:
        """Render a conversation as the template writes the whole."""
        rounds = (message for turn, answers in shape.rounds for message in (turn, *answers))
        return self._text.render([*shape.opening, *rounds], [TOOL] if tools else [], generate=True)

    def rewrites_only_the_turn(self, shape: Skeleton, whole: str) -> bool:
        """Return True if the template's text `whole` is unchanged before and after the one turn of `shape`."""
        ((turn, answers),) = shape.rounds
        stop, said = (self.call_stop, MARK) if turn.tool_calls else (self.written_stop, turn.content)
        rest = stop + self.suffix(answers)
        inside = whole.removeprefix(self.bare).removesuffix(rest)
        # A turn that begins with the stop token is not the assistant's: the template opens no turn for it.
        taken = len(self.bare) + len(rest) == len(whole) - len(inside)
        return taken and said in inside and not inside.lstrip().startswith((stop, self.stop))

    def learn_calls(self) -> tuple[str, str]:
        """Learn the form of calls; returns the text of a call with its answer, and the prompt before it.

        Raises RenderError if the template takes no tools or calls.
        """
        opening = [QUESTION]
        if CALL.name not in self._text.render(opening, [TOOL], generate=True):
            opening = [Message("system", "Instructions"), QUESTION]
            self.tools_need_system = CALL.name in self._render_text(opening)  # some templates take no system message
            if not self.tools_need_system:
                raise RenderError("it ignores tools")
        answered = [*opening, _CALLED, ANSWER]
        if not self._render_text(answered):
            self._text.change(arguments_as_text=True)
            self._text.change(arguments_as_text=bool(self._render_text(answered)))
        prompt, _, call = self._text.render(answered, [TOOL], generate=False).partition(QUESTION.content)
        return call, prompt

    def learn_call_turns(self, syntax: Syntax | None) -> None:
        """Learn the end and the required form of turns with calls in this syntax."""
        text = self._text
        after = text.render([QUESTION, _CALLED, ANSWER], [TOOL], generate=False).rpartition(MARK)[2]
        ends = [end for end in (*(syntax.ends if syntax else ()), self.written_stop, self.stop) if end in after]
        if ends:
            self.call_stop = min(ends, key=after.find)
        if self.call_stop not in text.control:
            self.call_stop = self.stop
        two = [QUESTION, Message("assistant", "", (CALL, SECOND)), ANSWER, SECOND_ANSWER]
        if self._render_text(two).count(MARK) < 2 and syntax is not None:
            text.change(one_call=syntax)
        # The answer to a malformed call must be shown: such a call is passed as text if the template then shows it.
        text.change(malformed_as_calls=ANSWER.content not in self._render_text([QUESTION, _ASKED, ANSWER]).partition(MARK)[2])
        if not self._render_text([QUESTION, Message("assistant", "Said", (CALL,), reasoning="Thought"), ANSWER]):
            text.change(content_as_reasoning=True)

    def _render_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (TOOL,)) -> str:
        """Render messages; "" if the template refuses them."""
        try:
            return self._text.render(messages, tools, generate=False)
        except RenderError:
            return ""

    def _learn_reasoning(self) -> None:
        """Learn the key of the reasoning and the marks around it."""
        thoughtful = [Message("assistant", MARK, reasoning=_THOUGHT), Message("assistant", "", (CALL,), reasoning=_THOUGHT)]
        # Some templates write reasoning only in turns with calls.
        for field, turn in product(_FIELDS, thoughtful):
            self._text.change(reasoning=field)
            before, thought, after = self._render_text([QUESTION, turn], [TOOL] if turn.tool_calls else ()).partition(_THOUGHT)
            before, end = before.rstrip(), after.lstrip()
            fitting = [one for one in FRAMES if before.endswith(one.open.rstrip()) and end.startswith(one.close)]
            if thought and MARK in after and fitting:
                self._text.change(frame=fitting[0])
                return
        opened = [frame for frame in FRAMES if self.opening.rstrip().endswith((frame.open.rstrip(), frame.close))]
        self._text.change(reasoning="inline", frame=opened[0] if opened else FRAMES[0])
        if _THOUGHT not in self._text.render([QUESTION, thoughtful[0], QUESTION], generate=False):
            self._text.change(reasoning="none")  # the template drops text between the marks from the content

    def _body(self, message: Message, reply: Sequence[Message]) -> str:
        """Render a turn, without the opening."""
        frame = self._text.form.frame
        whole = self._text.render([QUESTION, message, *reply], generate=False)
        if whole.startswith(self.opening):
            return whole[len(self.opening) :]
        if not whole.startswith(self.bare):
            raise RenderError("the chat template does not write an assistant turn after its own opening")
        body = whole[len(self.bare) :]
        if self.in_reasoning:
            body = body.removeprefix(frame.open)
        elif self.past_reasoning and not frame.split(frame.open + body.removeprefix(frame.open))[0]:
            # An empty reasoning, which the opening has already.
            body = body.removeprefix(frame.open).lstrip().removeprefix(frame.close)
        return body
