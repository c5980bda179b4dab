"""Long texts in every tool-call syntax that are expensive to parse: part of a call, then one string repeated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BLANKS = (" ", "\n", "a", "é", "\\", '"', "'", "{", "[", "(", "9", ",", "]", "}", "\ue000", "🙂", '{"a":', "[{},", "-", "e9", "<")
"""Strings to repeat in every syntax, in addition to the parts of its calls."""

PARTS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "\n", '{"name": "f", "arguments": ', '{"k": ', '"v"', "}", "}", "\n", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "\n", "<function=", "f", ">", "<parameter=", "k", ">", "\n", "v", "\n", "</parameter>",
        "</function>", "\n", "</tool_call>"),
    "glm": ("<tool_call>", "f", "\n", "<arg_key>", "k", "</arg_key>", "\n", "<arg_value>", "v", "</arg_value>", "\n",
        "</tool_call>"),
    "llama_json": ("<|python_start|>", "p", "<|python_end|>", "<|python_tag|>", '{"name": "f", "parameters": ', "{}", "}", ";",
        " "),
    "mistral": ("[TOOL_CALLS]", "f", "[CALL_ID]", "abc", "[ARGS]", "{", '"k": 1', "}", " "),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "f", "\n",
        "```json\n", '{"k": 1}', "\n", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_dsml": ("<｜DSML｜function_calls>", "\n", '<｜DSML｜invoke name="', "f", '">', "\n",
        '<｜DSML｜parameter name="', "k", '" string="true">', "v", "</｜DSML｜parameter>", "\n",
        "</｜DSML｜invoke>", "\n", "</｜DSML｜function_calls>"),
    "granite": ("<|tool_call|>", "[", '{"name": "f", "arguments": {}}', ", ", "]", " "),
    "phi": ("<|tool_call|>", "[", '{"name": "f", "arguments": {}}', ", ", "]", "\n", "<|/tool_call|>"),
    "gemma": ("<|tool_call>", "call:", "f", "{", "k", ":", '<|"|>', "v", '<|"|>', ",", "k2", ":", "1", "}", "<tool_call|>"),
    "function_gemma": ("<start_function_call>", "call:", "f", "{", "k", ":", "<escape>", "v", "<escape>", ",", "k2", ":", "1",
        "}", "<end_function_call>"),
    "pythonic": ("[", "f", "(", "k=", "'v'", ", ", "j=", "-1", ")", ", ", "]"),
    "lfm2": ("<|tool_call_start|>", "[", "f", "(", "k=", "'v'", ")", ", ", "]", "<|tool_call_end|>"),
    "olmo": ("<function_calls>", "\n", "f", "(", "k=", "'v'", ")", "\n", "</function_calls>"),
    "harmony": ("<|start|>", "assistant", "<|channel|>", "commentary", " ", "to=functions.f", " ", "<|constrain|>json",
        "<|message|>", "{}", "<|call|>", "<|end|>"),
}  # fmt: skip
"""A call of each syntax, split at the decisions of a parser."""


@dataclass(frozen=True)
class Shape:
    """A text: `before`, repeated `again`, `after`."""

    before: str
    again: str
    after: str

    def text(self, size: int) -> str:
        """Return the text with about `size` bytes in UTF-8."""
        times = max(1, (size - len((self.before + self.after).encode())) // len(self.again.encode()))
        return self.before + self.again * times + self.after

    def __str__(self) -> str:
        return f"{self.before!r} + {self.again!r} * N + {self.after!r}"


def shapes(syntax: str) -> Iterator[Shape]:
    """Yield the shapes of a syntax. After each prefix of a call, repeat each of its parts, each of `BLANKS`, or the prefix; with
    and without the rest of the call after them."""
    parts = PARTS[syntax]
    seen: set[tuple[str, str, str]] = set()
    for cut in range(len(parts) + 1):
        before, rest = "".join(parts[:cut]), "".join(parts[cut:])
        spans = ["".join(parts[begin:end]) for end in (cut, len(parts)) for begin in range(end)]
        for again in dict.fromkeys((*BLANKS, *parts, *spans)):
            for after in ("", rest):
                if (before, again, after) not in seen:
                    seen.add((before, again, after))
                    yield Shape(before, again, after)
