"""Python's source as trees, in many threads at once."""

from __future__ import annotations

import ast
import threading
from typing import Literal

from agentrl.executors import fork_safe

_LOCK = fork_safe(threading.RLock())
_WRONG = "recursion depth mismatch"
_TIMES = 8


def module_of(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """`ast.parse(source)`. Raises SyntaxError, ValueError, RecursionError and MemoryError as it does."""
    found = _tree(source, filename, "exec")
    assert isinstance(found, ast.Module)
    return found


def expression_of(text: str) -> ast.expr:
    """The one expression that a text is. Raises as `module_of`."""
    found = _tree(text, "<unknown>", "eval")
    assert isinstance(found, ast.Expression)
    return found.body


def _tree(source: str | bytes, filename: str, mode: Literal["exec", "eval"]) -> ast.AST:
    """Python 3.11 counts how deep a tree is in a place that all its threads share: a parse within another (in another thread, or
    in what the garbage collector calls) ends the outer one with a SystemError, whatever the source is (CPython issue 106905).
    The lock keeps agentrl's own threads apart; others' are rare enough that a further try is alone."""
    for left in reversed(range(_TIMES)):
        try:
            with _LOCK:
                return ast.parse(source, filename, mode)
        except SystemError as problem:
            if not left or _WRONG not in str(problem):
                raise
    raise AssertionError
