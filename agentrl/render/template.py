"""Any chat template as an append-only renderer, and the choice of a tokenizer's renderer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

from agentrl.data.images import Image, split_at_images
from agentrl.data.token_ledger import PromptIds
from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.render.base import Place, ProseReader, Renderer, TurnReader
from agentrl.render.chatml import CHATML_TEMPLATE, ChatML, advice
from agentrl.render.syntaxes import HARMONY, SYNTAXES, harmony_parts, syntax_asked, syntax_of
from agentrl.render.template_text import (
    ANSWER,
    CALL,
    EQUAL_ROUNDS,
    MANY,
    MARK,
    QUESTION,
    TOOL,
    LostTextError,
    Placeholders,
    Shape,
    Skeleton,
    TemplateText,
    TurnText,
    shape_of,
    skeleton,
)
from agentrl.render.tool_calls import ForTools, Parser, Syntax, json_rules, name_cut, turn_grammar
from agentrl.utils.errors import ModelError, RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The suffix comes from the template itself: the text after the end of an assistant's turn in a short conversation with the new
# messages. A probe rendered this way must be what the template gives for the whole, or differ from it only in a turn that the
# template rewrites once more messages follow: `keeps` then says so, and the ledger forks.

_SAID = Skeleton((QUESTION,), ((Message("assistant", "Answer one"), (Message("user", "More"),)),))
_CALLED = Skeleton((QUESTION,), ((Message("assistant", "", (CALL,)), (ANSWER,)),))
_SHAPES_REMEMBERED = 4096
_TOOLS_REMEMBERED = 4096


class TemplateRenderer(Renderer):
    """Renders through the tokenizer's own chat template.

    `syntax` names the syntax of its tool calls ("custom" for a parser that is not agentrl's); `no_tools` says why it
    cannot be used with tools, or is "".
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, parser: Parser | ForTools | Syntax | None = None, day: date | None = None
    ) -> None:
        """`parser` replaces the one chosen by the template's syntax; `day`: as for `TemplateText`. Raises ModelError if the
        template rewrites conversations, its turns have no end token, or the parser cannot read the calls that it writes."""
        self._text = TemplateText(tokenizer, day)
        self._turns = TurnText(self._text)
        self._what_to_do = f"for tools, {self._text.advice}, or name the parser of its calls (model.tool_parser)"
        self._kept: dict[tuple[Shape, bool], bool] = {}
        self._tools_offered = False
        self._callable: set[str] = set()
        self._verify(_SAID)
        self.syntax, self.no_tools = self._find_syntax(parser)
        known = SYNTAXES.get(self.syntax)
        self._parser = parser.parser if isinstance(parser, Syntax) else parser or (known or SYNTAXES["hermes"]).parser
        self._parse_calls = self._bound(())
        # Where the list of tools stands may change what a new message does to the turns before it.
        self._tools_matter = not self.no_tools and self._appends(_SAID, True) != self._appends(_SAID, False)
        # Of a template that counts messages no short conversation says what it does to a long one.
        forms = [(_SAID, False)] if self.no_tools else [(_SAID, False), (_CALLED, True)]
        long = [replace(form, rounds=form.rounds * MANY) for form, _ in forms]
        counts = any(self._appends(a, tools) != self._appends(b, tools) for (a, tools), b in zip(forms, long, strict=True))
        self._equal = sys.maxsize if counts else EQUAL_ROUNDS
        if not self.no_tools and (written := self._misread(CALL, TOOL)):
            problem = f"the tool-call parser does not read what the chat template writes for a call: {written!r}"
            if parser is not None:
                raise ModelError(problem)
            self.no_tools = f"{problem}; {self._what_to_do}"
        self.tools_need_system = self._turns.tools_need_system

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._text.codec.added[stop] for stop in self._turns.stops)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TemplateRenderer:
        offered = bool(tools) and self._tools_matter
        if not isinstance(self._parser, ForTools) and offered == self._tools_offered:
            return self
        # A copy, as this one serves episodes with other tools at the same time.
        bound = copy(self)
        bound._parse_calls, bound._tools_offered = self._bound(tools), offered
        return bound

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Raises RenderError if the template refuses the messages, drops text of them or does not support tools."""
        if tools and self.no_tools:
            raise RenderError(self.no_tools)
        if tools and self.tools_need_system and all(message.role != "system" for message in messages):
            raise RenderError("the chat template shows tools only with a system message. Begin the prompt with one")
        text = self._turns.prompt(messages, tools)
        for function in (tool["function"] for tool in tools):
            names = (function["name"], *_properties(function))
            # Others may be escaped.
            if hidden := next((name for name in names if name.isidentifier() and name not in text), ""):
                raise RenderError(
                    f"the chat template ignores tools: of {function['name']!r} it does not show {hidden!r}; {self._what_to_do}"
                )
        for tool in tools:
            self._check_callable(tool)
        return self._with_images(self._text.encode(text, Place.START), messages)

    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        roles = {message.role for message in messages}
        if "assistant" in roles:
            raise RenderError("an assistant turn is sampled, never appended as a message")
        if "tool" in roles and self.no_tools:
            raise RenderError(self.no_tools)
        stop = self._turns.call_stop if "tool" in roles else self._turns.stop
        # Where several tokens end a turn, another one may have been sampled than the one that these messages follow.
        ended = finish == "stop" and (last is None or last == self._text.codec.added[stop])
        suffix = self._turns.suffix(messages)
        return self._with_images(self._text.encode(suffix if ended else stop + suffix), messages)

    def sees(self, pictures: Placeholders) -> TemplateRenderer:
        """This renderer, for a model that takes images. Raises ModelError if its tokenizer lacks the tokens for them."""
        missing = [token for token in (pictures.begin, pictures.pad, pictures.end) if token not in self._text.control]
        if missing:
            raise ModelError(f"the tokenizer has no control token {missing[0]!r}, which stands around or for images")
        self._text.pictures = pictures
        return self

    def _with_images(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """The ids with the images among them. Raises RenderError if the template left one out, or wrote it twice."""
        pictures = self._text.pictures
        if pictures is None or not any(message.images for message in messages):
            return ids
        parts = [part for message in messages for part in split_at_images(message.content, message.images)]
        images = [part for part in parts if isinstance(part, Image)]
        wanted, found = sum(map(pictures.count, images)), ids.count(self._text.codec.added[pictures.pad])
        if wanted != found:
            raise RenderError(f"the chat template wrote {found} tokens for images that have {wanted}")
        return PromptIds(ids, images)

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        stopped = finish == "stop" and bool(token_ids) and token_ids[-1] in self.stop_token_ids
        if self.syntax == HARMONY.name:  # in which the stop token tells a call from one that was cut
            reasoning, content, calls = harmony_parts(self._text.decode(token_ids))
        else:
            frame = self._text.form.frame
            text = self._text.decode(token_ids[:-1] if stopped else token_ids)
            reasoning, rest = frame.split(frame.open + text if self._turns.in_reasoning else text)
            content, calls = self._parse_calls(rest)
        if finish == "length":
            calls = name_cut(calls)
        show = self._text.fill_placeholders
        shown = tuple(
            replace(call, name=show(call.name), arguments=show(call.arguments), raw=show(call.raw), error=show(call.error))
            for call in calls
        )
        return Message("assistant", show(content), shown, reasoning=show(reasoning))

    def reader(self, stops: Sequence[str] = ()) -> TurnReader:
        known, frame = SYNTAXES.get(self.syntax), self._text.form.frame
        if known is None or not known.opens or self._parser is not known.parser:
            return TurnReader()
        codec = self._text.codec
        marked = frame.open in codec.control or frame.close in codec.control
        return ProseReader(
            codec,
            (frame.open, frame.close),
            (*known.opens, *stops),
            last=self.stop_token_ids,
            thinking=self._turns.in_reasoning,
            # A control token that was only spelled is text (`TemplateText.decode`).
            thinks=self._text.spells_nothing if marked else lambda ids: True,
        )

    def grammar(
        self, schema: Json = None, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, reasons: bool = True
    ) -> str:
        if self.syntax == HARMONY.name:
            raise RenderError(f"turns in the syntax {HARMONY.name!r} have channels, and agentrl has no grammar for them")
        known, frame, mark = SYNTAXES.get(self.syntax), self._text.form.frame, self._text.codec.mark
        rules = [json_rules(schema)] if schema is not None else []
        if tools:
            if known is None or known.grammar is None:
                able = ", ".join(name for name, syntax in SYNTAXES.items() if syntax.grammar is not None)
                raise RenderError(f"no grammar is known of calls in the syntax {self.syntax!r} (one is of: {able})")
            rules.append(known.grammar(tools, several, mark))
        return turn_grammar(rules, frame, mark, thinking=self._turns.in_reasoning, reasons=reasons)

    @property
    def call_end(self) -> str:
        known = SYNTAXES.get(self.syntax)
        return known.close if known is not None else ""

    def assistant(self, message: Message) -> list[int]:
        if message.role != "assistant":
            raise RenderError(f"expected an assistant's message, got one of role {message.role!r}")
        return self._text.encode(self._turns.turn(message), self._text.codec.place_after(self._turns.opening))

    def keeps(self, message: Message, following: Sequence[Message], earlier: Sequence[Message] = (), begun: int = 0) -> bool:
        key = (shape_of(earlier, begun, message, following, self._equal), self._tools_offered)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _SHAPES_REMEMBERED:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[key] = self._appends(skeleton(key[0]), self._tools_offered)
        return kept

    def _appends(self, shape: Skeleton, tools: bool) -> bool:
        try:
            return self._turns.ledger_text(shape, tools) == self._turns.whole(shape, tools)
        except LostTextError:  # it drops something, if only a policy's text next to a call: `start` decides
            return False

    def _find_syntax(self, parser: Parser | ForTools | Syntax | None) -> tuple[str, str]:
        """The name of the tool-call syntax, and why tools cannot be used ("" if they can)."""
        named = parser if isinstance(parser, Syntax) else None
        written = ""
        try:
            written, prompt = self._turns.learn_calls()
            seen = syntax_of(written) if MARK in written else syntax_asked(prompt)
            syntax = named or seen
            if parser is None and syntax is None:
                raise RenderError("it does not write tool calls in a syntax that agentrl can parse")
            if MARK not in written:
                if syntax is None or syntax.write is None:
                    raise RenderError("it does not write tool calls")
                self._text.change(calls_in_content=syntax)
            self._turns.use(syntax)
            self._verify(_CALLED)
        except (RenderError, ModelError) as problem:
            wrote = f", and writes a call and its answer as {written[:160]!r}" if written else ""
            about = f"it ends a turn with {self._turns.stop!r}{wrote}"
            return "hermes", f"the chat template cannot be used with tools: {problem} ({about}); {self._what_to_do}"
        return (syntax.name if syntax is not None and (named or parser is None) else "custom"), ""

    def _bound(self, tools: Sequence[Mapping[str, Any]]) -> Parser:
        return self._parser.bind(tools) if isinstance(self._parser, ForTools) else self._parser

    def _misread(self, call: ToolCall, tool: Mapping[str, Any]) -> str:
        """Text that the template writes for a call of the tool; "" if it is read back as that call."""
        ids = self.assistant(Message("assistant", "", (call,)))
        found = self.with_tools([tool]).parse(ids, "stop").tool_calls
        same = [(one.name, one.arguments) for one in found] == [(call.name, call.arguments)]
        return "" if same else self._text.decode(ids)

    def _check_callable(self, tool: Mapping[str, Any]) -> None:
        """Raises RenderError if a call of the tool, as the template writes it, is not read back with its name and arguments."""
        key = json.dumps(tool, sort_keys=True, default=str)
        if key in self._callable:
            return
        function = tool["function"]
        arguments = {name: _probe_value(schema) for name, schema in _properties(function).items()}
        call = ToolCall(function["name"], arguments, id="call_0")
        if written := self._misread(call, tool):
            raise RenderError(
                f"tool {call.name!r}: the syntax {self.syntax!r} cannot write a call of it that is read back; it writes "
                f"{written[:200]!r}. Rename the tool or its arguments, or set model.tool_parser"
            )
        if len(self._callable) >= _TOOLS_REMEMBERED:
            self._callable.clear()
        self._callable.add(key)

    def _verify(self, shape: Skeleton) -> None:
        """Compare a conversation made by appending with the template's rendering of the whole. They may differ in the turn
        only, and only if what comes before and after it stays: such a turn is never appended to (`keeps`)."""
        try:
            replayed, whole = self._turns.ledger_text(shape, False), self._turns.whole(shape, False)
            ((turn, (answer,)),) = shape.rounds
            self._turns.require_whole(turn, answer)
        except RenderError as problem:
            raise ModelError(f"the chat template does not render by appending: {problem}; {self._text.advice}") from problem
        if replayed != whole and not self._turns.rewrites_only_the_turn(shape, whole):
            at = next((i for i, (a, b) in enumerate(zip(replayed, whole, strict=False)) if a != b), 0)
            raise ModelError(
                "the chat template does not render by appending: after "
                f"{whole[max(0, at - 30) : at]!r} it writes {whole[at : at + 30]!r}, "
                f"appending gives {replayed[at : at + 30]!r}; {self._text.advice}"
            )
        # Equal text is not enough: a renderer's tokens must be the ones that the model was trained on.
        if self._text.encode(whole, Place.START) != self._text.direct(whole):
            raise ModelError("the tokenizer splits text in the middle of a conversation differently than on its own")


def _properties(function: Mapping[str, Any]) -> Mapping[str, Json]:
    return (function.get("parameters") or {}).get("properties") or {}


def _probe_value(schema: Json) -> Json:
    """A value of the first type that a parameter declares."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    first = declared[0] if isinstance(declared, list) and declared else declared
    return {"integer": 12345678901, "number": 0.0625, "boolean": True, "array": [], "object": {}}.get(str(first), "a")


# Choose the renderer


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    parser: Parser | ForTools | Syntax | None = None,
    pictures: Placeholders | None = None,
    day: str | None = None,
) -> Renderer:
    """The renderer for a tokenizer. Raises ModelError if none fits.

    `parser` replaces the tool-call parser that is inferred from the chat template's syntax. `pictures`: of a model that takes
    images, what it has for one among its tokens. `day`: the date of a template that writes one, as YYYY-MM-DD; today by default.
    """
    template, whose = tokenizer.chat_template, f"the tokenizer of {tokenizer.name_or_path or 'this model'}"
    if isinstance(template, dict):
        raise ModelError(
            f"{whose} has several chat templates ({', '.join(map(repr, template))}): write the one to use to a file that "
            f"model.chat_template names, or {advice(tokenizer)}"
        )
    if not isinstance(template, str) or not template:
        raise ModelError(f"{whose} has no chat template; {advice(tokenizer)}")
    if template.strip() == CHATML_TEMPLATE.strip() and parser is None and pictures is None:
        return ChatML(tokenizer)
    try:
        made = TemplateRenderer(tokenizer, parser, None if day is None else date.fromisoformat(day))
        return made if pictures is None else made.sees(pictures)
    except RenderError as problem:
        raise ModelError(f"a question and its answer cannot be rendered: {problem}; {advice(tokenizer)}") from problem
