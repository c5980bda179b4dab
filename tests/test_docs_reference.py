"""The reference pages, built from the code, have every command, key and registered name."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.cli.main import COMMANDS
from agentrl.config.keys import all_keys
from agentrl.trainer.algorithms.advantages import ADVANTAGES

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """.ci/reference.py"""
    spec = importlib.util.spec_from_file_location("reference", ROOT / ".ci" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_have_every_command_with_its_arguments_and_every_estimator_with_its_own(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", os.environ.get("COLUMNS", "80"))  # the page of commands sets its own
    reference.write(tmp_path)
    commands, keys, names = ((tmp_path / page).read_text() for page in ("cli.md", "config_keys.md", "registered_names.md"))
    last = {key.name.rpartition(".")[2] for key in all_keys() if not key.section}
    assert [name for name in last if name.isidentifier() and f"{name}`" not in keys] == []
    assert [name for name in COMMANDS if f"\n## agentrl {name.replace('_', '-')}\n" not in commands] == []
    assert "\n### agentrl reward lint\n" in commands and "| `--resume RUN` | continue the run in this folder |" in commands
    assert [name for name in ADVANTAGES if f"| `{name}` |" not in names] == []
    row = next(line for line in names.splitlines() if line.startswith("| `ppo_clip` |"))
    assert "`clip_low: Clip = 0.2`<br>`clip_high: Clip = 0.2`<br>`dual_clip: DualClip \\| None = 3.0`" in row


def test_the_table_of_floors_is_what_its_record_says() -> None:
    spec = importlib.util.spec_from_file_location("floors", ROOT / ".ci" / "floors.py")
    assert spec is not None and spec.loader is not None
    floors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(floors)
    share = {"paid": 2, "low": 0.07, "high": 0.59}
    idle = {"mean": 0.25, "unscored": 1, **share, "families": {"a": [2, 4]}, "ids": ["t1", "t2"], "official": []}
    one = {"name": "x", "date": "2026-01-02", "version": "1.0", "split": "all", "tasks": 8, "every": True, "any": share}
    one |= {"agents": {"idle": idle}}
    text = floors.page([one])
    assert "| x | 1.0, 2026-01-02 | 8 | 0.250; 2 (7.0 to 59.0 %), 1 unscored | 2 (7.0 to 59.0 %) |" in text
    assert "- x, idle: a 2 of 4: `t1`, `t2`" in text
    idle["official"] = [{"name": "a", "value": 0.5}, {"name": "overall", "value": 0.125}]
    assert "unscored; overall 0.125 |" in floors.page([one])


def test_a_class_is_shown_with_its_methods_and_without_what_is_private(reference: ModuleType) -> None:
    class Shop:
        """Sells things."""

        def buy(self, name: str, *, count: int = 1) -> list[str]:
            """Buy `count` of a thing."""
            return [name] * count

        def _till(self) -> None:
            """Not for customers."""

    text = reference._object("shop", "Shop", Shop)
    assert text.startswith("\n### shop.Shop\n") and "Sells things." in text
    assert "`buy(name: str, *, count: int = 1) -> list[str]`\n\nBuy `count` of a thing." in text and "_till" not in text
