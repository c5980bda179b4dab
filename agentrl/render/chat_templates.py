"""Chat templates with tools, by name, for tokenizers whose own template has none (`model.chat_template`).

Each keeps the turn markers of its model family, and adds a list of tools to the system message, tool calls in a syntax of
`render/parsers`, and tool results. All of them only append: no turn is rewritten when messages follow it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError, did_you_mean
from agentrl.files import read_text
from agentrl.render.chatml import CHATML_TEMPLATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
"""The templates that `model.chat_template` knows by name."""
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
"""The tokens of each that the tokenizer must have; what stands around tool calls may be ordinary text."""


def chat_template(given: str) -> str:
    """The text of `model.chat_template`: a name of `CHAT_TEMPLATES`, or else a file. Raises ConfigError."""
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
    """Give the tokenizer the template `given`. Raises ConfigError for an unknown one, or for turn tokens that it lacks."""
    text, tokens = chat_template(given), tokenizer.get_added_vocab()
    missing = [token for token in TURN_TOKENS.get(given, ()) if token not in tokens]
    if missing:
        raise ConfigError(
            f"model.chat_template = {given!r}: the tokenizer has no token {', '.join(map(repr, missing))}. {advice(tokenizer)}."
        )
    tokenizer.chat_template = text


def advice(tokenizer: PreTrainedTokenizerBase) -> str:
    """The end of an error: the key to set, and the names whose turn tokens the tokenizer has."""
    tokens = tokenizer.get_added_vocab()
    names = [f'"{name}"' for name, needed in TURN_TOKENS.items() if all(token in tokens for token in needed)]
    fitting = f"{' or '.join(reversed(names))}, whose tokens it has, or to " if names else ""
    return f"set model.chat_template to {fitting}a file of your own (docs/templates.md), or save one with the tokenizer"
