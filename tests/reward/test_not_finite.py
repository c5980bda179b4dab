"""A reward that is no finite number is no reward: the episode is unscored, with the cause, and is in no group's baseline."""

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.data.trajectory import Message, Task, ToolCall, Trajectory, Turn
from agentrl.reward import Context, compile_spec
from agentrl.run.reader import episode_of
from agentrl.utils.errors import AgentrlError
from tests.reward.reward_episodes import episode, leaf, spec

LEAF = """
from agentrl.reward.leaf import LEAVES, Leaf, Reading, object_schema
from decimal import Decimal
from fractions import Fraction
import numpy as np

@LEAVES.register("planted.leaf")
class Planted(Leaf):
    kind, formula, example, scopes = "planted.leaf", "what it is told", {"value": 1}, ("episode",)
    schema = object_schema({"value": {}}, ("value",))

    def read(self, view, args):
        if "(" in str(args["value"]):
            return Reading(value := eval(args["value"]), {"value": value})
        if args["value"] == "raise":
            raise KeyError("no such thing")
        return Reading(float(args["value"]) if isinstance(args["value"], str) else args["value"], None)
"""


NAMES = {"np": np, "Decimal": Decimal, "Fraction": Fraction}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "planted.py").write_text(LEAF)
    monkeypatch.chdir(tmp_path)


def planted_leaf(value: Any) -> dict[str, Any]:
    return leaf("planted.leaf", {"value": value})


async def value_of(root: dict[str, Any]) -> tuple[float | None, str]:
    score = await compile_spec(spec(root)).ascore(episode())
    return score.value, json.dumps(score.evidence)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
async def test_of_a_plug_in_leaf_alone_and_among_others(planted: None, value: str) -> None:
    bad, half = planted_leaf(value), planted_leaf(0.5)
    for root in (bad, {"op": "sum", "of": [half, bad]}, {"op": "max", "of": [bad, half]}):
        found, evidence = await value_of(root)
        assert found is None and "not a finite number" in evidence
        assert "NaN" not in evidence and "Infinity" not in evidence, "stored evidence is strict JSON"
    skipped = {"op": "sum", "of": [half, {**bad, "missing": "skip"}]}
    assert (await value_of(skipped))[0] == 0.5, "as the spec asks"


@pytest.mark.parametrize(("value", "number"), [
    ("np.float16(0.5)", 0.5), ("np.longdouble('0.5')", 0.5), ("Decimal('0.5')", 0.5), ("Fraction(1, 2)", 0.5),
    ("np.bool_(True)", 1.0), ("np.array(0.5)", 0.5), ("sum([0.05] * 20)", 1.0), ("np.str_('0.5')", None), ("(1 + 0j)", None),
    ("np.bytes_(b'1')", None), ("np.complex64(0.5 + 3j)", None), ("np.clongdouble(0.5)", None), ("Decimal('sNaN')", None),
    ("np.array('0.5')", None), ("str(0.5)", None), ("3", None), ("-0.5", None),
])  # fmt: skip
async def test_numbers_of_numpy_and_decimals_are_theirs_and_texts_are_none(
    planted: None, value: str, number: float | None
) -> None:
    """A text of numpy's and a complex number's real part were paid; a decimal ended in a trace."""
    assert (await value_of(planted_leaf(value)))[0] == pytest.approx(number)
    context = Context(python={"own": lambda view, args: (made := eval(value, NAMES), {"value": made})})
    found = await compile_spec(spec(leaf("python", {"name": "own"})), context=context).ascore(episode())
    assert found.value == number and json.dumps(found.evidence, allow_nan=False)


async def test_a_plug_in_leaf_that_raises_is_named(planted: None) -> None:
    found, evidence = await value_of(planted_leaf("raise"))
    assert found is None and "planted.leaf" in evidence and "KeyError" in evidence and "no such thing" in evidence


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_of_a_stored_episode(word: str) -> None:
    line = json.dumps({**episode().to_json(), "reward": 0.25}).replace('"reward": 0.25', f'"reward": {word}')
    with pytest.raises(AgentrlError, match=r"file\.jsonl, line 1: .*reward: .* is not a finite number"):
        episode_of(line, "file.jsonl, line 1")


@pytest.mark.parametrize(("place", "value", "said"), [
    (("turns", 0, "message", "tool_calls", 0, "name"), 3, "tool call: name = 3"),
    (("turns", 0, "message", "tool_calls", 0, "id"), None, "id = None"),
    (("messages", 0, "content"), None, "content = None"),
    (("tools",), ["get"], "tools: expected a list of objects"),
    (("task", "gold"), None, "gold = None, expected a dict"),
])  # fmt: skip
def test_a_part_of_another_type_in_an_edited_file_is_named_by_its_line(place: tuple[Any, ...], value: Any, said: str) -> None:
    """Leaves that read it ended in a stack trace."""
    turn = Turn(0, Message("assistant", "", (ToolCall("get", {"key": "a"}, "x"),)))
    row: Any = Trajectory("e", Task("t", 0), messages=[Message("user", "q")], turns=[turn]).to_json()
    inner = row
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(AgentrlError, match=rf"file\.jsonl, line 1: .*{said}"):
        episode_of(json.dumps(row), "file.jsonl, line 1")
