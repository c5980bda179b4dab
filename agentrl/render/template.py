"""Any chat template as an append-only renderer.

The suffix comes from the template itself: a short conversation with the new messages is rendered, and the text
after the assistant's end-of-turn token is the suffix. When a renderer is created, a probe conversation rendered
this way must give exactly the text that the template gives for the whole conversation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from agentrl.errors import ModelError, RenderError
from agentrl.render.base import Renderer
from agentrl.render.chatml import split_reasoning
from agentrl.render.fragments import Place
from agentrl.render.parsers import PARSERS, ForTools, Parser, parser_for
from agentrl.render.text import Codec, Markup
from agentrl.trajectory import Json, Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private-use characters, which templates copy like letters; a _HIDE in the text itself is escaped like a control token.
_HIDE, _SHOW = "\ue000", "\ue001"
_HIDDEN = re.compile(f"{_HIDE}([0-9]+){_SHOW}")
# A word that no template is likely to contain, and with nothing in it that JSON or a filter would escape.
_MARK = "Qmarkq"
_CALL = ToolCall("probe_tool", {"key": _MARK}, id="probecall")
_QUESTION = Message("user", "Question")
_ANSWER = Message("tool", "result", tool_call_id="probecall", name="probe_tool")
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class TemplateRenderer(Renderer):
    """Renders through the tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, parser: Parser | ForTools | None = None) -> None:
        """`parser` replaces the one chosen by the template's syntax. Raises ModelError if the template
        does not append, its turns have no end token, or the parser cannot read the calls that it writes."""
        self._tokenizer = tokenizer
        self._codec = Codec(tokenizer)
        # The longest first: of two tokens with the same beginning, the pattern must find the one that the tokenizer would.
        self._control = sorted(self._codec.control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, [*self._control, _HIDE])))
        self._stop = self._find_stop()
        self._opening = self._text([_QUESTION], (), True)
        # Such a template opens the reasoning itself: what is sampled begins within it, without the tag.
        self._in_reasoning = self._opening.rstrip().endswith("<think>")
        self._kept: dict[tuple[str, ...], bool] = {}
        self._verify([Message("assistant", "Answer one"), Message("user", "More")])
        self.syntax, self._no_tools = self._find_parser(custom=parser is not None)
        self._parser = parser or PARSERS[self.syntax]
        self._parse_calls = self._bound(())
        if parser is not None and not self._no_tools:
            self._check_parser()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self._codec.added[self._stop],)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TemplateRenderer:
        if not isinstance(self._parser, ForTools):
            return self
        # A copy, as this one serves episodes with other tools at the same time.
        bound = copy(self)
        bound._parse_calls = self._bound(tools)
        return bound

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Raises RenderError if the template refuses the messages or does not support tools."""
        if tools and self._no_tools:
            raise RenderError(self._no_tools)
        text = self._text(messages, tools, True)
        if tools and tools[0]["function"]["name"] not in text:
            raise RenderError("the chat template ignores tools")
        return self._encode(text, Place.START)

    def extend(self, finish: str, messages: Sequence[Message]) -> list[int]:
        for message in messages:
            if message.role == "assistant":
                raise RenderError("an assistant turn is sampled, never appended as a message")
            if message.role == "tool" and self._no_tools:
                raise RenderError(self._no_tools)
        suffix = self._suffix(messages)
        return self._encode(suffix if finish == "stop" else self._stop + suffix)

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        stop = self.stop_token_ids[0]
        ids = token_ids[:-1] if finish == "stop" and token_ids and token_ids[-1] == stop else token_ids
        text = self._codec.decode(ids)
        reasoning, rest = split_reasoning(f"<think>{text}" if self._in_reasoning else text)
        content, calls = self._parse_calls(rest)
        return Message("assistant", content, calls, reasoning=reasoning)

    def assistant(self, message: Message) -> list[int]:
        if message.role != "assistant":
            raise RenderError(f"expected an assistant's message, got one of role {message.role!r}")
        whole = self._text([_QUESTION, message], (), False)
        if not whole.startswith(self._opening):
            raise RenderError("the chat template does not write an assistant turn after its own opening")
        turn, stop, _ = whole[len(self._opening) :].partition(self._stop)
        after = self._codec.place_after(self._opening)
        # A template may end a turn only before the next one; a policy samples the end in any case.
        return self._encode(turn + stop, after) if stop else [*self._encode(turn, after), *self.stop_token_ids]

    def keeps(self, message: Message, following: Sequence[Message]) -> bool:
        if not message.reasoning:
            return True
        # Templates decide this by roles only, so one probe per sequence of roles is enough.
        roles = tuple(item.role for item in following)
        kept = self._kept.get(roles)
        if kept is None:
            probe = Message("assistant", "Answer", reasoning=_MARK)
            if "tool" in roles:
                probe = Message("assistant", "", (_CALL,), reasoning=_MARK + "reason")
            marker = probe.reasoning or ""
            added = [_ANSWER if role == "tool" else Message(role, "x") for role in roles]
            kept = self._kept[roles] = marker in self._text([_QUESTION, probe, *added], (), True)
        return kept

    def _suffix(self, messages: Sequence[Message]) -> str:
        """What the template adds after the end of an assistant turn for `messages`."""
        answered = [message for message in messages if message.role == "tool"]
        # Some templates refuse tool results that no call asked for, so the probe turn makes matching calls.
        calls = tuple(ToolCall(m.name or "probe_tool", {"key": _MARK}, id=m.tool_call_id or "") for m in answered)
        turn = Message("assistant", "", calls) if calls else Message("assistant", _MARK)
        text = self._text([_QUESTION, turn, *messages], (), True)
        _, mark, after = text.partition(_MARK)
        for _ in calls[1:]:
            _, mark, after = after.partition(_MARK)
        _, stop, suffix = after.partition(self._stop)
        if not (mark and stop):
            raise RenderError("the chat template rewrote the turn that came before the new messages")
        return suffix

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generate: bool) -> str:
        rows = [self._row(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                rows,
                tools=[self._hidden(tool) for tool in tools] or None,
                add_generation_prompt=generate,
                tokenize=False,
            )
        except TemplateError as problem:
            raise RenderError(f"the chat template refused the messages: {problem}") from problem
        return str(text)

    def _row(self, message: Message) -> dict[str, Json]:
        row: dict[str, Json] = {"role": message.role, "content": self._hidden(message.content)}
        broken = "\n".join(call.raw for call in message.tool_calls if call.arguments is None)
        if broken:  # no template can render a malformed call; as text it stays exactly as sampled
            row["content"] = self._hidden(f"{message.content}\n{broken}".strip())
        calls = [call for call in message.tool_calls if call.arguments is not None]
        if calls:
            row["tool_calls"] = [
                {
                    "type": "function",
                    "id": _nine(call.id),
                    "function": {"name": self._hidden(call.name), "arguments": self._hidden(call.arguments)},
                }
                for call in calls
            ]
        if message.role == "tool":
            row["tool_call_id"] = _nine(message.tool_call_id or "")
            row["name"] = self._hidden(message.name or "")
        if message.reasoning is not None:
            row["reasoning_content"] = self._hidden(message.reasoning)
        return row

    def _hidden(self, value: Any) -> Any:
        """The value with every control token in its strings replaced by a placeholder, which the template
        copies like any other text."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: f"{_HIDE}{self._number(match.group())}{_SHOW}", value)
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item) for item in value]
        return value

    def _number(self, text: str) -> int:
        return self._control.index(text) if text != _HIDE else len(self._control)

    def _encode(self, text: str, after: Place = Place.TOKEN) -> list[int]:
        parts: list[str] = []
        position = 0
        for match in _HIDDEN.finditer(text):
            number = int(match.group(1))
            parts += [Markup(text[position : match.start()]), ([*self._control, _HIDE])[number]]
            position = match.end()
        return self._codec.encode(*parts, Markup(text[position:]), after=after)

    def _find_stop(self) -> str:
        text = self._text([_QUESTION, Message("assistant", _MARK), _QUESTION], (), False)
        after = text.partition(_MARK)[2].lstrip()
        matches = [token for token in self._control if after.startswith(token)]
        if not matches:
            raise ModelError(f"the chat template ends an assistant turn with {after[:40]!r}, which is not a control token")
        return matches[0]  # the longest one: `_control` is sorted by length

    def _find_parser(self, custom: bool) -> tuple[str, str]:
        """The tool-call syntax, and why tools cannot be used ("" if they can)."""
        turn = Message("assistant", "", (_CALL,))
        try:
            parser = parser_for(self._text([_QUESTION, turn, _ANSWER], [_TOOL], False).partition("Question")[2])
            if parser is None and not custom:
                return "hermes", "the chat template does not write tool calls in a syntax that agentrl can parse"
            self._verify([turn, _ANSWER])
        except (RenderError, ModelError) as problem:
            return "hermes", f"the chat template cannot be used with tools: {problem}"
        return parser or "custom", ""

    def _bound(self, tools: Sequence[Mapping[str, Any]]) -> Parser:
        return self._parser.bind(tools) if isinstance(self._parser, ForTools) else self._parser

    def _check_parser(self) -> None:
        ids = self.assistant(Message("assistant", "", (_CALL,)))
        found = self.with_tools([_TOOL]).parse(ids, "stop").tool_calls
        if [(call.name, call.arguments) for call in found] != [(_CALL.name, _CALL.arguments)]:
            raise ModelError(
                f"the tool-call parser does not read what the chat template writes for a call: {self._codec.decode(ids)!r}"
            )

    def _verify(self, rounds: Sequence[Message]) -> None:
        """Render a conversation by appending and compare it with the template's rendering of the whole."""
        turn, *following = rounds
        whole = self._text([_QUESTION, turn, *following], (), True)
        replayed = self._opening + whole[len(self._opening) :].partition(self._stop)[0] + self._stop
        replayed += self._suffix(following)
        if replayed != whole or not whole.startswith(self._opening):
            at = next((i for i, (a, b) in enumerate(zip(replayed, whole, strict=False)) if a != b), 0)
            raise ModelError(
                "the chat template does not render by appending: after "
                f"{whole[max(0, at - 30) : at]!r} it writes {whole[at : at + 30]!r}, "
                f"appending gives {replayed[at : at + 30]!r}"
            )
        # Equal text is not enough: a renderer's tokens must be the ones that the model was trained on.
        direct = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        if self._encode(whole, Place.START) != list(direct):
            raise ModelError("the tokenizer splits text in the middle of a conversation differently than on its own")


def _nine(call_id: str) -> str:
    """Nine letters or digits, which some templates (Mistral) require of an id; the others do not render ids."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
