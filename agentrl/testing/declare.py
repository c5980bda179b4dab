"""What a test file says of itself without being imported: the cards that it needs, its time limit, the names of its tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError, hinted
from agentrl.python_source import module_of

HOW = "write it once, at the top level of the file, as `pytestmark = pytest.mark.gpus(2)`"


@dataclass(frozen=True)
class Declaration:
    """`gpus`: cards needed, 0 without a mark. `timeout`: seconds for the whole file, None: the run's. `tests`: its functions
    and methods called `test*`, as pytest names them, without parameters."""

    gpus: int = 0
    timeout: float | None = None
    tests: tuple[str, ...] = ()


def declared(path: Path, shown: str | None = None) -> Declaration:
    """Read the mark `gpus` of a file: `pytestmark = pytest.mark.gpus(N)`, also in a list or tuple of marks. N is a whole number
    or the name of one that the file assigns at its top level.

    Raises ConfigError with file (`shown`, by default the path) and line if the file is no Python, if the mark is anywhere else,
    twice, or has an argument that cannot be read.
    """
    shown = shown or str(path)
    try:
        tree = module_of(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{shown}{f':{line}' if line else ''}: this is no Python: {error.args[0]}") from error
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror}") from error
    marks = [
        mark for value in _pytestmarks(tree) for mark in (value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value])
    ]
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and _is_mark(mark.func)]
    readable = {id(call.func) for call in calls}
    for node in ast.walk(tree):
        if _is_mark(node) and id(node) not in readable:
            raise ConfigError(f"{shown}:{node.lineno}: cards are given to a file, and this mark gpus cannot be read: {HOW}")  # type: ignore[attr-defined]
    if len(calls) > 1:
        raise ConfigError(f"{shown}:{calls[1].lineno}: a second mark gpus (the first: line {calls[0].lineno}): {HOW}")
    gpus, timeout = _arguments(calls[0], _constants(tree), shown) if calls else (0, None)
    return Declaration(gpus, timeout, tuple(_tests(tree)))


def listed_tests(path: Path) -> tuple[str, ...]:
    """The names of a file's tests, as in `Declaration.tests`, whatever its marks are; none if it is no Python."""
    try:
        return tuple(_tests(module_of(path.read_bytes())))
    except (SyntaxError, ValueError, OSError):
        return ()


def _pytestmarks(tree: ast.Module) -> Iterator[ast.expr]:
    """What the file assigns to `pytestmark` at its top level."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            if node.value is not None:
                yield node.value


def _is_mark(node: ast.AST) -> bool:
    """Whether it is `pytest.mark.gpus` or `mark.gpus`."""
    if not isinstance(node, ast.Attribute) or node.attr != "gpus":
        return False
    above = node.value
    return (isinstance(above, ast.Attribute) and above.attr == "mark") or (isinstance(above, ast.Name) and above.id == "mark")


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the file assigns exactly once at its top level."""
    found: dict[str, list[ast.expr]] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                found.setdefault(target.id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _arguments(call: ast.Call, constants: dict[str, ast.expr], shown: str) -> tuple[int, float | None]:
    """The cards and the time limit of a mark."""
    at = f"{shown}:{call.lineno}"
    given: dict[str, ast.expr] = {"count": call.args[0]} if call.args else {}
    if len(call.args) > 1:
        raise ConfigError(f"{at}: gpus takes one number of cards, and `timeout=SECONDS`")
    for keyword in call.keywords:
        if keyword.arg not in ("count", "timeout") or keyword.arg in given:
            raise ConfigError(f"{at}: gpus has no argument {keyword.arg!r}{hinted(keyword.arg, ['count', 'timeout'])}")
        given[keyword.arg] = keyword.value
    if "count" not in given:
        raise ConfigError(f"{at}: gpus needs a number of cards: {HOW}")
    count = _number(given["count"], constants, at)
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"{at}: gpus needs a whole number of cards, 0 or more, not {count!r}")
    timeout = _number(given["timeout"], constants, at) if "timeout" in given else None
    if timeout is not None and timeout <= 0:
        raise ConfigError(f"{at}: timeout needs seconds, more than 0, not {timeout!r}")
    return count, timeout


def _number(value: ast.expr, constants: dict[str, ast.expr], at: str) -> float:
    source = constants.get(value.id, value) if isinstance(value, ast.Name) else value
    try:
        found = ast.literal_eval(source)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        found = None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        told = f"{ast.unparse(value)!r} cannot be read as a number without importing the file"
        raise ConfigError(
            f"{at}: {told}: write the number, as in `pytest.mark.gpus(2)`, or the name of one assigned once in this file"
        )
    return found


def _tests(tree: ast.Module) -> Iterator[str]:
    """The names of its tests, as far as they can be seen."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name.startswith("test"):
                    yield f"{node.name}::{inner.name}"
