"""Real pytest sessions; no limit is waited for."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.contrib.gpu_tests.plugin import JournalWriter
from agentrl.contrib.gpu_tests.scheduler import CardPool, Scheduler
from agentrl.contrib.gpu_tests.session import FileJob, FileResult, FileSession, Journal, child_env, collect, file_folder
from agentrl.utils.errors import UserError
from tests.conftest import proof

HOUR = 3600.0
ARGS = ["-p", "no:cacheprovider", "-o", "asyncio_mode="]
HANGS = """
import os, signal, threading, time

def test_begins():
    if os.fork() == 0:  # a process that leaves its parent, its session and its group, and that SIGTERM does not end
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open('orphan', 'w').write(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    while not os.path.exists('orphan'):
        time.sleep(0.01)

def test_hangs():
    threading.Event().wait()

def test_comes_after(): pass
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FileSession]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it takes longer than all the rest
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    def begin(name: str, text: str, cards: tuple[int, ...] = ()) -> FileSession:
        Path(name).write_text(text)
        return FileSession(FileJob(name, (name,), len(cards), HOUR, ("test_listed",)), cards, Path("out"), ARGS)

    return begin


async def stopped(session: FileSession, why: Any, ready: Callable[[], bool]) -> FileResult:
    """The result of a session that is stopped once it is `ready`."""
    running = asyncio.create_task(session.result())
    while not ready() and not running.done():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # from its report into its wait
    session.stop(why)
    return await running


async def test_a_timeout_ends_also_what_left_the_group_and_says_where_the_test_was(start: Callable[..., FileSession]) -> None:
    session = start("test_hangs.py", HANGS, (0, 1))
    lived = []

    def hangs() -> bool:
        if session.current == "test_hangs":
            lived.append(Path("/proc", Path("orphan").read_text()).exists())
        return bool(lived)

    result = await stopped(session, "timeout", hangs)
    assert lived == [True] and not Path("/proc", Path("orphan").read_text()).exists()
    assert [(case.name, case.outcome) for case in result.cases] == [
        ("test_begins", "passed"), ("test_hangs", "failed"), ("test_comes_after", "not run"),
    ]  # fmt: skip
    line = 1 + HANGS.splitlines().index("    threading.Event().wait()")
    where = f"the file did not end within 3600 s in this test, at test_hangs.py:{line} in test_hangs"
    assert result.cases[1].reason == where and result.cases[1].phase == "call" and result.problem is None
    assert result.cases[2].reason == "its file did not end within 3600 s in test_hangs"
    assert (result.seconds or 0) > 0.2 and result.cards == (0, 1) and result.failed


async def test_a_scheduler_that_fails_leaves_no_process(start: Callable[..., FileSession]) -> None:
    """Else asyncio would kill their keeper as it lets go of it."""
    session = start("test_hangs.py", HANGS)
    scheduler = Scheduler([session.job], CardPool([]), lambda *_: session, slots=1, wait=1.0, say=print, ended=print)
    running = asyncio.create_task(scheduler.run())
    while session.current != "test_hangs" and not running.done():
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled() and not Path("/proc", Path("orphan").read_text()).exists()


@proof
async def test_a_crash_is_the_fault_of_the_test_in_which_it_came(start: Callable[..., FileSession]) -> None:
    text = "import ctypes, os\ndef test_passes(): pass\ndef test_ends():\n    {}\ndef test_after(): pass\n"
    crashes = start("test_segfaults.py", text.format("ctypes.string_at(0)"))
    exits = start("test_exits.py", text.format("os._exit(3)"))
    told = "the file was ended by SIGSEGV in this test, at test_segfaults.py:4 in test_ends"
    for session, why, after in (
        (crashes, told, "its file was ended by SIGSEGV in test_ends"),
        (exits, "the file ended with exit code 3 in this test", "its file ended with exit code 3 in test_ends"),
    ):
        found = [(case.name, case.outcome, case.reason) for case in (await session.result()).cases]
        assert found == [("test_passes", "passed", ""), ("test_ends", "failed", why), ("test_after", "not run", after)]


@proof
async def test_a_session_that_ends_outside_of_its_tests_is_a_problem_of_the_file(start: Callable[..., FileSession]) -> None:
    hangs = start("test_a.py", "import time\nopen('importing', 'w')\ntime.sleep(1000)\n")
    exits = start("test_b.py", "import atexit, os\ndef test_b(): atexit.register(os._exit, 7)\n")
    skips = start("test_c.py", "import pytest\npytest.skip('no card', allow_module_level=True)\n")
    broken = start("test_d.py", "import module_that_is_not_there\n")
    result = await stopped(hangs, "timeout", Path("importing").exists)
    assert result.problem == "did not end within 3600 s outside of its tests, at test_a.py:3 in <module>"
    assert [(case.name, case.outcome) for case in result.cases] == [("test_listed", "not run")]
    result = await exits.result()
    assert result.problem.startswith("ended with exit code 7 outside of its tests: ") and result.counts["passed"] == 1
    result = await skips.result()
    assert [(case.outcome, case.reason) for case in result.cases] == [("skipped", "no card")] and not result.failed
    assert (
        await broken.result()
    ).problem == "cannot be collected: ModuleNotFoundError: No module named 'module_that_is_not_there'"


async def test_ctrl_c_lets_a_session_tear_down_and_each_test_has_its_outcome(start: Callable[..., FileSession]) -> None:
    text = """
import os, time, pytest

@pytest.fixture
def made():
    yield
    open('torn_down', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'] + str('RAY_ADDRESS' in os.environ))

def test_passes(): pass
@pytest.mark.xfail(reason='known')
def test_known(): assert False
def test_waits(made): time.sleep(1000)
def test_after(): pass
"""
    session = start("test_waits.py", text, (5, 3))
    result = await stopped(session, "interrupted", lambda: session.current == "test_waits")
    assert [(case.name, case.outcome) for case in result.cases] == [
        ("test_passes", "passed"), ("test_known", "xfailed"), ("test_waits", "interrupted"), ("test_after", "not run"),
    ]  # fmt: skip
    assert result.problem is None and not result.failed and Path("torn_down").read_text() == "5,3False"


async def test_what_files_declare_is_collected_and_what_cannot_be_run_has_its_result(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    head = "import pytest\nfrom pytest import mark\n"
    for name, text in {
        "two": "pytestmark = [mark.slow, mark.gpus(2, timeout=90)]\n@mark.parametrize('n', ['a::b', 1])\ndef test_a(n): ...\n",
        "some": "@mark.gpus(count=3)\ndef test_b(): ...\nclass TestC:\n    def test_c(self): ...\n",
        "none": "def test_d(): ...\ndef test_e(): ...\n",
        "wrong": "pytestmark = mark.gpus(-1)\ndef test_f(): ...\n",
        "odd": "pytestmark = mark.gpus(1, timeuot=2)\ndef test_g(): ...\n",
        "broken": "def broken(:\n",
        "skipped": "pytest.skip('not here', allow_module_level=True)\n",
    }.items():
        (here / "tests").mkdir(exist_ok=True)
        (here / "tests" / f"test_{name}.py").write_text(head + text)
    jobs, results = await collect(["tests"], ARGS, here / "out", 99.0)
    assert {job.file: (job.targets, job.gpus, job.timeout, job.tests) for job in jobs} == {
        "tests/test_two.py": (("tests/test_two.py",), 2, 90, ("test_a[a::b]", "test_a[1]")),
        "tests/test_some.py": (("tests/test_some.py",), 3, 99.0, ("test_b", "TestC::test_c")),
        "tests/test_none.py": (("tests/test_none.py",), 0, 99.0, ("test_d", "test_e")),
    }
    assert {(one.file, one.problem, one.cases[0].outcome, one.cases[0].reason) for one in results} == {
        (f"tests/test_{name}.py", f"cannot be collected: {why}", "not run", why)
        for name, why in {
            "wrong": "test_f: gpus needs a whole number of cards, 0 or more, not -1",
            "odd": "test_g: gpus(1,), {'timeuot': 2}: expected gpus(COUNT, timeout=SECONDS)",
            "broken": "SyntaxError: invalid syntax",
        }.items()
    } | {("tests/test_skipped.py", None, "skipped", "not here")}
    [job], [] = await collect(["tests/test_none.py::test_e"], ARGS, here / "out", 99.0)
    assert (job.targets, job.tests) == (("tests/test_none.py::test_e",), ("test_e",))
    with pytest.raises(UserError, match=r"not found: .*test_none.py::test_x"):
        await collect(["tests/test_none.py::test_x"], ARGS, here / "out", 99.0)


def test_a_test_that_is_run_again_is_what_it_was_last_and_a_failure_is_the_first_of_its_phases(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    writer = JournalWriter(tmp_path / "journal", pytestconfig)

    def told(*phases: tuple[Any, Any, str]) -> tuple[str, str, str, float]:
        for when, outcome, reason in phases:
            where = ("test_a.py", 1, f"Skipped: {reason}") if outcome == "skipped" else None
            report = pytest.TestReport("test_a.py::a", ("test_a.py", 1, "a"), {}, outcome, where, when, duration=1.0)
            if outcome == "failed":
                report.longrepr = Crash(reason)  # type: ignore[assignment]
            writer.pytest_runtest_logreport(report)
        case = Journal.read(tmp_path / "journal").cases["a"]
        return case.outcome, case.phase, case.reason, case.seconds

    assert told(("setup", "passed", ""), ("call", "failed", "flaky")) == ("failed", "call", "flaky", 2.0)
    assert told(("teardown", "failed", "no socket")) == ("failed", "call", "flaky", 3.0)
    assert told(("setup", "passed", ""), ("call", "passed", ""), ("teardown", "passed", "")) == ("passed", "", "", 3.0)
    assert told(("setup", "skipped", "no card")) == ("skipped", "", "no card", 1.0)
    for text, running in (('{"start": "b', []), ('"}\n', ["b"])):
        with (tmp_path / "journal").open("a") as file:
            file.write(text)
        said = Journal.read(tmp_path / "journal")
        assert (said.pid, list(said.running)) == (os.getpid(), running)


class Crash:
    """The part of a traceback that a journal reads."""

    def __init__(self, message: str) -> None:
        self.reprcrash = self
        self.message = f"{message}\nand more"


def test_what_a_session_gets_of_the_environment() -> None:
    outer = {"RAY_ADDRESS": "x", "PYTEST_XDIST_WORKER": "gw0", "CUDA_VISIBLE_DEVICES": "0,1,2", "HOME": "/me"}
    kept = {"HOME": "/me", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert child_env(outer, (2, 1)) == {**kept, "CUDA_VISIBLE_DEVICES": "2,1"}
    assert child_env(outer, ()) == {**kept, "CUDA_VISIBLE_DEVICES": ""}


def test_no_two_files_write_to_one_place(tmp_path: Path) -> None:
    """Of two that did, each would read the other's tests as its own."""
    files = ("a/b_test.py", "a_b_test.py", "a/b/test.py", "/a/b_test.py", "/a_b_test.py", "test x.py", "test_x.py", "a.py.py")
    places = {file_folder(tmp_path, file) for file in files}
    assert len(places) == len(files) and all(place.is_relative_to(tmp_path / "files") for place in places) and os.sep == "/"
