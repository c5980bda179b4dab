"""Python files as trees, for tests that read code. One process plays them all (SOURCES in conftest.py): a file is parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> list[ast.AST]:
    """All nodes of a file, from the top."""
    return list(ast.walk(tree(file)))
