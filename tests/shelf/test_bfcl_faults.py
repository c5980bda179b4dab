"""The first fault of a BFCL episode, as `benchmarks/bfcl_faults.py` counts it."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.utils.search_path import load_module

faults = load_module(Path(__file__).resolve().parents[2] / "benchmarks" / "bfcl_faults.py")
PAY = {"name": "pay", "parameters": {"properties": {"sum": {"type": "float"}, "to": {"type": "string"}}, "required": ["sum"]}}
GOLD = [{"pay": {"sum": [3.5, 4.0], "to": ["", "Ann"]}}, {"pay": {"sum": [9.0], "to": ["Bob"]}}]
BOB = ("pay", {"sum": 9.0, "to": "bob"})


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ([], "no call"), ([BOB], "too few calls"), ([BOB] * 3, "too many calls"), ([BOB, ("", None)], "malformed call"),
        ([BOB, ("send", {"sum": 4})], "wrong function"), ([BOB, ("pay", {})], "missing argument"),
        ([BOB, ("pay", {"sum": 4, "on": 1})], "invented argument"), ([BOB, ("pay", {"sum": "4"})], "wrong type"),
        ([BOB, ("pay", {"sum": 5})], "wrong value"), ([BOB, BOB], "wrong value"), ([BOB, ("pay", {"sum": 4})], "other"),
    ],
)  # fmt: skip
def test_the_first_fault_of_an_episode(calls: list[tuple[str, Any]], fault: str) -> None:
    made = [{"name": name, "arguments": given, "error": None if name else "not JSON"} for name, given in calls]
    row = {
        "task": {"data": {"category": "parallel", "functions": [PAY]}, "gold": {"calls": GOLD}},
        "messages": [{"role": "user", "tool_calls": []}, {"role": "assistant", "tool_calls": made}],
    }
    assert faults.first_fault(row) == fault


def test_the_table_joins_runs_by_category() -> None:
    runs = [{"parallel": {"a": (False, True), "b": (True, True)}, "irrelevance": {"c": (True, False)}},
            {"parallel": {"a": (False, True)}, "irrelevance": {"c": (False, False)}}]  # fmt: skip
    lines = faults.table(runs, {"a": {"success": True}, "b": {"success": False}}).splitlines()[2:]
    assert [line.split(" | ")[:6] for line in lines] == [
        ["| irrelevance", "1", "", "0.500", "0.000", "-0.500"],
        ["| parallel", "2", "0.500", "0.250", "1.000", "+0.750"],
        ["| all", "3", "0.500", "0.333", "0.583", "+0.250"],
    ]
    assert lines[0].endswith("| -1.000 to +0.000 |")
