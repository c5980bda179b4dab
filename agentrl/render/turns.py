"""How a chat template writes turns: what opens and ends them, where reasoning stands, and what follows them.

All of it is learned from probe conversations; nothing is looked up by a model's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from agentrl.errors import ModelError, RenderError
from agentrl.render.parsers import Syntax
from agentrl.render.skeleton import (
    ANSWER,
    CALL,
    MARK,
    QUESTION,
    SECOND,
    SECOND_ANSWER,
    TOOL,
    Skeleton,
)  # fmt: skip
from agentrl.render.template_text import FRAMES, TemplateText
from agentrl.trajectory import Message, ToolCall

_THOUGHT = "Qthoughtq"
_ASKED = Message("assistant", MARK)
_CALLED = Message("assistant", "", (CALL,))
_FIELDS = ("reasoning_content", "reasoning", "thinking", "chunk")


class TurnText:
    """The template's turns as text. Raises ModelError when made if they have no end token."""

    def __init__(self, text: TemplateText) -> None:
        self._text = text
        self.tools_need_system = False
        try:
            text.render([QUESTION], generate=True)
        except RenderError:  # a template for tools alone goes through their list without looking whether there is one
            text.change(no_list=False)
        # After a turn in a conversation, and at the end of one that nothing follows: some templates differ there.
        self.written_stop = self._first_control([QUESTION, _ASKED, QUESTION])
        if not self.written_stop:
            after = text.render([QUESTION, _ASKED, QUESTION], generate=False).partition(MARK)[2].lstrip()
            raise ModelError(
                f"the chat template ends an assistant turn with {after[:40]!r}, which is not a control token, so a policy could "
                f"not end its turn; if it should be one, add it to the tokenizer (add_special_tokens), or {text.advice}"
            )
        self.stop = self._first_control([QUESTION, _ASKED]) or self.written_stop
        self.call_stop = self.stop
        self.opening = text.render([QUESTION], generate=True)
        try:
            text.render([QUESTION, Message("assistant"), QUESTION], generate=False)
        except RenderError:  # such a template refuses a turn in which the policy said nothing
            text.change(nothing=" ")
        self._learn_reasoning()
        frame = text.form.frame
        opened, closed = self.opening.rfind(frame.open), self.opening.rfind(frame.close)
        # Such a template opens the reasoning itself: what is sampled begins within it, without the mark.
        self.in_reasoning = opened > closed and not self.opening[opened + len(frame.open) :].strip()
        self.past_reasoning = self.opening.rstrip().endswith(frame.close)
        inside = opened >= 0 and not self.opening[opened + len(frame.open) : max(closed, opened)].strip()
        cut = opened if self.in_reasoning or inside else closed
        self.bare = self.opening[:cut] if self.in_reasoning or self.past_reasoning else self.opening

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.stop, self.call_stop)))

    def stop_after(self, calls: bool) -> str:
        return self.call_stop if calls else self.stop

    def turn(self, message: Message) -> str:
        """The turn as a policy would sample it after the opening, with its stop token.

        Raises RenderError if the template does not write it after its own opening.
        """
        frame = self._text.form.frame
        body = self._body(message, [])
        if message.reasoning is None and not self.in_reasoning and frame.split(body) != (None, body):
            # Only as the last one does a turn without reasoning get an empty one from such a template.
            body = self._body(message, self._reply(message))
        # A template that drops the reasoning of every turn still lets the policy write it, and close what was opened.
        if self.in_reasoning and frame.close not in body:
            body = f"{self._text.hide(message.reasoning or '')}\n{frame.close}{frame.gap}{body}"
        elif message.reasoning and frame.close not in body:
            body = frame.around(self._text.hide(message.reasoning)) + body
        calls = any(call.arguments is not None for call in message.tool_calls)
        stop = self.stop_after(calls)
        # A template may end a turn only before the next one; a policy samples the end in any case.
        return body.partition(stop)[0] + stop

    def suffix(self, messages: Sequence[Message]) -> str:
        """What the template adds after the end of an assistant turn for `messages`, up to the next opening.

        Raises RenderError if it does not leave the turn as it was.
        """
        answered = [message for message in messages if message.role == "tool"]
        # Some templates refuse tool results that no call asked for, so the probe turn makes matching calls.
        calls = tuple(ToolCall(m.name or "probe_tool", {"key": MARK}, id=m.tool_call_id or "") for m in answered)
        if self._text.form.one_call:
            calls = calls[:1]
        turn = Message("assistant", "", calls) if calls else _ASKED
        text = self._text.render([QUESTION, turn, *messages], generate=True)
        _, mark, after = text.partition(MARK)
        for _ in calls[1:]:
            _, mark, after = after.partition(MARK)
        _, stop, suffix = after.partition(self.call_stop if calls else self.written_stop)
        if not (mark and stop):
            raise RenderError("the chat template rewrote the turn that came before the new messages")
        return suffix

    def appended(self, shape: Skeleton, tools: bool) -> str:
        """The conversation as a ledger has it: each turn as it was sampled, each answer as it was appended."""
        text = self._text.render(shape.opening, [TOOL] if tools else [], generate=True)
        return text + "".join(self.turn(turn) + self.suffix(answers) for turn, answers in shape.rounds)

    def whole(self, shape: Skeleton, tools: bool) -> str:
        """The conversation as the template writes it."""
        return self._text.render(shape.messages, [TOOL] if tools else [], generate=True)

    def rewrites_only_the_turn(self, shape: Skeleton, whole: str) -> bool:
        """Whether the template, which writes `whole`, leaves what comes before the one turn of `shape` and after it."""
        ((turn, answers),) = shape.rounds
        stop = self.call_stop if turn.tool_calls else self.written_stop
        said = MARK if turn.tool_calls else turn.content
        inside = whole.removeprefix(self.bare).removesuffix(stop + self.suffix(answers))
        if len(inside) != len(whole) - len(self.bare) - len(stop + self.suffix(answers)):
            return False
        # A turn that begins with the stop token is another turn: the template opens none for the assistant.
        return said in inside and not inside.lstrip().startswith((stop, self.stop))

    def learn_calls(self) -> tuple[str, str]:
        """What the template writes after the question for a call and its answer, and the prompt before it.

        Raises RenderError if it takes no calls.
        """
        opening = [QUESTION]
        if CALL.name not in self._text.render(opening, [TOOL], generate=True):
            opening = [Message("system", "Instructions"), QUESTION]
            with suppress(RenderError):  # some templates take no system message
                self.tools_need_system = CALL.name in self._text.render(opening, [TOOL], generate=True)
            if not self.tools_need_system:
                raise RenderError("it ignores tools")
        try:
            text = self._text.render([*opening, _CALLED, ANSWER], [TOOL], generate=False)
        except RenderError as problem:
            self._text.change(arguments_as_text=True)
            try:
                text = self._text.render([*opening, _CALLED, ANSWER], [TOOL], generate=False)
            except RenderError:
                raise problem from None
        prompt, _, call = text.partition(QUESTION.content)
        return call, prompt

    def use(self, syntax: Syntax | None) -> None:
        """Learn how a turn of calls in this syntax ends, and what else the template wants of such turns."""
        text = self._text
        after = text.render([QUESTION, _CALLED, ANSWER], [TOOL], generate=False).rpartition(MARK)[2]
        ends = [end for end in (*(syntax.ends if syntax else ()), self.written_stop, self.stop) if end in after]
        if ends:
            self.call_stop = min(ends, key=after.find)
        if self.call_stop not in text.control:
            self.call_stop = self.stop
        two = [QUESTION, Message("assistant", "", (CALL, SECOND)), ANSWER, SECOND_ANSWER]
        try:
            several = text.render(two, [TOOL], generate=False).count(MARK) > 1
        except RenderError:
            several = False
        if not several and syntax is not None:
            text.change(one_call=syntax)
        # What is said of a call that could not be parsed must be seen: such a call is given as text, if that does.
        try:
            seen = ANSWER.content in text.render([QUESTION, _ASKED, ANSWER], [TOOL], generate=False).partition(MARK)[2]
        except RenderError:
            seen = False
        text.change(malformed_as_calls=not seen)
        try:
            text.render([QUESTION, Message("assistant", "Said", (CALL,), reasoning="Thought"), ANSWER], [TOOL], generate=False)
        except RenderError:
            text.change(content_as_reasoning=True)

    def _first_control(self, messages: Sequence[Message]) -> str:
        after = self._text.render(messages, generate=False).partition(MARK)[2].lstrip()
        # The longest one: `control` is sorted by length.
        return next((token for token in self._text.control if after.startswith(token)), "")

    def _learn_reasoning(self) -> None:
        """Find the key under which the template takes reasoning, and the marks that it puts around it."""
        thoughtful = [Message("assistant", MARK, reasoning=_THOUGHT), Message("assistant", "", (CALL,), reasoning=_THOUGHT)]
        # Some templates write the reasoning of a turn with calls only.
        for field, turn in product(_FIELDS, thoughtful):
            self._text.change(reasoning=field)
            try:
                text = self._text.render([QUESTION, turn], [TOOL] if turn.tool_calls else [], generate=False)
            except RenderError:
                continue
            before, thought, after = text.partition(_THOUGHT)
            fitting = [
                frame
                for frame in FRAMES
                if before.rstrip().endswith(frame.open.rstrip()) and after.lstrip().startswith(frame.close)
            ]
            if thought and MARK in after and fitting:
                self._text.change(frame=fitting[0])
                return
        opened = [frame for frame in FRAMES if self.opening.rstrip().endswith((frame.open.rstrip(), frame.close))]
        self._text.change(reasoning="inline", frame=opened[0] if opened else FRAMES[0])
        if _THOUGHT not in self._text.render([QUESTION, thoughtful[0], QUESTION], generate=False):
            self._text.change(reasoning="none")  # it looks for the marks in what was said, and drops what is between them

    def _body(self, message: Message, reply: Sequence[Message]) -> str:
        """What the template writes for a turn, after the opening."""
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
            # An empty reasoning, of which the opening has its own.
            body = body.removeprefix(frame.open).lstrip().removeprefix(frame.close)
        return body

    def _reply(self, message: Message) -> list[Message]:
        calls = [call for call in message.tool_calls if call.arguments is not None]
        answers = [Message("tool", "result", tool_call_id=call.id, name=call.name) for call in calls]
        return answers or [QUESTION]
