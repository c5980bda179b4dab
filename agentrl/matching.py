"""Patterns of others against what a policy wrote: with a time limit, and never for long on an event loop.

A regular expression may take exponential time on a text that is made for it, and `re` can neither be stopped nor lets another
thread run meanwhile. `regex` can and does. What it reads in another way than `re`, it is given in a form that both read alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import regex

from agentrl.executors import QUICK, TooLongError

AT_ONCE_S = 0.005
"""Seconds of this process's processor time that a match may take on an event loop, which is `regex`'s clock: waiting for the
processor does not count, but what other threads compute meanwhile does."""


def within_seconds(look: Callable[..., Any], text: str, seconds: float) -> Any:
    """`look(text)`, where `look` is a method of a compiled `regex` pattern.

    Raises TimeoutError after `seconds`, TextTooLongError, which is one, for a text of more than `MOST_TEXT` characters, and
    TooLongError if it takes long and is tried at once (`executors.at_once`).
    """
    if len(text) > MOST_TEXT:
        raise TextTooLongError(f"a text of {len(text)} characters, of which no pattern is looked for in more than {MOST_TEXT}")
    hurry = QUICK.get() and seconds > AT_ONCE_S
    if not hurry:
        return look(text, timeout=seconds)
    # Twice: a quick one whose thread stood still while another one computed must not go aside for it, since whether a thread
    # answers decides which requests share an engine's step, hence last digits.
    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            return look(text, timeout=AT_ONCE_S)
    raise TooLongError


MOST_PATTERN = 10_000
"""Characters of a pattern."""
MOST_COPIES = 10_000
"""Parts that a pattern may have, each as often as it must match at least: `regex` writes out that many copies of it."""
MOST_TEXT = 1_000_000
"""Characters of a text that a pattern is looked for in: what groups found is remembered at each of them."""
_TOKEN = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(?:,\d*)?\}|[()]|.", regex.DOTALL)
_RECURSION = regex.compile(r"\(\?(?:R|[+-]?\d+|&\w*|P>\w*)\)")
_BRACKET = regex.compile(r"\\.|\[", regex.DOTALL)
_NAMED = frozenset({r"\p", r"\P", r"\N", r"\x"})
"""Escapes with a name in braces."""
_SPACED = regex.compile(r"\(\?[\w-]*x")


def compile_pattern(pattern: str, flags: int = regex.VERSION0) -> Any:
    """A pattern of `regex`. Raises ValueError, which says why, if it is none, or could cost more than the time limit of its
    match: if it is long, repeats so often that its compiled form fills the memory, or calls itself."""
    if len(pattern) > MOST_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters; at most {MOST_PATTERN} are allowed")
    if _RECURSION.search(pattern):
        raise ValueError(f"{pattern[:80]!r} calls itself, which no time limit ends")
    if (copies := _copies(pattern)) > MOST_COPIES:
        raise ValueError(f"{pattern[:80]!r} repeats a part {copies:.0e} times; at most {MOST_COPIES} are allowed")
    try:
        return regex.compile(_as_re(pattern), flags)
    except (regex.error, RecursionError, OverflowError) as problem:
        raise ValueError(f"{pattern[:80]!r} is not a regular expression: {problem}") from None


def _as_re(pattern: str) -> str:
    """A pattern without what `regex` alone reads: fuzzy matches, as in a{e<=1}, and classes like [:alpha:] within brackets."""
    tokens, before = list[str](), ""
    for token in _TOKEN.finditer(pattern):
        text = token.group()
        if text in ("{", "{}") and before[:2] not in _NAMED:
            text = text.replace("{", "\\{")
        elif text[0] == "[":
            text = "[" + _BRACKET.sub(lambda found: "\\[" if found.group() == "[" else found.group(), text[1:])
        tokens.append(text)
        before = text
    return "".join(tokens)


def _copies(pattern: str) -> float:
    """How many copies its parts are at most, if each repeat is written out as often as it must match."""
    flat = _SPACED.search(pattern) is not None  # comments may hold brackets, so each repeat counts as if nested in all others
    groups, last = [0.0], 0.0
    for token in _TOKEN.finditer(pattern):
        match token.group():
            case "(":
                groups.append(0.0)
                last = 0.0
            case ")":
                last = groups.pop() if len(groups) > 1 else 0.0
                groups[-1] += last
            case _ if token.group(1) is not None:
                times = float(token.group(1) or 0)
                groups[-1] += last * max(times - 1, 0)
                last *= max(times, 1)
                if flat:
                    groups = [max(item, 1) * max(times, 1) for item in groups]
            case _:
                last = 1.0
                groups[-1] += 1
    return sum(groups)


class TextTooLongError(TimeoutError):
    """A text is longer than `MOST_TEXT`, so that no pattern is looked for in it."""
