"""The list of known faults fits the code; `make faults` tries whether the tests see them."""

import ast
from pathlib import Path

import pytest

from agentrl.utils.search_path import load_module

CI = Path(__file__).resolve().parents[1] / ".ci"


def test_every_known_fault_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red here: a line was rewritten that tests/faults.toml knows. Change `old` and `new` there to fit it."""
    monkeypatch.syspath_prepend(str(CI))
    found = load_module(CI / "faults.py").faults()
    assert len(found) >= 40
    assert len({fault.name for fault in found}) == len(found)
    assert all(fault.old != fault.new for fault in found)
    for fault in found:  # one that does not even parse would be seen by any test that imports it
        if fault.file.endswith(".py"):
            ast.parse(fault.changed((CI.parent / fault.file).read_text()), fault.name)
