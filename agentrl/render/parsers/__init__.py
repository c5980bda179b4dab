"""Tool-call syntaxes, one file each, and which of them a chat template writes.

Every parser takes the text of a turn, returns (prose, calls) like `parse_tool_calls`, and never raises: text that
cannot be parsed is kept verbatim in a call with `error` set.
"""

from __future__ import annotations

from agentrl.render.grammar import hermes_rules
from agentrl.render.parsers.deepseek import DEEPSEEK, DSML, parse_deepseek, parse_dsml
from agentrl.render.parsers.gemma import FUNCTION_GEMMA, GEMMA
from agentrl.render.parsers.glm import GLM, parse_glm
from agentrl.render.parsers.harmony import HARMONY, parse_harmony
from agentrl.render.parsers.listed import GRANITE, PHI, parse_listed
from agentrl.render.parsers.llama_json import LLAMA_JSON, parse_llama_json
from agentrl.render.parsers.mistral import MISTRAL, parse_mistral
from agentrl.render.parsers.pythonic import LFM2, OLMO, PYTHONIC, parse_pythonic
from agentrl.render.parsers.qwen_xml import QWEN_XML, parse_qwen_xml
from agentrl.render.parsers.syntax import ForTools, Parsed, Parser, Syntax
from agentrl.render.toolcalls import CLOSE, OPEN, parse_tool_calls, render_tool_calls

__all__ = [
    "PARSERS", "SYNTAXES", "ForTools", "Parsed", "Parser", "Syntax", "parse_deepseek", "parse_dsml", "parse_glm",
    "parse_harmony", "parse_listed", "parse_llama_json", "parse_mistral", "parse_pythonic", "parse_qwen_xml", "syntax_asked",
    "syntax_of",
]  # fmt: skip

HERMES = Syntax(
    "hermes",
    parse_tool_calls,
    seen=lambda call: OPEN in call and '"name"' in call and CLOSE in call,
    write=render_tool_calls,
    opens=(OPEN, CLOSE),
    close=CLOSE,
    grammar=hermes_rules,
)

# In the order in which they are recognized: those that contain another one's marks come before it.
SYNTAXES: dict[str, Syntax] = {
    syntax.name: syntax
    for syntax in (
        HARMONY, DSML, DEEPSEEK, GEMMA, FUNCTION_GEMMA, LFM2, QWEN_XML, GLM, MISTRAL, PHI, GRANITE, HERMES, LLAMA_JSON, OLMO,
        PYTHONIC,
    )
}  # fmt: skip
PARSERS: dict[str, Parser | ForTools] = {name: syntax.parser for name, syntax in SYNTAXES.items()}


def syntax_of(rendered_call: str) -> Syntax | None:
    """The syntax of a template, recognized from a call that it rendered; None if it is none of these."""
    return next((syntax for syntax in SYNTAXES.values() if syntax.seen(rendered_call)), None)


def syntax_asked(prompt: str) -> Syntax | None:
    """The syntax that the prompt of a template asks for, if the template leaves the calls to a turn's content."""
    return next((syntax for syntax in SYNTAXES.values() if syntax.asked(prompt)), None)
