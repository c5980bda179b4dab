"""Real pytest sessions, on a made-up clock: no limit is waited for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.contrib.gpu_tests.cards import SimulatedCards
from agentrl.contrib.gpu_tests.plugin import DUMP
from agentrl.contrib.gpu_tests.session import FileJob, FileSession, SessionOptions, child_env, stacks_of
from agentrl.contrib.gpu_tests.verdict import FileResult
from tests.conftest import proof

BAD = Path("tests/contrib/gpu_tests/bad")
ROOT = Path(__file__).resolve().parents[3]
HOUR = 3600.0


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FileSession]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it takes longer than all the rest
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    def begin(name: str, cards: tuple[int, ...] = (), gpus: int | None = None, **env: str) -> FileSession:
        path = name if "/" in name else str(BAD / name)
        one = FileJob(path, (path,), len(cards) if gpus is None else gpus, HOUR, None, ("test_listed",))
        options = SessionOptions(tmp_path, env, ["-p", "no:cacheprovider", "-o", "asyncio_mode="], HOUR)
        return FileSession(one, cards, options, 0.0)

    return begin


def until(found: Callable[[], bool]) -> None:
    for _ in range(9000):
        if found():
            return
        time.sleep(0.02)
    raise AssertionError("not within three minutes")


def ended(session: FileSession, now: float = 1.0) -> FileResult:
    results: list[FileResult] = []
    until(lambda: bool(results.extend([found] if (found := session.tick(now)) else []) or results))
    return results[0]


def test_a_timeout_ends_also_what_left_the_group_and_says_where_the_test_was(
    start: Callable[..., FileSession], tmp_path: Path
) -> None:
    cards = SimulatedCards(tmp_path / "cards", 2)
    session = start("test_hangs.py", (0, 1), **cards.env)
    until(lambda: session.tick(1.0) is not None or "test_hangs" in session.said.running)
    assert [card.used for card in cards.read()] == [3000, 3000]
    time.sleep(0.1)  # from its report into its wait
    assert session.tick(HOUR + 1) is None  # the limit: it is asked where it is, and told to end
    result = ended(session, HOUR + 2)
    assert [card.used for card in cards.read()] == [0, 0]
    assert [(case.name, case.outcome) for case in result.cases] == [
        ("test_begins", "passed"), ("test_hangs", "failed"), ("test_comes_after", "not run"),
    ]  # fmt: skip
    line = 1 + (ROOT / BAD / "test_hangs.py").read_text().splitlines().index("    threading.Event().wait()")
    where = f"the file did not end within 3600 s in this test, at tests/contrib/gpu_tests/bad/test_hangs.py:{line} in test_hangs"
    assert result.cases[1].reason == where and "threading.py" in result.cases[1].text
    assert result.cases[2].reason == "its file did not end within 3600 s in test_hangs"
    assert result.seconds == HOUR + 2 and result.cards == (0, 1)


@proof
def test_a_collection_that_hangs_is_an_error_by_name_with_its_line(start: Callable[..., FileSession]) -> None:
    session = start("test_hangs_in_collection.py", (0,))
    until(lambda: session.said.pid is not None or session.tick(1.0) is not None)
    line = 1 + (ROOT / BAD / "test_hangs_in_collection.py").read_text().splitlines().index("time.sleep(100_000)")
    until(lambda: session._dump_stacks().where.endswith(f"hangs_in_collection.py:{line} in <module>"))
    session.tick(HOUR + 1)
    result = ended(session, HOUR + 2)
    told = f"was not collected within 3600 s, at tests/contrib/gpu_tests/bad/test_hangs_in_collection.py:{line} in <module>"
    assert result.problem == told and "Current thread" in result.at
    assert [(case.name, case.outcome) for case in result.cases] == [("test_listed", "not run")]


@proof
def test_a_crash_is_the_fault_of_the_test_in_which_it_came(start: Callable[..., FileSession], tmp_path: Path) -> None:
    cards = SimulatedCards(tmp_path / "cards", 1)
    crashes, exits = start("test_segfaults.py", (0,), **cards.env), start("test_exits.py")
    crashed = ended(crashes)
    line = 1 + (ROOT / BAD / "test_segfaults.py").read_text().splitlines().index("        ctypes.string_at(0)")
    first, second = crashed.cases
    told = (
        f"the file was ended by SIGSEGV in this test, at tests/contrib/gpu_tests/bad/test_segfaults.py:{line} in test_segfaults"
    )
    assert (first.outcome, first.reason) == ("failed", told) and "Segmentation fault" in first.text
    assert (second.outcome, second.reason) == ("not run", "its file was ended by SIGSEGV in test_segfaults")
    assert [card.used for card in cards.read()] == [0]
    assert [(case.name, case.outcome, case.reason) for case in ended(exits).cases] == [
        ("test_passes", "passed", ""), ("test_exits", "failed", "the file ended with exit code 3 in this test"),
        ("test_comes_after", "not run", "its file ended with exit code 3 in test_exits"),
    ]  # fmt: skip


def test_ctrl_c_lets_a_session_tear_down_and_each_test_has_its_outcome(start: Callable[..., FileSession], tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(
        "import os, time, pytest\n"
        "@pytest.fixture\ndef made(tmp_path_factory):\n    yield\n"
        "    told = os.environ['CUDA_VISIBLE_DEVICES'] + str('RAY_ADDRESS' in os.environ)\n"
        f"    open({str(tmp_path / 'torn_down')!r}, 'w').write(told)\n"
        "def test_passes(record_property):\n    record_property('size', 3)\n    print('told')\n"
        "def test_waits(made):\n    time.sleep(1000)\n"
        "def test_after(): pass\n"
    )
    session = start(f"{tmp_path}/test_waits.py", (5, 3))
    until(lambda: session.tick(1.0) is not None or "test_waits" in session.said.running)
    time.sleep(0.2)
    session.interrupt(2.0)
    result = ended(session, 3.0)
    assert [(case.name, case.outcome) for case in result.cases] == [
        ("test_passes", "passed"), ("test_waits", "interrupted"), ("test_after", "not run"),
    ]  # fmt: skip
    assert result.cases[0].properties == (("size", "3"),) and result.problem is None and not result.failed
    assert (tmp_path / "torn_down").read_text() == "5,3False"


def test_a_mark_that_came_from_elsewhere_is_refused(start: Callable[..., FileSession], tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\nmarks = getattr(pytest.mark, 'gpus')(2)\npytestmark = marks\ndef test_a(): pass\n"
    )
    result = ended(start(f"{tmp_path}/test_x.py", ()))
    assert "test_x.py::test_a has the mark gpus(2), which the scheduler could not read and gave 0: write" in result.problem
    assert [case.outcome for case in result.cases] == ["not run"]


def test_what_a_session_gets_of_the_environment() -> None:
    outer = {"RAY_ADDRESS": "x", "PYTEST_XDIST_WORKER": "gw0", "CUDA_VISIBLE_DEVICES": "0,1,2", "HOME": "/me"}
    kept = {"HOME": "/me", "PYTHONUNBUFFERED": "1"}
    assert child_env(outer, {"TMPDIR": "/t"}, (2, 1)) == {**kept, "TMPDIR": "/t", "CUDA_VISIBLE_DEVICES": "2,1"}
    assert child_env(outer, {}, ()) == {**kept, "CUDA_VISIBLE_DEVICES": ""}


def test_where_is_the_innermost_line_of_the_file_in_the_thread_that_answers(tmp_path: Path) -> None:
    frames = [
        '  File "/lib/socket.py", line 7 in accept',
        f'  File "{tmp_path}/t.py", line 5 in inner',
        f'  File "{tmp_path}/t.py", line 9 in x',
    ]
    text = "\n".join(["Thread 0x1 (most recent call first):", f'  File "{tmp_path}/t.py", line 1 in other', "",
                      "Current thread 0x2 [python] (most recent call first):", *frames])  # fmt: skip
    assert stacks_of(text, tmp_path / "t.py").where == f"{tmp_path}/t.py:5 in inner"
    assert stacks_of(text, tmp_path / "u.py").where == "/lib/socket.py:7 in accept"
    assert stacks_of("", tmp_path / "t.py").where == ""
    assert signal.SIGRTMIN < DUMP <= signal.SIGRTMAX and os.name == "posix"
