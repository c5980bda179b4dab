"""ChatML with Hermes / Qwen tool calls, in a short form for small models.

    <|im_start|>system
    {system}
    Tools: get(key) set(key, value, ttl?)<|im_end|>
    <|im_start|>user
    {task}<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "get", "arguments": {"key": "a"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    {result}
    </tool_response><|im_end|>
    <|im_start|>assistant

`CHATML_TEMPLATE` is the same format as a Jinja chat template; the tokenizers that the project builds have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import ModelError, RenderError
from agentrl.render.base import Renderer
from agentrl.render.fragments import Place
from agentrl.render.grammar import either, hermes_rules, json_rules, turn_grammar
from agentrl.render.streaming import ProseReader, TurnReader
from agentrl.render.text import Codec, Markup
from agentrl.render.toolcalls import CLOSE, OPEN, parse_tool_calls, render_tool_calls
from agentrl.trajectory import Json, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, END = "<|im_start|>", "<|im_end|>"
"""The added tokens that a tokenizer for this format must have."""

CHATML_TEMPLATE = """\
{%- macro signature(tool) -%}
{%- set schema = tool.function.parameters or {} -%}
{{ tool.function.name }}(
{%- for name in schema.properties or {} -%}
{{ name }}{{ '' if name in (schema.required or []) else '?' }}{{ '' if loop.last else ', ' }}
{%- endfor -%}
)
{%- endmacro -%}
{%- macro tool_list() -%}
Tools:{% for tool in tools %} {{ signature(tool) }}{% endfor %}
{%- endmacro -%}
{%- if tools and (not messages or messages[0].role != 'system') -%}
<|im_start|>system
{{ tool_list() }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined and message.reasoning_content is not none -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content or '' }}
{%- if message.role == 'system' and loop.first and tools -%}
{{ '\\n' if message.content else '' }}{{ tool_list() }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first else '' }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

_OPEN_TURN = Markup(f"{START}assistant\n")
_CLOSE_TURN = Markup(f"{END}\n")


class ChatML(Renderer):
    """Renders the format above, with the same tokens as `apply_chat_template` of `CHATML_TEMPLATE`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ModelError if the tokenizer lacks a ChatML control token."""
        self._codec = Codec(tokenizer)
        for token in (START, END):
            if token not in self._codec.added:
                raise ModelError(f"ChatML needs the added token {token!r}, which the tokenizer does not have")
        self._end = self._codec.added[END]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self._end,)

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if tools:
            listing = "Tools: " + " ".join(_signature(tool) for tool in tools)
            if messages and messages[0].role == "system":
                content = f"{messages[0].content}\n{listing}" if messages[0].content else listing
                messages = [Message("system", content), *messages[1:]]
            else:
                messages = [Message("system", listing), *messages]
        return self._codec.encode(*_turns(messages), _OPEN_TURN, after=Place.START)

    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        for message in messages:
            if message.role == "assistant":
                raise RenderError("an assistant turn is sampled, never appended as a message")
        # A turn cut by a budget has no end token in its sampled ids, so the suffix supplies it.
        close = Markup("\n") if finish == "stop" else _CLOSE_TURN
        return self._codec.encode(close, *_turns(messages), _OPEN_TURN)

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        # A cut turn may end in any token, which is then part of its text.
        ids = token_ids[:-1] if finish == "stop" and token_ids and token_ids[-1] == self._end else token_ids
        reasoning, text = split_reasoning(self._codec.decode(ids))
        content, calls = parse_tool_calls(text)
        return Message("assistant", content, calls, reasoning=reasoning)

    def reader(self, stops: Sequence[str] = ()) -> TurnReader:
        return ProseReader(self._codec, ("<think>", "</think>"), (OPEN, *stops), last=self.stop_token_ids)

    def grammar(
        self, schema: Json = None, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, reasons: bool = True
    ) -> str:
        mark = self._codec.mark
        rules = [json_rules(schema)] if schema is not None else []
        rules += [hermes_rules(tools, several, mark)] if tools else []
        return turn_grammar(either(rules), ("<think>", "</think>"), mark, thinking=False, reasons=reasons)

    @property
    def call_end(self) -> str:
        return CLOSE

    def assistant(self, message: Message) -> list[int]:
        if message.role != "assistant":
            raise RenderError(f"expected an assistant's message, got one of role {message.role!r}")
        # Without the newline after END, as a policy samples it: `extend` adds that one.
        return self._codec.encode(*_body(message), Markup(END), after=Place.TEXT)


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Split off a leading `<think>...</think>`; without the closing tag the whole text is reasoning."""
    head = text.lstrip()
    if not head.startswith("<think>"):
        return None, text
    # Without the closing tag nothing is left for calls: one that the policy only thought of was not made.
    reasoning, _, rest = head.removeprefix("<think>").partition("</think>")
    return reasoning.strip("\n"), rest


def _signature(tool: Mapping[str, Any]) -> str:
    function = tool["function"]
    schema = function.get("parameters") or {}
    required = schema.get("required") or []
    names = [name if name in required else f"{name}?" for name in schema.get("properties") or {}]
    return f"{function['name']}({', '.join(names)})"


def _turns(messages: Sequence[Message]) -> list[str]:
    """The parts of whole turns; adjacent tool results share one user turn."""
    parts: list[str] = []
    for index, message in enumerate(messages):
        if message.role != "tool":
            # Only the frame is markup; content stays ordinary text, whatever control tokens its author spelled out.
            parts += [Markup(f"{START}{message.role}\n"), *_body(message), _CLOSE_TURN]
            continue
        if index == 0 or messages[index - 1].role != "tool":
            parts.append(Markup(f"{START}user"))
        parts += [Markup("\n<tool_response>\n"), message.content, Markup("\n</tool_response>")]
        if index + 1 == len(messages) or messages[index + 1].role != "tool":
            parts.append(_CLOSE_TURN)
    return parts


def _body(message: Message) -> list[str]:
    parts: list[str] = []
    if message.reasoning is not None:
        parts += [Markup("<think>\n"), message.reasoning, Markup("\n</think>\n\n")]
    parts.append(message.content)
    for index, call in enumerate(message.tool_calls):
        glue = "\n" if message.content or index else ""
        parts += [glue, *_tagged(render_tool_calls([call]))]
    return parts


def _tagged(block: str) -> list[str]:
    """A call's outer tags are markup; the text between them is not, even if it contains the same tags."""
    head, tail = "<tool_call>", "</tool_call>"
    opens, closes = block.startswith(head), block.endswith(tail) and len(block) >= len(head + tail)
    inner = block[len(head) if opens else 0 : len(block) - len(tail) if closes else len(block)]
    return [Markup(head if opens else ""), inner, Markup(tail if closes else "")]
