"""The list of known faults fits the code; `make faults` tries whether the tests see them."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[1] / ".ci"


def test_every_known_fault_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red here: a line was rewritten that tests/faults.toml knows. Change `old` and `new` there to fit it."""
    monkeypatch.syspath_prepend(str(CI))
    spec = importlib.util.spec_from_file_location("agentrl_faults", CI / "faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "agentrl_faults", module)
    spec.loader.exec_module(module)
    found = module.faults()
    assert len(found) >= 40
    assert len({fault.name for fault in found}) == len(found)
    assert all(fault.old != fault.new for fault in found)
    for fault in found:  # one that does not even parse would be seen by any test that imports it
        if fault.file.endswith(".py"):
            ast.parse(fault.changed((CI.parent / fault.file).read_text()), fault.name)
