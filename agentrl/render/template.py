"""Append-only renderer for any chat template, and the choice of a tokenizer's renderer."""

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
from agentrl.render.base import Place, Renderer
from agentrl.render.chatml import CHATML_TEMPLATE, ChatML, advice
from agentrl.render.syntaxes import HARMONY, HERMES, LLAMA_JSON, SYNTAXES, harmony_parts
from agentrl.render.tagged_syntaxes import PYTHONIC
from agentrl.render.template_text import (
    ANSWER,
    CALL,
    EQUAL_ROUNDS,
    MANY,
    MARK,
    QUESTION,
    TOOL,
    EndlessTemplateError,
    LostTextError,
    Placeholders,
    Shape,
    Skeleton,
    TemplateText,
    TurnText,
    limit_lines,
    rounds_of,
    skeleton,
)
from agentrl.render.tool_calls import ForTools, Parser, Syntax, mark_cut
from agentrl.utils.errors import ModelError, RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The template itself gives each suffix: the text after the end of an assistant's turn in a short conversation with the new
# messages. A probe rendered this way must equal the template's text of the whole, or differ only in a turn that the
# template rewrites once more messages follow: then `keeps` is False, and the ledger forks.

_SAID = Skeleton((QUESTION,), ((Message("assistant", "Answer one"), (Message("user", "More"),)),))
_CALLED = Skeleton((QUESTION,), ((Message("assistant", "", (CALL,)), (ANSWER,)),))
_SHAPES_REMEMBERED = 4096
_TOOLS_REMEMBERED = 4096
_PROBES: dict[str, Json] = {"integer": 12345678901, "number": 0.0625, "boolean": True, "array": [], "object": {}}


class TemplateRenderer(Renderer):
    """Renderer that uses the tokenizer's chat template.

    `syntax` is the name of its call syntax ("custom" for a parser from elsewhere); `no_tools` is the reason why it cannot be
    used with tools, or "".
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, parser: Parser | ForTools | Syntax | None = None, day: date | None = None
    ) -> None:
        """`parser` replaces the one for the template's syntax; `day`: as for `TemplateText`. Raises ModelError if the template
        rewrites conversations, its turns have no end token, or `parser` cannot read the calls that it writes."""
        self._text = TemplateText(tokenizer, day)
        self._turns = TurnText(self._text)
        self.codec, self.frame = self._text.codec, self._text.form.frame
        self._fix = f"for tools, {self._text.advice}, or name the parser of its calls (model.tool_parser)"
        self._kept: dict[tuple[Shape, bool], bool] = {}
        self._tools_offered = self._unmarked = False
        self._callable: set[str] = set()
        self._verify(_SAID)
        self.syntax, self.no_tools = self._find_syntax(parser)
        self._own_stops = [self.codec.added[stop] for stop in (self._turns.stop, self._turns.call_stop)]
        self.stop_token_ids = tuple(dict.fromkeys([*self._own_stops, *self.codec.ends]))
        self._parser = parser.parser if isinstance(parser, Syntax) else parser or SYNTAXES.get(self.syntax, HERMES).parser
        self._parse_calls = self._parser.bind(()) if isinstance(self._parser, ForTools) else self._parser
        # The place of the tool list may change how a new message affects earlier turns.
        self._tools_matter = not self.no_tools and self._appends(_SAID, True) != self._appends(_SAID, False)
        # If the template counts messages, short conversations do not show how it renders long ones.
        forms = [(_SAID, False)] if self.no_tools else [(_SAID, False), (_CALLED, True)]
        long = [replace(form, rounds=form.rounds * MANY) for form, _ in forms]
        counts = any(self._appends(a, tools) != self._appends(b, tools) for (a, tools), b in zip(forms, long, strict=True))
        self._equal = sys.maxsize if counts else EQUAL_ROUNDS
        if not self.no_tools and (written := self._misread(CALL, TOOL)):
            problem = f"the tool-call parser does not read what the chat template writes for a call: {written!r}"
            if parser is not None:
                raise ModelError(f'{problem}; name the parser that does, or "auto" (model.tool_parser)')
            self.no_tools = f"{problem}; {self._fix}"
        self.tools_need_system, self.in_reasoning = self._turns.tools_need_system, self._turns.in_reasoning

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TemplateRenderer:
        offered, unmarked = bool(tools) and self._tools_matter, not tools and self.syntax in (LLAMA_JSON.name, PYTHONIC.name)
        parse = self._parser.bind(tools) if isinstance(self._parser, ForTools) else self._parser
        if (parse, offered, unmarked) == (self._parse_calls, self._tools_offered, self._unmarked):
            return self
        # A copy, since this one serves episodes with other tools at the same time.
        bound = copy(self)
        bound._parse_calls, bound._tools_offered, bound._unmarked = parse, offered, unmarked
        return bound

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Encode the opening messages. Raises RenderError if the template refuses them, drops text or does not support tools."""
        if tools and self.no_tools:
            raise RenderError(self.no_tools)
        if tools and self.tools_need_system and all(message.role != "system" for message in messages):
            raise RenderError("the chat template shows tools only with a system message. Begin the prompt with one")
        text = self._turns.prompt(messages, tools)
        for tool in tools:
            function = tool["function"]
            properties = (function.get("parameters") or {}).get("properties") or {}
            key = json.dumps(tool, sort_keys=True, default=str)
            # Other names may be escaped. These may stand elsewhere in the prompt: a new tool is compared with one without them.
            shown = [name for name in (function["name"], *properties) if name.isidentifier()]
            bare = {**tool, "function": {**function, "name": "0", "parameters": {"type": "object", "properties": {}}}}
            others = [bare if one is tool else one for one in tools]
            rest = "" if key in self._callable else self._turns.prompt(messages, others)
            if hidden := next((name for name in shown if text.count(name) <= rest.count(name)), ""):
                raise RenderError(
                    f"the chat template ignores tools: of {function['name']!r} it does not show {hidden!r}; {self._fix}"
                )
            if key in self._callable:
                continue
            # A call with a value of each parameter's first declared type must be read back unchanged.
            arguments = {}
            for name, schema in properties.items():
                declared = schema.get("type") if isinstance(schema, Mapping) else None
                first = declared[0] if isinstance(declared, list) and declared else declared
                arguments[name] = _PROBES.get(str(first), "a")
            if written := self._misread(ToolCall(function["name"], arguments, id="call_0"), tool):
                raise RenderError(
                    f"tool {function['name']!r}: the syntax {self.syntax!r} cannot write a call of it that is read back; it "
                    f"writes {written[:200]!r}. Rename the tool or its arguments, or set model.tool_parser"
                )
            if len(self._callable) >= _TOOLS_REMEMBERED:
                self._callable.clear()
            self._callable.add(key)
        return self._with_images(self._text.encode(text, Place.START), messages)

    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        roles = {message.role for message in messages}
        if "assistant" in roles:
            raise RenderError("an assistant turn is sampled, never appended as a message")
        if "tool" in roles and self.no_tools:
            raise RenderError(self.no_tools)
        stop = self._turns.call_stop if "tool" in roles else self._turns.stop
        # If several tokens can end a turn, the sampled one may not be the one that precedes these messages.
        ended = finish == "stop" and (last is None or last == self._text.codec.added[stop])
        suffix = self._turns.suffix(messages)
        return self._with_images(self._text.encode(suffix if ended else stop + suffix), messages)

    def _with_images(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Attach the messages' images to the ids. Raises RenderError if the template omitted one or wrote it twice."""
        pictures = self._text.pictures
        if pictures is None or not any(message.images for message in messages):
            return ids
        parts = [part for message in messages for part in split_at_images(message.content, message.images)]
        images = [part for part in parts if isinstance(part, Image)]
        wanted, found = sum(map(pictures.count, images)), ids.count(self._text.codec.added[pictures.pad])
        if wanted != found:
            raise RenderError(f"the chat template wrote {found} image tokens, expected {wanted}")
        return PromptIds(ids, images)

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        stopped = finish == "stop" and bool(token_ids) and token_ids[-1] in self.stop_token_ids
        # In harmony, the stop token distinguishes a complete call from a cut one, so it is kept.
        harmony = self.syntax == HARMONY.name
        bare = stopped and not (harmony and token_ids[-1] in self._own_stops)
        text = self._text.decode(token_ids[:-1] if bare else token_ids)
        if harmony:
            reasoning, content, calls = harmony_parts(text)
        else:
            frame = self._text.form.frame
            reasoning, rest = frame.split(frame.open + text if self._turns.in_reasoning else text)
            # Without tools, JSON is an answer, unless a token of the template marks it as a call.
            answer = self._unmarked and not any(token in rest for token in self._text.control)
            content, calls = (rest.strip(), ()) if answer else self._parse_calls(rest)
        if finish == "length":
            calls = mark_cut(calls)
        show = self._text.fill_placeholders
        shown = tuple(
            replace(call, name=show(call.name), arguments=show(call.arguments), raw=show(call.raw), error=show(call.error))
            for call in calls
        )
        return Message("assistant", show(content), shown, reasoning=show(reasoning))

    def spells_nothing(self, token_ids: Sequence[int]) -> bool:
        # A control token that was only spelled out is text (`TemplateText.decode`).
        marked = self.frame.open in self.codec.control or self.frame.close in self.codec.control
        return not marked or self._text.spells_nothing(token_ids)

    def assistant(self, message: Message) -> list[int]:
        if message.role != "assistant":
            raise RenderError(f"expected an assistant's message, got one of role {message.role!r}")
        codec, opening = self._text.codec, self._turns.opening
        after = Place.START if not opening else Place.TOKEN if any(map(opening.endswith, codec.added)) else Place.TEXT
        return self._text.encode(self._turns.turn(message), after)

    def keeps(self, message: Message, following: Sequence[Message], earlier: Sequence[Message] = (), begun: int = 0) -> bool:
        lead, opening = rounds_of(earlier[:begun], self._equal)
        _, sampled = rounds_of([*earlier[begun:], message, *following], self._equal)
        key = ((lead or ("user",), opening, sampled), self._tools_offered)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _SHAPES_REMEMBERED:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[key] = self._appends(skeleton(key[0]), self._tools_offered)
        return kept

    def _appends(self, shape: Skeleton, tools: bool) -> bool:
        try:
            return self._turns.ledger_text(shape, tools) == self._turns.whole(shape, tools)
        except LostTextError:  # it drops some text, such as text next to a call: `start` decides if that is allowed
            return False

    def _find_syntax(self, parser: Parser | ForTools | Syntax | None) -> tuple[str, str]:
        """Return the name of the call syntax, and the reason why tools cannot be used ("" if they can)."""
        named = parser if isinstance(parser, Syntax) else None
        written = ""
        try:
            written, prompt = self._turns.learn_calls()
            # Recognized by a call that the template writes or, if it leaves calls to the content of turns, by its prompt.
            shows = MARK in written
            fitting = (one for one in SYNTAXES.values() if (one.seen(written) if shows else one.asked(prompt)))
            syntax = named or next(fitting, None)
            if parser is None and syntax is None:
                raise RenderError("it does not write tool calls in a syntax that agentrl can parse")
            if not shows:
                if syntax is None or syntax.write is None:
                    raise RenderError("it does not write tool calls")
                self._text.change(calls_in_content=syntax)
            self._turns.learn_call_turns(syntax)
            self._verify(_CALLED)
        except (RenderError, ModelError) as problem:
            wrote = f", and writes a call and its answer as {written[:160]!r}" if written else ""
            about = f"it ends a turn with {self._turns.stop!r}{wrote}"
            name = named.name if named else "hermes" if parser is None else "custom"
            return name, f"the chat template cannot be used with tools: {problem} ({about}); {self._fix}"
        return (syntax.name if syntax is not None and (named or parser is None) else "custom"), ""

    def _misread(self, call: ToolCall, tool: Mapping[str, Any]) -> str:
        """Return the template's text for a call if it is not read back as that call, else ""."""
        ids = self.assistant(Message("assistant", "", (call,)))
        found = self.with_tools([tool]).parse(ids, "stop").tool_calls
        same = [(one.name, one.arguments) for one in found] == [(call.name, call.arguments)]
        return "" if same else self._text.decode(ids)

    def _verify(self, shape: Skeleton) -> None:
        """Compare a conversation rendered by appending with the template's rendering of the whole. Raises ModelError if they
        differ outside the turn; a turn that differs is never appended to (`keeps`)."""
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
        # Equal text is not enough: the tokens must be those that the model was trained on.
        if self._text.encode(whole, Place.START) != self._text.direct(whole):
            raise ModelError("the tokenizer splits text in the middle of a conversation differently than on its own")


# Choose the renderer


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    parser: Parser | ForTools | Syntax | None = None,
    pictures: Placeholders | None = None,
    day: str | None = None,
) -> Renderer:
    """Make the renderer of a tokenizer. Raises ModelError if none fits.

    `parser` replaces the parser for the chat template's call syntax. `pictures`: the image tokens of a model that takes images.
    `day`: the date for templates that write one, as YYYY-MM-DD; default: today.
    """
    template, owner = tokenizer.chat_template, f"the tokenizer of {tokenizer.name_or_path or 'this model'}"
    if isinstance(template, dict):
        raise ModelError(
            f"{owner} has several chat templates ({', '.join(map(repr, template))}): write the one to use to a file that "
            f"model.chat_template names, or {advice(tokenizer)}"
        )
    if not isinstance(template, str) or not template:
        raise ModelError(f"{owner} has no chat template; {advice(tokenizer)}")
    if template.strip() == CHATML_TEMPLATE.strip() and parser is None and pictures is None:
        return ChatML(tokenizer)
    try:
        with limit_lines():
            made = TemplateRenderer(tokenizer, parser, None if day is None else date.fromisoformat(day))
        made._text.pictures = pictures
        for token in () if pictures is None else (pictures.begin, pictures.pad, pictures.end):
            if token not in made._text.control:
                raise ModelError(f"the tokenizer has no control token {token!r}, which it needs for images")
        return made
    except EndlessTemplateError as endless:
        raise ModelError(f"{owner}: its chat template does not end: {endless}. Bound that loop, or {advice(tokenizer)}") from None
    except RenderError as problem:
        raise ModelError(f"a question and its answer cannot be rendered: {problem}; {advice(tokenizer)}") from problem
