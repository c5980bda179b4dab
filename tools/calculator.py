"""Arithmetic without eval: + - * / // % **, brackets, and a few functions."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from agentrl.env import tool
from agentrl.utils.errors import ToolError
from agentrl.utils.parsing import expression_of

Number = int | float

_BINARY: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_DIGITS = 300


def _round(value: Number, digits: int | None = None) -> Number:
    # round(5, -n) computes 10**n
    if digits is not None and abs(digits) > _MAX_DIGITS:
        raise ValueError(f"round: more than {_MAX_DIGITS} digits")
    return round(value, digits)


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "log": math.log, "exp": math.exp,
}  # fmt: skip


@tool(inline=True, read_only=True)
def calculate(expression: str) -> int | float:
    """Work out an arithmetic expression, for example (3 + 4) * 2 ** 0.5.

    Args:
        expression: numbers, + - * / // % **, brackets, and abs, round, min, max, sqrt, log, exp
    """
    if len(expression) > 1000:
        raise ToolError("the expression is longer than 1000 characters")
    try:
        value = _value(expression_of(expression.strip()))
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError) as problem:
        raise ToolError(f"cannot work that out: {problem}") from problem
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError(f"the result is {value}")
    return value


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _FUNCTIONS:
            return _bounded(_FUNCTIONS[node.func.id](*(_value(argument) for argument in node.args)))
        raise ValueError(f"no function {node.func.id!r}; there are {', '.join(_FUNCTIONS)}")
    raise ValueError("only numbers, + - * / // % **, brackets and simple functions are allowed")


def _power(base: Number, exponent: Number) -> Number:
    # Python's integers are unbounded, so refuse before computing.
    digits = abs(exponent) * math.log10(max(abs(base), 1))
    if digits > _MAX_DIGITS:
        raise ValueError("the result is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return float(value) if isinstance(value, float) else int(value)


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and abs(value) > 10**_MAX_DIGITS:
        raise ValueError("the result is too large")
    return value
