"""Content files: what they declare, read without running them, and the contents of a loaded one."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agentrl.errors import CatalogError
from agentrl.files import read_text
from agentrl.python_source import module_of
from agentrl.shelves import load_module
from agentrl.tool import Tool, ToolSet


@dataclass(frozen=True, slots=True)
class Declared:
    """The constants of an environment class: `id = "Namespace/Name-v0"`, `reward`, `summary`; of a suite (agentrl/env/suite.py)
    also `suite`, `module` and `own`."""

    class_name: str
    id: str
    reward: str | None
    summary: str
    suite: str | None = None
    module: str | None = None
    own: str | None = None


def read_declarations(path: Path) -> list[Declared]:
    """Every class in the file that sets `id` to a string. Raises CatalogError if the file is not Python."""
    stat = path.stat()
    return list(_declarations(path, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=1024)
def _declarations(path: Path, modified: int, size: int) -> tuple[Declared, ...]:
    try:
        tree = module_of(read_text(path))
    except (SyntaxError, ValueError) as problem:
        raise CatalogError(f"{path}: not a Python file: {problem}") from problem
    found: list[Declared] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            texts = _texts(node)
            if texts.get("id"):
                suite = (texts.get("suite"), texts.get("module"), texts.get("own"))
                found.append(Declared(node.name, texts["id"], texts.get("reward"), texts.get("summary", ""), *suite))
    return tuple(found)


def _texts(node: ast.ClassDef) -> dict[str, str]:
    texts: dict[str, str] = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            name, value = statement.target.id, statement.value
        else:
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts[name] = value.value
    return texts


def load_tools(path: Path) -> list[Tool]:
    """The tools that a content file defines, in order. Raises CatalogError if there are none."""
    tools = [value for value in vars(load_module(path)).values() if isinstance(value, Tool)]
    if not tools:
        raise CatalogError(f"{path}: no function is marked with @tool, and no class is a ToolSet")
    return tools


def load_set(path: Path) -> type[ToolSet] | None:
    """The ToolSet that a content file defines, if its tools have a state. Raises CatalogError if it defines two, or one without a
    name."""
    module = load_module(path)
    own = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, ToolSet)]
    # A set that builds on another one imports that, which is then in its module too.
    found = [item for item in own if item.__module__ == module.__name__]
    if len(found) > 1 or (found and not found[0].name):
        raise CatalogError(f"{path}: expected one ToolSet with a `name`, found {', '.join(item.__name__ for item in found)}")
    return found[0] if found else None


def load_class(path: Path, class_name: str) -> object:
    """A class of a content file. Raises CatalogError if the file does not load or does not have it."""
    module = load_module(path)
    if class_name not in vars(module):
        raise CatalogError(f"{path}: no class {class_name!r}")
    return vars(module)[class_name]
