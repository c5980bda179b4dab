"""The benchmark book: docs say what the results' files say, and what got worse is named."""

import importlib.metadata
import importlib.util
import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agentrl.utils.search_path import load_module

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def book() -> Any:
    return load_module(ROOT / "benchmarks" / "book.py")


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


GOOD = """
import json
print("half way")
print(json.dumps({"speed": %s}))
"""
BAD = """
raise SystemExit("the store is gone")
"""
SLOW = """
import time
time.sleep(60)
"""


@pytest.fixture
def shop(book: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book of its own in a git repository: claims that work, fail, hang, write no number, and have no peer."""
    for name, text in {"good": GOOD % 5.0, "bad": BAD, "slow": SLOW, "none": GOOD % "None", "peer": GOOD % 1.0}.items():
        (tmp_path / f"{name}.py").write_text(text)
    claims = [
        f"""
        [[claim]]
        name = "{name}"
        title = "Title of {name}"
        command = "{name}.py"
        seconds = {seconds}
        peer = "torch {{torch}}"
        figures = [{{ label = "speed", at = "speed", better = "higher" }}]
        """
        for name, seconds in (("bad", 30), ("slow", 0.7), ("none", 30), ("peer", 30), ("good", 30))
    ]
    claims[3] += '        needs = ["a-peer"]\n        install = "make a-peer"\n'
    (tmp_path / "claims.toml").write_text(textwrap.dedent("".join(claims)))
    moved = {"ROOT": ".", "HERE": ".", "RESULTS": "benchmarks/results", "INTEGRATIONS": "envs"}
    (tmp_path / "benchmarks").mkdir()
    for name, place in moved.items():
        monkeypatch.setattr(book, name, tmp_path / place)
    return tmp_path


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_a_claim_that_fails_is_named_and_the_others_are_measured(
    book: Any, shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert book.run([]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-4:] == [
        "bad: not measured: exit code 1: the store is gone",
        "slow: not measured: not done within 0.7 s",
        "none: not measured: its output has no number for 'speed'",
        "peer: skipped: needs a-peer: make a-peer",
    ]
    assert "[1/5] bad: python bad.py\n  0:00 elapsed, about 2:00 left; limit of this claim 0:30" in said
    assert "  | half way" in said
    assert [file.name for file in (shop / "benchmarks/results").iterdir()] == ["good.json"]
    found = json.loads((shop / "benchmarks/results/good.json").read_text())
    assert found["figures"] == {"speed": {"value": 5.0, "better": "higher"}} and 0 <= found["machine"]["busy"] <= 1
    assert found["peer"] == f"torch {importlib.metadata.version('torch')}"
    page = book.page()
    assert "| speed | 5 |" in page
    assert "## Title of peer\n\n    python peer.py\n\nNot measured yet. It needs a-peer: `make a-peer`." in page
    assert book.run(["good"]) == 0 and book.run(["god"]) == 2
    assert capsys.readouterr().out.endswith("no claim god; there are bad, slow, none, peer, good\n")


def test_compare_names_a_doctored_result(book: Any, shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(shop, "init", "-q")
    assert book.run(["good"]) == 0
    git(shop, "add", "-A")
    git(shop, "commit", "-qm", "measured")
    capsys.readouterr()
    assert book.compare("HEAD") == 0
    assert capsys.readouterr().out == "of 1 claims nothing got worse by 10%\n"
    file = shop / "benchmarks/results/good.json"
    doctored = json.loads(file.read_text())
    doctored["figures"]["speed"]["value"] = 4.4
    doctored["machine"]["cores"] = 512
    file.write_text(json.dumps(doctored))
    git(shop, "commit", "-qam", "doctored")
    assert book.compare("HEAD") == 0
    capsys.readouterr()
    assert book.compare("HEAD~1") == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("good: note: measured on another machine (") and "now 512 cores" in first
    assert last == "good: speed: 5 -> 4.4, 12 % worse"
