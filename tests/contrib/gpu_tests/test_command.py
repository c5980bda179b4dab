"""`agentrl test` as a user types it."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.cli.main import _parse, main
from agentrl.contrib.gpu_tests.run import as_json, exit_code, locked, report
from agentrl.contrib.gpu_tests.session import Case, FileResult
from agentrl.utils.errors import UserError
from tests.conftest import proof
from tests.contrib.gpu_tests.conftest import Smi
from tests.waits import until

WELL = """import os, pytest
pytestmark = pytest.mark.gpus(1)
def test_card(): assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")
@pytest.mark.parametrize("even", [0, 1])
def test_even(even): assert not even
"""
HANGS = "import pytest, time\npytestmark = pytest.mark.gpus(1)\ndef test_a(): pass\ndef test_hangs(): time.sleep(1000)\n"
WHY = "needs 3 cards, and 2 can be used"
RESULTS = [
    FileResult(
        "tests/a/test_x.py",
        (
            Case("test_ok", "passed", 1.25), Case("TestY::test_bad[a::b]", "failed", 0.5, "assert \x1b[31m1 == 2\x00", "call"),
            Case("test_setup", "failed", 0.1, "boom", "setup"), Case("test_skip", "skipped", 0.0, "no card"),
            Case("test_cut", "interrupted", 2.0, "Ctrl-C"), Case("test_never", "not run", 0.0, "its file was interrupted"),
        ),
        2, (0, 3), 9.5, None, "out/x.log",
    ),
    FileResult("tests/b/test_z.py", (Case("test_z", "not run", reason=WHY),), 3, problem=f"not run: {WHY}"),
]  # fmt: skip


def test_what_stands_behind_the_dashes_goes_to_pytest(capsys: pytest.CaptureFixture[str]) -> None:
    args: argparse.Namespace = _parse(["test", "tests/gpu", "--cards", "0,3", "--", "-k", "x", "--", "--json"])
    assert (args.tests, args.cards, args.passed_on, args.json) == (["tests/gpu"], [0, 3], ["-k", "x", "--", "--json"], False)
    assert _parse(["test", "--"]).passed_on == _parse(["test"]).passed_on == []
    for words, told in (
        (["--cards", "a"], "expected a whole number of at least 0, got 'a'"), (["--timeout", "-1"], "'-1' are no seconds"),
        (["--timeuot", "1"], "did you mean '--timeout'?"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            _parse(["test", *words])
        assert end.value.code == 2 and told in capsys.readouterr().err


def test_a_run_fails_then_a_part_of_it_passes(
    smi: Smi, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (here / "tests").mkdir()
    (here / "tests" / "test_well.py").write_text(WELL)
    (here / "tests" / "test_many.py").write_text("import pytest\npytestmark = pytest.mark.gpus(3)\ndef test_a(): ...\n")
    assert main(["test", "--cards", "0,1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"passed": 2, "failed": 1, "not run": 1} and told["exit_code"] == 1
    many, well = told["files"]
    assert well["cards"] == [0] and [test["outcome"] for test in well["tests"]] == ["passed", "passed", "failed"]
    assert many["problem"] == f"not run: {WHY}"
    assert json.loads((here / ".pytest_cache" / "agentrl" / "results.json").read_text()) == told
    (here / "tests" / "test_well.py").write_text(WELL.replace("not even", "even in (0, 1)"))
    assert main(["test", "tests/test_well.py::test_even"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"2 passed, 0:\d\d\n", said) and re.search(r"== 1 file in 0:\d\d", said), said
    assert main(["test", "--cards", "7", "tests/test_well.py"]) == 2
    assert "there is no card 7; there are 0, 1, 2" in capsys.readouterr().err
    assert main(["test", "tests/test_wel.py"]) == 2
    assert "did you mean 'tests/test_well.py'" in capsys.readouterr().err


@proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [False, True])
def test_ctrl_c_ends_a_run_with_every_outcome_and_a_killed_one_leaves_no_process(smi: Smi, tmp_path: Path, kills: bool) -> None:
    for name in ("test_hangs.py", "test_later.py"):
        (tmp_path / name).write_text(HANGS)
    command = [sys.executable, "-m", "agentrl", "test", str(tmp_path), "--cards", "0", "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    pipe, began = subprocess.PIPE, time.monotonic()
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    journal = tmp_path / "out" / "files" / "test_hangs.py" / "journal.jsonl"
    while not (journal.exists() and '"start": "test_hangs"' in journal.read_text()):
        assert time.monotonic() - began < 120 and process.poll() is None
        time.sleep(0.1)
    pid = json.loads(journal.read_text().splitlines()[0])["pid"]
    process.send_signal(signal.SIGKILL if kills else signal.SIGINT)
    said, _ = process.communicate()
    assert until(lambda: not Path(f"/proc/{pid}").exists())
    if not kills:
        assert process.returncode == 130, said
        files = json.loads((tmp_path / "out" / "results.json").read_text())["files"]
        outcomes = {file["file"]: [test["outcome"] for test in file["tests"]] for file in files}
        assert outcomes == {"test_hangs.py": ["passed", "interrupted"], "test_later.py": ["not run", "not run"]}
        assert "interrupted (Ctrl-C) before its file began" in said


def test_the_report_names_every_test_that_did_not_pass_once() -> None:
    text = report(RESULTS, 75.0)
    assert (
        text.replace("\x1b[31m", "").replace("\x00", "")
        == f"""
== did not pass ==
tests/a/test_x.py on cards 0,3: 1 passed, 2 failed, 1 skipped, 1 interrupted, 1 not run  (out/x.log)
    failed  TestY::test_bad[a::b]: assert 1 == 2
    failed in setup  test_setup: boom
    interrupted  test_cut: Ctrl-C
    not run  test_never: its file was interrupted
tests/b/test_z.py: 1 not run
    not run: {WHY}
    not run  test_z
== 2 files in 1:15: 1 passed, 2 failed, 1 skipped, 1 interrupted, 2 not run =="""
    )
    told = json.loads(json.dumps(as_json(RESULTS, 75.0, 1)))
    assert told["counts"] == {"passed": 1, "failed": 2, "skipped": 1, "interrupted": 1, "not run": 2} and told["exit_code"] == 1
    assert [(file["verdict"], len(file["tests"])) for file in told["files"]] == [("failed", 6), ("not run", 1)]


@pytest.mark.parametrize(("outcomes", "problem", "interrupted", "code"), [
    (["passed", "skipped", "xfailed", "xpassed"], None, False, 0), (["passed", "failed"], None, False, 1),
    (["passed", "not run"], None, False, 1), (["passed"], "ended with exit code 3", False, 1),
    (["passed"], None, True, 130), ([], None, False, 1),
])  # fmt: skip
def test_exit_codes(outcomes: list[str], problem: str | None, interrupted: bool, code: int) -> None:
    cases = tuple(Case(str(number), outcome) for number, outcome in enumerate(outcomes))
    assert exit_code([FileResult("a.py", cases, seconds=1.0, problem=problem)], interrupted) == code


def test_a_second_scheduler_is_kept_out_of_the_folder(tmp_path: Path) -> None:
    told = r"another `agentrl test` uses .*: wait for it, or give this one its own with --out"
    with locked(tmp_path), pytest.raises(UserError, match=told), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
