"""What a tokenizer's chat template writes for messages, with text from outside kept apart from the template's markup.

Text from outside goes through the template with placeholders for control tokens, so that a tool which prints `<|im_end|>`
does not end its turn; the same is done in the other direction, when sampled ids become text for a parser.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from agentrl.errors import RenderError
from agentrl.images import Image, shown
from agentrl.render.chat_templates import advice
from agentrl.render.fragments import Place
from agentrl.render.parsers import Syntax
from agentrl.render.text import Codec, Markup
from agentrl.trajectory import Json, Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private-use characters, which templates copy like letters; a _HIDE in the text itself is escaped like a control token.
_HIDE, _SHOW = "\ue000", "\ue001"
_PICTURE = 1 << 40  # and more: an image of so many more tokens
_HIDDEN = re.compile(f"{_HIDE}([0-9]+){_SHOW}")


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


FRAMES = (
    Marks("<think>", "</think>", "\n\n"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel>thought\n", "<channel|>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|channel|>analysis<|message|>", "<|end|>"),
    Marks("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)


@dataclass(frozen=True)
class Form:
    """How a template wants a turn to be given.

    reasoning: the key of the reasoning; "chunk" as a part of the content of type "thinking", "inline" as text, or "none", as
        the template drops it in any case.
    arguments_as_text: arguments as a JSON string, not as an object.
    calls_in_content: calls as text of this syntax, since the template writes none.
    one_call: the template takes only one call a turn; several go into the content.
    malformed_as_calls: a call that could not be parsed as one without arguments, since the template shows no answer to text.
    content_as_reasoning: what is said beside calls, since the template takes only one of the two.
    nothing: the content of a turn in which nothing was sampled.
    no_list: without tools there is no list of them, and not an empty one.
    """

    reasoning: str = "reasoning_content"
    frame: Marks = FRAMES[0]
    arguments_as_text: bool = False
    calls_in_content: Syntax | None = None
    one_call: Syntax | None = None
    malformed_as_calls: bool = False
    content_as_reasoning: bool = False
    nothing: str = ""
    no_list: bool = True


@dataclass(frozen=True)
class Placeholders:
    """How a model that takes images has one among its tokens: `begin`, a `pad` for each of its `count(image)` tokens, `end`."""

    begin: str
    pad: str
    end: str
    count: Callable[[Image], int]

    def markup(self, tokens: int) -> Markup:
        return Markup(self.begin + self.pad * tokens + self.end)


class TemplateText:
    """A tokenizer's chat template and its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: date | None = None) -> None:
        """`day`: the date of a template that writes one; by default today, as long as this object lives."""
        self._tokenizer = tokenizer
        # transformers gives a template the clock: a prompt that is rendered after midnight would be another one.
        moment = datetime.combine(day or date.today(), time.min)
        given = {"strftime_now": moment.strftime} | ({"date_string": moment.strftime("%d %b %Y")} if day else {})
        self._dates = {name: value for name, value in given.items() if name in str(tokenizer.chat_template)}
        self.codec = Codec(tokenizer)
        self.form = Form()
        self.advice = advice(tokenizer)
        # The longest first: of two tokens with the same beginning, the pattern must find the one that the tokenizer would.
        self.control = sorted(self.codec.control, key=len, reverse=True)
        self.pictures: Placeholders | None = None
        self._pattern = re.compile("|".join(map(re.escape, [*self.control, _HIDE])))

    def change(self, **form: Any) -> None:
        """Give turns in another form from now on."""
        self.form = replace(self.form, **form)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, generate: bool) -> str:
        """The template's text. Raises RenderError if the template refuses the messages."""
        try:
            text = self._tokenizer.apply_chat_template(
                [self._row(message) for message in messages],
                tools=[self._hidden(tool) for tool in tools] or (None if self.form.no_list else []),
                add_generation_prompt=generate,
                tokenize=False,
                **self._dates,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as problem:
            # Templates are programs: one that expects another form of a message fails in its own ways.
            raise RenderError(f"the chat template refused the messages: {problem}") from problem
        return str(text)

    def encode(self, text: str, after: Place = Place.TOKEN) -> list[int]:
        """Ids of what `render` gave, or of a part of it that comes `after` something."""
        parts: list[str] = []
        position = 0
        for match in _HIDDEN.finditer(text):
            tokens = int(match.group(1)) - _PICTURE
            before = Markup(text[position : match.start()])
            parts += [before, self._name(match) if self.pictures is None or tokens < 0 else self.pictures.markup(tokens)]
            position = match.end()
        return self.codec.encode(*parts, Markup(text[position:]), after=after)

    def direct(self, text: str) -> list[int]:
        """The tokenizer's own ids of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids. What only looks like a control token is hidden in it, if any such is there."""
        text = self.codec.decode(ids)
        if self._spells_nothing(ids, text):
            return text
        control = {self.codec.added[content] for content in self.control}
        parts: list[str] = []
        run: list[int] = []
        for number in [*ids, None]:
            if number is not None and number not in control:
                run.append(number)
                continue
            # After a control token, so that a tokenizer that strips the start of a text strips nothing here.
            ordinary = self.codec.decode(run).removeprefix(parts[-1] if parts else "")
            parts.append(self._hidden(ordinary))
            if number is not None:
                parts.append(self.codec.decode([number]))
                run = [number]
        return "".join(parts)

    def spells_nothing(self, ids: Sequence[int]) -> bool:
        """Whether all that looks like a control token in the text of sampled ids is one."""
        return self._spells_nothing(ids, self.codec.decode(ids))

    def _spells_nothing(self, ids: Sequence[int], text: str) -> bool:
        control = {self.codec.added[content] for content in self.control}
        return sum(1 for i in ids if i in control) == sum(1 for _ in self._pattern.finditer(text))

    def shown(self, value: Any) -> Any:
        """The value with every placeholder in its strings replaced by what it stands for."""
        return self._mapped(value, lambda text: _HIDDEN.sub(self._name, text))

    def _hidden(self, value: Any) -> Any:
        """The value with every control token in its strings replaced by a placeholder, which the template
        copies like any other text."""
        return self._mapped(value, self.hide)

    def hide(self, text: str) -> str:
        """The text with placeholders for control tokens."""
        return self._pattern.sub(lambda match: f"{_HIDE}{self._number(match.group())}{_SHOW}", text)

    def _mapped(self, value: Any, change: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {self._mapped(key, change): self._mapped(item, change) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mapped(item, change) for item in value]
        return value

    def _number(self, text: str) -> int:
        return self.control.index(text) if text != _HIDE else len(self.control)

    def _name(self, match: re.Match[str]) -> str:
        names = [*self.control, _HIDE]
        number = int(match.group(1))
        return names[number] if number < len(names) else match.group()

    def _row(self, message: Message) -> dict[str, Json]:
        """A message as the template reads it."""
        form = self.form
        calls = [call for call in message.tool_calls if call.arguments is not None or form.malformed_as_calls]
        aside = [call.raw for call in message.tool_calls if call.arguments is None and not form.malformed_as_calls]
        content = self._pictured(message) or (form.nothing if message.role == "assistant" and not calls else "")
        if aside:  # no template can render a malformed call; as text it stays exactly as sampled
            content = self._hidden("\n".join([message.content, *aside]).strip())
        syntax = form.calls_in_content or (form.one_call if len(calls) > 1 else None)
        if calls and syntax is not None and syntax.write is not None:
            content, calls = content + syntax.write([self._quiet(call) for call in calls]), []
        row: dict[str, Json] = {"role": message.role, "content": content}
        if calls:
            row["tool_calls"] = [self._call(call) for call in calls]
        if message.role == "tool":
            row["tool_call_id"] = nine(message.tool_call_id or "")
            row["name"] = self._hidden(message.name or "")
        reasoning = self._hidden(message.reasoning)
        if calls and content and form.content_as_reasoning:
            row["content"], reasoning = "", "\n".join(filter(None, (reasoning, content)))
        if reasoning is not None:
            self._reason(row, reasoning)
        return row

    def _pictured(self, message: Message) -> str:
        """The content, hidden, with placeholders for the images that the model is shown."""
        if self.pictures is None or not message.images:
            return self.hide(message.content)
        parts = shown(message.content, message.images)
        count = self.pictures.count
        return "".join(self.hide(p) if isinstance(p, str) else f"{_HIDE}{_PICTURE + count(p)}{_SHOW}" for p in parts)

    def _quiet(self, call: ToolCall) -> ToolCall:
        return ToolCall(self._hidden(call.name), self._hidden(call.arguments), id=call.id)

    def _call(self, call: ToolCall) -> dict[str, Json]:
        arguments: Json = self._hidden(call.arguments or {})
        if self.form.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "type": "function",
            "id": nine(call.id),
            "function": {"name": self._hidden(call.name or "unknown"), "arguments": arguments},
        }

    def _reason(self, row: dict[str, Json], reasoning: str) -> None:
        """Put the reasoning of a turn where the template looks for it."""
        content = row["content"]
        if self.form.reasoning == "chunk":
            thoughts: list[Json] = [{"type": "thinking", "thinking": reasoning}]
            row["content"] = [*thoughts, {"type": "text", "text": content}] if content else thoughts
        elif self.form.reasoning == "inline":
            row["content"] = f"{self.form.frame.around(reasoning)}{content}"
        elif self.form.reasoning != "none":
            row[self.form.reasoning] = reasoning


def nine(call_id: str) -> str:
    """Nine letters or digits, which some templates (Mistral) require of an id; the others do not render ids."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
