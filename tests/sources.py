"""Python files as trees, for tests that read code. One process plays them all (SOURCES in conftest.py): a file is parsed once."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.utils.registry import CONTRIB, Registry


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> list[ast.AST]:
    """All nodes of a file, from the top."""
    return list(ast.walk(tree(file)))


def core_names(registry: Registry[Any]) -> list[str]:
    """The names that the core registers itself."""
    return [entry.name for entry in registry.own() if not entry.make.__module__.startswith(CONTRIB)]
