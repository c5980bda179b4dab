"""Content files: what they declare, read without running them, and loading one by its place.

A file of a shelf is not importable by name. It is loaded under a private module name made from its path,
so two shelves may hold files of the same name; files beside an `env.py` are reached by relative import.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from agentrl.errors import CatalogError
from agentrl.tool import Tool

SHIPPED = "AGENTRL_SHIPPED"
"""Set on the workers of a cluster: the driver's folders whose shelves were copied to AGENTRL_PATH, in order."""


def here(path: str) -> Path:
    """Where a file that the driver names lies in this process: in the shipped copy of its shelf, where there
    is one, else under the very path."""
    copies = os.environ.get("AGENTRL_PATH", "").split(os.pathsep)
    for root, copy in zip(os.environ.get(SHIPPED, "").split(os.pathsep), copies, strict=False):
        if root and Path(path).is_relative_to(root):
            return Path(copy).resolve() / Path(path).relative_to(root)
    return Path(path)


@dataclass(frozen=True, slots=True)
class Declared:
    """The constants of an environment class: `id = "Namespace/Name-v0"`, `reward`, `summary`."""

    class_name: str
    id: str
    reward: str | None
    summary: str


def read_declarations(path: Path) -> list[Declared]:
    """Every class in the file that sets `id` to a text. Raises CatalogError where it is not Python."""
    stat = path.stat()
    return list(_declarations(path, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=1024)
def _declarations(path: Path, modified: int, size: int) -> tuple[Declared, ...]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as problem:
        raise CatalogError(f"{path}: not a Python file: {problem}") from problem
    found: list[Declared] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            texts = _texts(node)
            if texts.get("id"):
                found.append(Declared(node.name, texts["id"], texts.get("reward"), texts.get("summary", "")))
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


def load_module(path: Path) -> types.ModuleType:
    """The module of a content file, loaded once a process. Raises CatalogError with the cause."""
    path = path.resolve()
    package = "_agentrl_shelf_" + blake2b(str(path.parent).encode(), digest_size=6).hexdigest()
    if package not in sys.modules:
        parent = types.ModuleType(package)
        parent.__path__ = [str(path.parent)]
        sys.modules[package] = parent
    name = f"{package}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CatalogError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise CatalogError(f"{path} does not load: {type(problem).__name__}: {problem}") from problem
    return module


def load_tools(path: Path) -> list[Tool]:
    """The tools that a content file defines, in order. Raises CatalogError where there are none."""
    tools = [value for value in vars(load_module(path)).values() if isinstance(value, Tool)]
    if not tools:
        raise CatalogError(f"{path}: no function is marked with @tool")
    return tools


def load_class(path: Path, class_name: str) -> object:
    """A name of a content file. Raises CatalogError where the file does not load or lacks it."""
    module = load_module(path)
    if class_name not in vars(module):
        raise CatalogError(f"{path}: no class {class_name!r}")
    return vars(module)[class_name]
