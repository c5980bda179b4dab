"""What is said of a run: JUnit XML, the record for later runs, lines, exit codes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from agentrl.contrib.gpu_tests.declare import Earlier, FolderLock, failed_before, find_files, recall, remember
from agentrl.contrib.gpu_tests.report import as_json, clock, heartbeat, junit, report
from agentrl.contrib.gpu_tests.scheduler import exit_code
from agentrl.contrib.gpu_tests.verdict import Case, Ending, FileResult, JournalReader, Stacks, conclude
from agentrl.utils.errors import RunFolderError, UserError
from tests.contrib.gpu_tests.made_up import World, job

ERR = (("Captured stderr call", "oh\n"),)
HUNG = "was not collected within 5 s"
RESULTS = [
    FileResult(
        "tests/a/test_x.py",
        (
            Case("test_ok", "passed", 1.25, properties=(("size", "3"),)),
            Case("TestY::test_bad[a::b]", "failed", 0.5, "assert 1 == 2", "call", "E  \x1b[31massert\x00", ERR),
            Case("test_setup", "failed", 0.1, "boom", "setup", "E boom"),
            Case("test_skip", "skipped", 0.0, "no card"),
            Case("test_cut", "interrupted", 2.0, "Ctrl-C"),
            Case("test_never", "not run", 0.0, "its file was interrupted"),
        ),
        2, (0, 3), 9.5, None, "", "out/x.log", True,
    ),
    FileResult("tests/b/test_z.py", (Case("test_z", "not run", reason="its file hung"),), 1, (1,), 5.0, HUNG, "stack"),
]  # fmt: skip


def test_the_xml_has_every_test_with_its_outcome() -> None:
    root = ET.fromstring(junit(RESULTS, datetime(2026, 1, 2, tzinfo=UTC)))
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "8", "failures": "1", "errors": "5", "skipped": "1", "time": "14.500",
    }  # fmt: skip
    first, second = root.findall("testsuite")
    assert first.get("timestamp") == "2026-01-02T00:00:00+00:00" and second.get("tests") == "2"
    assert {one.get("name"): one.get("value") for one in first.findall("properties/property")} == {
        "gpus": "2", "cards": "0,3", "log": "out/x.log",
    }  # fmt: skip
    told = {}
    for case in root.iter("testcase"):
        inner = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        told[f"{case.get('classname')}.{case.get('name')}"] = (
            None if inner is None else (inner.tag, inner.get("type"), inner.get("message"))
        )
    assert told == {
        "tests.a.test_x.test_ok": None,
        "tests.a.test_x.TestY.test_bad[a::b]": ("failure", "call", "assert 1 == 2"),
        "tests.a.test_x.test_setup": ("error", "setup", "boom"),
        "tests.a.test_x.test_skip": ("skipped", "pytest.skipped", "no card"),
        "tests.a.test_x.test_cut": ("error", "interrupted", "interrupted: Ctrl-C"),
        "tests.a.test_x.test_never": ("error", "not run", "not run: its file was interrupted"),
        "tests.b.test_z.test_z": ("error", "not run", "not run: its file hung"),
        "tests.b.test_z.[file]": ("error", "file", "was not collected within 5 s"),
    }
    bad = next(case for case in root.iter("testcase") if case.get("name") == "test_bad[a::b]")
    assert (
        bad.find("failure").text == "E  \\x1b[31massert\\x00"
        and bad.find("system-err").text == "--- Captured stderr call ---\noh\n"
    )


def test_what_has_not_passed_is_run_again_and_lengths_are_of_whole_runs(tmp_path: Path) -> None:
    remember(tmp_path, [*RESULTS, FileResult("ok.py", (Case("test_a", "passed"),), seconds=3.0, collected=True)])
    known = recall(tmp_path)
    left = ("TestY::test_bad[a::b]", "test_setup", "test_cut", "test_never")
    assert known == {
        "tests/a/test_x.py": Earlier(None, left),
        "tests/b/test_z.py": Earlier(None, None),
        "ok.py": Earlier(3.0, ()),
    }
    found = {name: (name,) for name in [*known, "new.py"]}
    again = failed_before(found, known)
    assert again == {
        "tests/a/test_x.py": tuple(f"tests/a/test_x.py::{name}" for name in left),
        "tests/b/test_z.py": ("tests/b/test_z.py",),
    }
    # A run of a part: one is mended, one is not, two were not asked for.
    part = (Case("test_setup", "passed"), Case("test_cut", "failed"))
    remember(tmp_path, [FileResult("tests/a/test_x.py", part, seconds=1.0, collected=True, part=True)])
    assert recall(tmp_path)["tests/a/test_x.py"] == Earlier(None, ("test_cut", "TestY::test_bad[a::b]", "test_never"))
    with pytest.raises(UserError, match="--failed: nothing of this has failed"):
        failed_before({"ok.py": ("ok.py",)}, known)
    (tmp_path / "files.json").write_text('{"a": 1}')
    with pytest.raises(RunFolderError, match=r"files.json is damaged .*: delete it"):
        recall(tmp_path)


def test_a_second_scheduler_is_kept_out_of_the_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(
        UserError, match=r"another `agentrl test` uses .* \(pid \d+\): wait for it, or give this one its own with --out"
    ):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


@pytest.mark.parametrize(
    ("outcomes", "problem", "interrupted", "code"),
    [
        (["passed", "skipped", "xfailed", "xpassed"], None, False, 0), (["passed", "failed"], None, False, 1),
        (["passed", "not run"], None, False, 1), (["passed"], "ended with exit code 3", False, 1),
        (["passed"], None, True, 130), ([], None, False, 1),
    ],
)  # fmt: skip
def test_exit_codes(outcomes: list[str], problem: str | None, interrupted: bool, code: int) -> None:
    cases = tuple(Case(str(number), outcome) for number, outcome in enumerate(outcomes))
    assert exit_code([FileResult("a.py", cases, seconds=1.0, problem=problem)], interrupted) == code


def test_the_report_names_every_test_that_did_not_pass_once() -> None:
    text = report(RESULTS, {1: "5 s after a ended: 4000 MiB in use"}, 75.0)
    assert (
        text
        == """
== did not pass ==
tests/a/test_x.py on cards 0,3: 1 passed, 2 failed, 1 skipped, 1 interrupted, 1 not run  (out/x.log)
    failed  TestY::test_bad[a::b]: assert 1 == 2
    failed in setup  test_setup: boom
    interrupted  test_cut: Ctrl-C
    not run  test_never: its file was interrupted
tests/b/test_z.py on card 1: 1 not run
    was not collected within 5 s
    not run  test_z: its file hung
card 1 is out of service: 5 s after a ended: 4000 MiB in use
== 2 files in 1:15: 1 passed, 2 failed, 1 skipped, 1 interrupted, 2 not run =="""
    )
    told = json.loads(json.dumps(as_json(RESULTS, {}, 75.0, 1)))
    assert told["counts"] == {"passed": 1, "failed": 2, "skipped": 1, "interrupted": 1, "not run": 2} and told["exit_code"] == 1
    assert [(file["verdict"], len(file["tests"])) for file in told["files"]] == [("failed", 6), ("failed", 1)]
    assert [clock(seconds) for seconds in (0.4, 61, 3600, 3725)] == ["0:00", "1:01", "1:00:00", "1:02:05"]


def test_the_heartbeat_says_what_runs_where_since_when_what_waits_and_how_long() -> None:
    jobs = [job("a.py", 2, known=100.0), job("b.py", 2, known=50.0), job("c.py"), job("d.py")]
    world = World(jobs, cards=3, lengths={"a.py": 100.0, "c.py": 1.0, "d.py": 500.0}, used=lambda card, now: 900 * (card == 2))
    lines = {}
    world.noted.each = lambda scheduler, now: lines.setdefault(now, heartbeat(scheduler, now))
    world.run()
    told = "running: a.py on cards 0,1 for 0:30, d.py for 0:29; waiting: 1 (1 for cards); not free: "
    told += "card 2: 900 MiB in use (free: at most 256), held by pid 77 (other); about 2:00 left, and 1 of unknown length"
    assert lines[30.0] == told


def test_files_are_found_as_pytest_finds_them_and_a_wrong_path_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tests/test_a.py", "tests/in/b_test.py", "tests/.hidden/test_c.py", "tests/build/test_d.py", "tests/helper.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert find_files([]) == {name: (name,) for name in ("tests/in/b_test.py", "tests/test_a.py")}
    assert find_files(["tests/helper.py", "tests/build"]) == {
        name: (name,) for name in ("tests/helper.py", "tests/build/test_d.py")
    }
    assert find_files(["tests/test_a.py::test_x", "tests/test_a.py::test_y"]) == {
        "tests/test_a.py": ("tests/test_a.py::test_x", "tests/test_a.py::test_y")
    }
    assert find_files(["tests/test_a.py::test_x", "tests"])["tests/test_a.py"] == ("tests/test_a.py",)
    with pytest.raises(UserError, match=r"tests/test_b.py: there is no such file or folder; did you mean 'tests/test_a.py'"):
        find_files(["tests/test_b.py"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no test file \(test_\*.py or \*_test.py\) in empty"):
        find_files(["empty"])


@pytest.mark.parametrize(
    ("ending", "problem", "outcomes"),
    [
        (Ending(0), None, ["passed", "not run"]),
        (Ending(139), "was ended by SIGSEGV outside of its tests: last words", ["passed", "not run"]),
        (Ending(1), "ended with exit code 1 although no test failed: last words", ["passed", "not run"]),
        (Ending(137, "timeout", 9.0), "did not end within 9 s outside of its tests: last words", ["passed", "not run"]),
        (Ending(2, "interrupted"), None, ["passed", "not run"]),
        (Ending(None, "stuck"), "could not be ended", ["passed", "not run"]),
    ],
)
def test_a_session_that_ends_between_tests(tmp_path: Path, ending: Ending, problem: str | None, outcomes: list[str]) -> None:
    events: list[dict[str, object]] = [
        {"event": "began", "pid": 1},
        {"event": "collected", "tests": ["a.py::test_a", "a.py::test_b"]},
    ]
    events += [{"event": "start", "test": "a.py::test_a"}]
    events += [
        {"event": "report", "test": "a.py::test_a", "when": when, "outcome": "passed", "seconds": 1.0}
        for when in ("setup", "call", "teardown")
    ]
    path = tmp_path / "journal"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "sta')
    said = JournalReader(path)
    said.read()
    cases, found = conclude(said, ending, ["test_a", "test_b"], Stacks(), "last words")
    assert ([case.outcome for case in cases], found) == (outcomes, problem) and cases[0].seconds == 3.0
    with path.open("a") as file:
        file.write('rt", "test": "a.py::test_b"}\n')
    said.read()
    assert list(said.running) == ["test_b"]
