"""The benchmark book: figures are read by their paths, and what got worse is named."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.utils.search_path import load_module


@pytest.fixture(scope="module")
def book() -> Any:
    return load_module(Path(__file__).resolve().parents[1] / "benchmarks" / "book.py")


def test_what_got_worse_by_a_tenth_is_named(book: Any) -> None:
    def result(speed: float, size: float, **more: float) -> dict[str, Any]:
        figures = {"speed": {"value": speed, "better": "higher"}, "size": {"value": size, "better": "lower"}}
        return {"claim": "c", "figures": {**figures, **{name: {"value": v, "better": "higher"} for name, v in more.items()}}}

    assert book.worse(result(91.0, 1.09), result(100.0, 1.0)) == []
    assert book.worse(result(150.0, 0.5), result(100.0, 1.0)) == []
    assert book.worse(result(88.0, 1.25), result(100.0, 1.0)) == [
        "c: speed: 100 -> 88, 12 % worse",
        "c: size: 1 -> 1.25, 25 % worse",
    ]
    assert book.worse(result(100.0, 1.0), result(100.0, 1.0, rest=3.0)) == ["c: rest: no longer measured"]
    assert book.worse(result(100.0, 1.0), result(100.0, 0.0)) == ["c: size: 0 -> 1, 100 % worse"]


def test_a_figure_is_read_by_its_path_and_a_missing_one_is_an_error(book: Any) -> None:
    raw = {"ratios": {"a.b": 2.0, "c": {"d": 3.0}}, "now": 1}
    claim = {
        "figures": [
            {"label": "x", "at": "ratios.a.b", "better": "higher", "aim": 2.0},
            {"label": "y", "at": "ratios.c.d", "better": "lower", "aim": 2.5},
            {"label": "*", "at": "ratios.c", "better": "lower"},
        ]
    }
    found = dict(book.figures(claim, raw))
    assert {label: figure["value"] for label, figure in found.items()} == {"x": 2.0, "y": 3.0, "d": 3.0}
    assert [book.verdict(figure) for figure in found.values()] == ["met", "**missed**", ""]
    with pytest.raises(RuntimeError, match=r"no 'ratios\.q'"):
        dict(book.figures({"figures": [{"label": "x", "at": "ratios.q", "better": "higher"}]}, raw))
