"""Chat templates in the shapes of public model families; the texts are the tests' own."""

# ruff: noqa: E501

from functools import cache

from agentrl.render import make_renderer
from agentrl.render.chatml import CHATML_TEMPLATE
from tests.render.render_tokenizers import CONTROL_TOKENS, SENTENCEPIECE, build_sentencepiece, build_tokenizer

# A turn's calls and its end, and the results of tools up to the next turn, as all of Qwen's write them.
CALLS = """
{%- for call in m.tool_calls or [] %}
{{- ('\\n' if m.content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}"""
ANSWERS = """
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.previtem and loop.previtem.role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN25 = (
    """
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') + '\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role in ['user', 'system'] %}
{%- if not (m.role == 'system' and loop.first and tools) %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content }}"""
    + CALLS
    + ANSWERS
)

# Reasoning of a turn stays while tools answer and goes once the user speaks again.
QWEN3 = (
    """
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + '\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}"""
    + CALLS
    + ANSWERS
)

QWEN3_CODER = (
    """
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools %}<tools>{% for tool in tools %}<function>{{ tool.function | tojson }}</function>{% endfor %}</tools>{% endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + (m.content | trim) }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}"""
    + ANSWERS
)

# Trims contents, writes results as JSON strings, allows one call a turn.
LLAMA3 = """{{ bos_token }}
{%- set head = '<|start_header_id|>' %}{% set tail = '<|end_header_id|>\\n\\n' %}
{{- head + 'system' + tail }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}
{{- head + 'assistant' + tail }}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'tool' %}{{ head + 'ipython' + tail + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.role == 'user' and loop.first and tools %}{{ head + 'user' + tail }}{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ m.content | trim }}<|eot_id|>
{%- else %}{{ head + m.role + tail + (m.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head + 'assistant' + tail }}{% endif %}"""

# Control tokens without a newline, calls and results as JSON arrays, ids of nine characters.
MISTRAL = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'user' %}
{%- if tools and loop.index0 <= 1 %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{{ '' if loop.last else ', ' }}
{%- endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

GRANITE = """{% for m in messages %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

IM = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# name: (template, control tokens, bos, eos, tools?, system turn?, calls a turn)
FAMILIES = {
    "qwen2.5": (QWEN25, IM, None, "<|im_end|>", True, True, 2),
    "qwen3": (QWEN3, [*IM, "<think>", "</think>"], None, "<|im_end|>", True, True, 2),
    "qwen3-coder": (QWEN3_CODER, IM, None, "<|im_end|>", True, True, 2),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
               "<|begin_of_text|>", "<|eot_id|>", True, True, 1),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                          "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], "<s>", "</s>", True, True, 2),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>", False, False, 0),
    "phi": (PHI, ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], None, "<|end|>", False, True, 0),
    "deepseek": (DEEPSEEK, ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
                 "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", False, True, 0),
    "granite": (GRANITE, ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"], None, "<|end_of_text|>", False, True, 0),
    "chatml": (CHATML_TEMPLATE, CONTROL_TOKENS, None, "<|im_end|>", True, True, 2),
    "chatml, tags of ordinary text": (CHATML_TEMPLATE, CONTROL_TOKENS[:2], None, "<|im_end|>", True, True, 2),
}  # fmt: skip
PIECES = [*(f"mistral/{kind}" for kind in SENTENCEPIECE), "qwen2.5/first", "llama3/prepend"]
"""The same over tokenizers in the manner of sentencepiece: spaces as letters, a space put before a text, bytes for unknown
characters, control tokens inside the model's own vocabulary."""


@cache
def family_of(name):
    """Tokenizer, renderer, and what of FAMILIES' row follows the tokens."""
    family, _, kind = name.partition("/")
    template, tokens, bos, eos, *abilities = FAMILIES[family]
    ends = {"bos": bos, "eos": eos}
    tokenizer = build_sentencepiece(kind, tokens, template, **ends) if kind else build_tokenizer(tokens, template, **ends)
    return tokenizer, make_renderer(tokenizer), *abilities
