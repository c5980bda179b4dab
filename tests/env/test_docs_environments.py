"""The code blocks of docs/environments.md run, in order, as one program."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    page = types.ModuleType("docs_environments")
    # A tool's annotations are resolved in its module, so the page needs to be one.
    monkeypatch.setitem(__import__("sys").modules, page.__name__, page)
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), vars(page))
