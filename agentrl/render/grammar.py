"""Grammars of a whole turn, in llguidance's form, for engines that draw only what fits one: JSON of a schema, or tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.trajectory import Json

Mark = Callable[[str], str]
"""How a grammar writes a text of the template's: as the special token that it is in this vocabulary, or as text."""
Rules = tuple[str, str]
"""A symbol, and the rules that it needs."""


def turn_grammar(body: Rules, frame: tuple[str, str], mark: Mark, *, thinking: bool, reasons: bool = True) -> str:
    """A turn that is `body`, after an optional reasoning between the marks of `frame`, or, without `reasons`, after none; if
    `thinking`, the turn begins within the reasoning."""
    opening, closing = map(mark, frame)
    if not reasons:
        lines = [f"start: {f'{closing} SPACE? ' if thinking else ''}{body[0]}", "SPACE: /[ \\n]+/", body[1]]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]})
    # Text never holds special tokens; a mark that is text must be looked for.
    thought = f"thought[suffix={closing}]: TEXT" if closing.startswith('"') else f"thought: TEXT {closing}"
    start = "thought SPACE?" if thinking else f"({opening} thought SPACE?)?"
    lines = [f"start: {start} {body[0]}", thought, "TEXT: /(?s:.*)/", "SPACE: /[ \\n]+/", body[1]]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]})


def either(rules: Sequence[Rules]) -> Rules:
    """One of some symbols."""
    return "turn", "\n".join(["turn: " + " | ".join(symbol for symbol, _ in rules), *(own for _, own in rules)])


def json_rules(schema: Json) -> Rules:
    """JSON that fits a schema."""
    return "answer", f"answer: %json {json.dumps(schema)}"


def hermes_rules(tools: Sequence[Mapping[str, Any]], several: bool, mark: Mark) -> Rules:
    """One call of these tools, or one or more, in the syntax of Hermes and Qwen."""
    more = ' ("\\n" call)*' if several else ""
    call = f'call: {mark("<tool_call>")} "\\n" object "\\n" {mark("</tool_call>")}'
    return "calls", "\n".join([f"calls: call{more}", call, *object_rules(tools, "arguments")])


def llama_rules(tools: Sequence[Mapping[str, Any]], several: bool, mark: Mark) -> Rules:
    """The same in the syntax of Llama 3."""
    more = ' ("; " object)*' if several else ""
    return "calls", "\n".join([f"calls: object{more}", *object_rules(tools, "parameters")])


def object_rules(tools: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """The rules of `object`: a tool's name and, under `key`, arguments that fit its schema. Each schema is a rule of its own,
    so that its references start at its own root."""
    rules = ["object: " + " | ".join(f"object_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": ')
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        rules += [f'object_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: %json {json.dumps(schema)}"]
    return rules
