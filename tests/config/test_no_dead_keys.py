"""No knob that does nothing: every config key is read somewhere in the library, outside the schema, and named in a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from agentrl.config import schema
from tests.sources import nodes

PACKAGE = Path(schema.__file__).resolve().parents[2]
SECTIONS = [value for value in vars(schema).values() if isinstance(value, type) and issubclass(value, BaseModel)]
KEYS = [(section.__name__, key) for section in SECTIONS for key in section.model_fields]


@pytest.fixture(scope="module")
def read() -> set[str]:
    """Attribute names that library code outside agentrl/config reads."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if "config" in file.relative_to(PACKAGE).parts[:1]:
            continue
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


@pytest.mark.parametrize(("section", "key"), KEYS, ids=[f"{section}.{key}" for section, key in KEYS])
def test_the_key_is_read(section: str, key: str, read: set[str]) -> None:
    assert key in read, f"{section}.{key} is never read: wire it or remove it"


def test_a_test_names_the_key() -> None:
    words = {word for file in Path(__file__).parents[1].rglob("*.py") for word in re.findall(r"\w+", file.read_text())}
    assert [f"{section}.{key}" for section, key in KEYS if key not in words] == []
