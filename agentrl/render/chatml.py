"""ChatML with Hermes tool calls, and named chat templates with tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.data.trajectory import Message
from agentrl.render.base import THINK, Codec, Markup, Place, Renderer
from agentrl.render.tool_calls import CLOSE, OPEN, mark_cut, parse_tool_calls, render_tool_calls
from agentrl.utils.errors import ConfigError, ModelError, RenderError, did_you_mean
from agentrl.utils.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ChatML with Hermes / Qwen tool calls, in a short form for small models.
#
# <|im_start|>system
# {system}
# Tools: get(key) set(key, value, ttl?)<|im_end|>
# <|im_start|>user
# {task}<|im_end|>
# <|im_start|>assistant
# <tool_call>
# {"name": "get", "arguments": {"key": "a"}}
# </tool_call><|im_end|>
# <|im_start|>user
# <tool_response>
# {result}
# </tool_response><|im_end|>
# <|im_start|>assistant
#
# `CHATML_TEMPLATE` is this format as a Jinja chat template, which the tokenizers built by the project have.

START, END = "<|im_start|>", "<|im_end|>"
"""Added tokens that a tokenizer must have for this format."""

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
    """Renderer of the format above, with the same tokens as `apply_chat_template` of `CHATML_TEMPLATE`."""

    syntax = "hermes"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ModelError if the tokenizer lacks a ChatML control token."""
        self.codec = Codec(tokenizer)
        for token in (START, END):
            if token not in self.codec.added:
                raise ModelError(f"ChatML needs the added token {token!r}, which the tokenizer does not have")
        self.stop_token_ids = tuple(dict.fromkeys([self.codec.added[END], *self.codec.ends]))

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if tools:
            listing = "Tools:"
            for tool in tools:
                schema = tool["function"].get("parameters") or {}
                required = schema.get("required") or []
                names = [name if name in required else f"{name}?" for name in schema.get("properties") or {}]
                listing += f" {tool['function']['name']}({', '.join(names)})"
            first = [message.content for message in messages[:1] if message.role == "system"]
            messages = [Message("system", "\n".join([*filter(None, first), listing])), *messages[len(first) :]]
        return self.codec.encode(*_turns(messages), _OPEN_TURN, after=Place.START)

    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        if any(message.role == "assistant" for message in messages):
            raise RenderError("an assistant turn is sampled, never appended as a message")
        # A turn that a budget cut or another token ended lacks the end token, so the suffix adds it.
        ended = finish == "stop" and last in (None, self.stop_token_ids[0])
        return self.codec.encode(Markup("\n") if ended else _CLOSE_TURN, *_turns(messages), _OPEN_TURN)

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        # The last token of a cut turn is part of its text.
        ids = token_ids[:-1] if finish == "stop" and token_ids and token_ids[-1] in self.stop_token_ids else token_ids
        reasoning, text = THINK.split(self.codec.decode(ids))
        content, calls = parse_tool_calls(text)
        return Message("assistant", content, mark_cut(calls) if finish == "length" else calls, reasoning=reasoning)

    def assistant(self, message: Message) -> list[int]:
        if message.role != "assistant":
            raise RenderError(f"expected an assistant's message, got one of role {message.role!r}")
        # Without the newline after END, which a policy does not sample: `extend` adds it.
        return self.codec.encode(*_body(message), Markup(END), after=Place.TEXT)


def _turns(messages: Sequence[Message]) -> list[str]:
    """Return the parts of whole turns; adjacent tool results share one user turn."""
    parts: list[str] = []
    for index, message in enumerate(messages):
        if message.role != "tool":
            # Only the frame is markup; content is ordinary text, even if it spells out control tokens.
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
        block = render_tool_calls([call])
        # A call's outer tags are markup; the text between them is not, even if it contains the same tags.
        opens, closes = block.startswith(OPEN), block.endswith(CLOSE) and len(block) >= len(OPEN + CLOSE)
        inner = block[len(OPEN) if opens else 0 : len(block) - len(CLOSE) if closes else len(block)]
        parts += ["\n" if message.content or index else "", Markup(OPEN if opens else ""), inner, Markup(CLOSE if closes else "")]
    return parts


# Named chat templates with tools (`model.chat_template`), for tokenizers whose own template has none. Each uses the turn
# markers of its model family. All only append: no turn is rewritten when messages follow it.

_TURNS = """\
{%- macro begin(role) -%}
BEGIN
{%- endmacro -%}
{%- macro end(role) -%}
END
{%- endmacro -%}
{%- macro call(function) -%}
CALL
{%- endmacro -%}
{%- macro tool_list() -%}
You can call these tools:
{% for tool in tools -%}
{{ tool.function | tojson }}
{% endfor -%}
To call a tool, write its name and its arguments as JSON, in this form:
{{ OPEN ~ call({'name': 'NAME', 'arguments': {'ARGUMENT': 'VALUE'}}) ~ CLOSE }}
{%- endmacro -%}
{{- bos_token if BOS and bos_token else '' -}}
{%- if tools and (not messages or messages[0].role != 'system') -%}
{{ begin('system') }}{{ tool_list() }}{{ end('system') }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
RESULT
{%- else -%}
{{- begin(message.role) -}}
{%- if message.reasoning_content is defined and message.reasoning_content is not none -%}
{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif -%}
{{- message.content or '' -}}
{%- if message.role == 'system' and loop.first and tools -%}
{{ '\\n\\n' if message.content else '' }}{{ tool_list() }}
{%- endif -%}
{%- for one in message.tool_calls or [] -%}
{{ BETWEEN if not loop.first else ('\\n' if message.content else '') ~ OPEN }}{{ call(one.function) }}{{ CLOSE if loop.last }}
{%- endfor -%}
{{- end(message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ begin('assistant') }}
{%- endif -%}
"""
_HERMES = {
    "CALL": r"""{{ '<tool_call>\n{"name": ' ~ function.name | tojson ~ ', "arguments": ' ~ function.arguments | tojson """
    r"""~ '}\n</tool_call>' }}""",
    "BETWEEN": r"'\n'",
    "RESULT": r"""{{- begin('user') if loop.first or loop.previtem.role != 'tool' else '\n' -}}
{{- '<tool_response>\n' ~ message.content ~ '\n</tool_response>' -}}
{{- end('user') if loop.last or loop.nextitem.role != 'tool' else '' -}}""",
    "BOS": "false",
}
_LLAMA = {
    "CALL": """{{ '{"name": ' ~ function.name | tojson ~ ', "parameters": ' ~ function.arguments | tojson ~ '}' }}""",
    "BETWEEN": "'; '",
    "RESULT": "{{- begin('ipython') ~ message.content ~ end('ipython') -}}",
    "BOS": "true",
    "BEGIN": r"{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}",
    "END": "<|eot_id|>",
}


_DEEPSEEK = {
    "CALL": "<｜tool▁call▁begin｜>{{ function.name }}<｜tool▁sep｜>{{ function.arguments | tojson }}<｜tool▁call▁end｜>",
    "BETWEEN": "''",
    "OPEN": "'<｜tool▁calls▁begin｜>'",
    "CLOSE": "'<｜tool▁calls▁end｜>'",
    "RESULT": "{{- '<｜tool▁output▁begin｜>' ~ message.content ~ '<｜tool▁output▁end｜>' -}}",
    "BOS": "true",
    "BEGIN": "{{ {'user': '<｜User｜>', 'assistant': '<｜Assistant｜>'}.get(role, '') }}",
    "END": "{{ '<｜end▁of▁sentence｜>' if role == 'assistant' else '' }}",
}


def _template(**parts: str) -> str:
    parts = {"OPEN": "''", "CLOSE": "''", **parts}
    return re.sub(r"\b[A-Z]{3,}\b", lambda found: parts.get(found[0], found[0]), _TURNS)


CHAT_TEMPLATES = {
    "chatml": CHATML_TEMPLATE,
    "hermes": _template(**_HERMES, BEGIN=r"{{ '<|im_start|>' ~ role ~ '\n' }}", END=r"{{ '<|im_end|>\n' }}"),
    "llama3": _template(**_LLAMA),
    "gemma": _template(
        **_HERMES | {"BOS": "true"},
        BEGIN=r"{{ '<start_of_turn>' ~ {'assistant': 'model', 'system': 'user'}.get(role, role) ~ '\n' }}",
        END=r"{{ '<end_of_turn>\n' }}",
    ),
    "deepseek": _template(**_DEEPSEEK),
    "phi3": _template(**_HERMES, BEGIN=r"{{ '<|' ~ role ~ '|>\n' }}", END=r"{{ '<|end|>\n' }}"),
}
"""Chat templates by their name in `model.chat_template`."""
TURN_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "deepseek": (
        "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
}  # fmt: skip
"""Tokens of each template that the tokenizer must have; marks around tool calls may be ordinary text."""


def chat_template(given: str) -> str:
    """Return the template of `model.chat_template`, a name of `CHAT_TEMPLATES` or a file. Raises ConfigError for others."""
    if given in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[given]
    try:
        text = read_text(Path(given))
    except (OSError, ValueError) as problem:
        known = ", ".join(map(repr, CHAT_TEMPLATES))
        why = did_you_mean(given, CHAT_TEMPLATES, f"and no file can be read there ({problem})")
        raise ConfigError(f"model.chat_template = {given!r}: expected {known} or a file; {why}") from problem
    if not text.strip():
        raise ConfigError(f"model.chat_template = {given!r}: the file is empty. Name a Jinja chat template.")
    return text


def set_chat_template(tokenizer: PreTrainedTokenizerBase, given: str) -> None:
    """Set a tokenizer's chat template. Raises ConfigError for an unknown one, or if the tokenizer lacks its turn tokens."""
    text, tokens = chat_template(given), tokenizer.get_added_vocab()
    missing = [token for token in TURN_TOKENS.get(given, ()) if token not in tokens]
    if missing:
        raise ConfigError(
            f"model.chat_template = {given!r}: the tokenizer has no token {', '.join(map(repr, missing))}. {advice(tokenizer)}."
        )
    tokenizer.chat_template = text


def advice(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fix for an error: the key to set, and the template names whose turn tokens the tokenizer has."""
    tokens = tokenizer.get_added_vocab()
    names = [f'"{name}"' for name, needed in TURN_TOKENS.items() if all(token in tokens for token in needed)]
    fitting = f"{' or '.join(reversed(names))}, whose tokens it has, or to " if names else ""
    return f"set model.chat_template to {fitting}a file of your own (docs/templates.md), or save one with the tokenizer"
