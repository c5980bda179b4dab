"""`agentrl test` as a user types it. The long ones, on the files that go wrong, are of `make proofs`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from agentrl.cli.main import _parse, main
from tests.conftest import proof

ROOT = Path(__file__).resolve().parents[3]
WELL = """import os, pytest
pytestmark = pytest.mark.gpus(1)
def test_card(): assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")
@pytest.mark.parametrize("even", [0, 1])
def test_even(even): assert not even
"""


def test_what_stands_behind_the_dashes_goes_to_pytest(capsys: pytest.CaptureFixture[str]) -> None:
    args: argparse.Namespace = _parse(["test", "tests/gpu", "--cards", "0,3", "--", "-k", "x", "--", "--json"])
    assert (args.tests, args.cards, args.passed_on, args.json) == (["tests/gpu"], [0, 3], ["-k", "x", "--", "--json"], False)
    assert _parse(["test", "--"]).passed_on == _parse(["test"]).passed_on == []
    for words, told in (
        (["--cards", "0", "--simulate", "2"], "not allowed with argument"), (["--cards", "a"], "'a' is no whole number"),
        (["--timeout", "-1"], "'-1' are no seconds"), (["--timeuot", "1"], "did you mean '--timeout'?"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            _parse(["test", *words])
        assert end.value.code == 2 and told in capsys.readouterr().err


def test_a_run_fails_then_only_what_failed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run with a card and one without, then `--failed` with one test left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_well.py").write_text(WELL)
    (tmp_path / "tests" / "test_many.py").write_text("import pytest\npytestmark = pytest.mark.gpus(3)\ndef test_a(): ...\n")
    assert main(["test", "--simulate", "2", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"passed": 2, "failed": 1, "not run": 1} and told["exit_code"] == 1
    many, well = told["files"]
    assert well["cards"] == [0] and [test["outcome"] for test in well["tests"]] == ["passed", "passed", "failed"]
    assert many["problem"] == "not run: needs 3 cards, and 2 can be used"
    out = tmp_path / ".pytest_cache" / "agentrl"
    assert ET.parse(out / "junit.xml").getroot().get("tests") == "5"
    text = (tmp_path / "tests" / "test_well.py").read_text()
    (tmp_path / "tests" / "test_well.py").write_text(text.replace("not even", "even in (0, 1)"))
    assert main(["test", "--simulate", "3", "--failed", "tests/test_well.py"]) == 0
    said = capsys.readouterr().out
    assert "1 passed, 0:0" in said and "== 1 file in 0:0" in said
    assert main(["test", "--failed", "tests/test_well.py"]) == 2  # nothing is left
    assert main(["test", "--cards", "7", "tests/test_well.py"]) == 2
    assert "nvidia-smi" in capsys.readouterr().err


def run(*words: str, **more: float) -> tuple[subprocess.Popen[str], float]:
    command = [sys.executable, "-m", "agentrl", "test", *words]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True), time.monotonic()


@proof
@pytest.mark.timeout(600)
def test_the_files_that_go_wrong_are_reported_one_by_one(tmp_path: Path) -> None:
    words = [
        "tests/contrib/gpu_tests/bad",
        "--simulate",
        "2",
        "--collect-timeout",
        "20",
        "--settle",
        "3",
        "--heartbeat",
        "10",
        "--slots",
        "1",
    ]
    process, _ = run(*words, "--out", str(tmp_path))
    said, _ = process.communicate()
    assert process.returncode == 1, said
    told = json.loads((tmp_path / "results.json").read_text())
    files = {Path(file["file"]).stem: file for file in told["files"]}
    outcomes = {name: " ".join(test["outcome"] for test in file["tests"]) for name, file in files.items()}
    assert outcomes == {
        "test_exits": "passed failed not run",
        "test_fails": "passed failed",
        "test_hangs": "passed failed not run",
        "test_hangs_in_collection": "not run",
        "test_leaks": "passed",
        "test_leaves_processes": "passed",
        "test_needs_two": "not run",
        "test_segfaults": "failed not run",
        "test_unreadable": "not run",
    }
    assert told["counts"] == {"passed": 5, "failed": 4, "not run": 6}
    assert (
        list(told["out_of_service"]) == ["1"]
        and "s after tests/contrib/gpu_tests/bad/test_leaks.py ended: 4096 MiB" in told["out_of_service"]["1"]
    )
    assert "at tests/contrib/gpu_tests/bad/test_hangs.py:" in files["test_hangs"]["tests"][1]["reason"]
    assert files["test_needs_two"]["problem"].startswith("not run: needs 2 cards, and 1 can be used; card 1 is out of service")
    assert files["test_leaves_processes"]["cards"] == [0]
    # Largest first: both files with two cards, one after the other, before any with one.
    starts = [line.split("start   tests/contrib/gpu_tests/bad/")[1] for line in said.splitlines() if "start   " in line]
    assert [line for line in starts if " on " in line][:2] == ["test_hangs.py on cards 0,1", "test_leaks.py on cards 0,1"]
    assert "running: tests/contrib/gpu_tests/bad/test_hangs.py on cards 0,1 for 0:" in said
    root = ET.parse(tmp_path / "junit.xml").getroot()
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("18", "4", "9")  # 15 tests, 3 files by themselves
    assert left_over() == []


def left_over() -> list[str]:
    """Processes of the files that go wrong."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_text().replace("\0", " ") if folder.name.isdigit() else ""
        except OSError:
            continue
        if "tests/contrib/gpu_tests/bad/" in words and "-m pytest -p agentrl.contrib.gpu_tests.plugin" in words:
            found.append(words)
    return found


@proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("signals", "hung"), [(1, "test_hangs"), (2, "test_hangs")])
def test_ctrl_c_ends_a_run_and_reports_every_test(tmp_path: Path, signals: int, hung: str) -> None:
    process, began = run("tests/contrib/gpu_tests/bad", "--simulate", "2", "--out", str(tmp_path))
    journal = tmp_path / "journals" / "tests" / "contrib" / "gpu_tests" / "bad" / "test_hangs.jsonl"
    while not (journal.exists() and "test_hangs.py::test_hangs" in journal.read_text().split('"start"')[-1]):
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    for number in range(signals):
        time.sleep(0.3 * number)
        process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 130, said
    told = json.loads((tmp_path / "results.json").read_text())
    outcomes = {
        test["name"]: test["outcome"]
        for file in told["files"]
        if file["file"].endswith("/test_hangs.py")
        for test in file["tests"]
    }
    assert outcomes == {"test_begins": "passed", hung: "interrupted", "test_comes_after": "not run"}
    assert sum(told["counts"].values()) == 15 and {file["seconds"] is None for file in told["files"]} == {True, False}
    assert "interrupted (Ctrl-C) before its file began" in said and left_over() == []


@proof
@pytest.mark.timeout(300)
def test_a_scheduler_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    process, began = run("tests/contrib/gpu_tests/bad/test_hangs.py", "--simulate", "2", "--out", str(tmp_path))
    journal = tmp_path / "journals" / "tests" / "contrib" / "gpu_tests" / "bad" / "test_hangs.jsonl"
    while not (journal.exists() and '"test": "tests/contrib/gpu_tests/bad/test_hangs.py::test_hangs"' in journal.read_text()):
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while left_over() and time.monotonic() < until:
        time.sleep(0.1)
    assert left_over() == []
