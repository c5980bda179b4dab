"""The watchdog of an event loop names the call that keeps the loop from turning, while it does."""

import asyncio
import contextlib
import itertools
import json
import logging
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from agentrl.run.trackers import Outlet
from agentrl.utils import event_loop as watchdog
from agentrl.utils.event_loop import EPISODE, LoopWatchdog
from agentrl.utils.threads import TOOLS, DaemonThreads, in_thread

LIMIT = 0.05


async def slow_tool() -> None:
    time.sleep(0.3)


def catastrophic() -> None:
    """Keeps the interpreter's lock for about half a second, three times."""
    for _ in range(3):
        re.search(r"(a+)+$", "a" * 23 + "b")


async def told(said: list[str], lines: int) -> None:
    """Until so many lines were said."""
    end = time.monotonic() + 10
    while len(said) < lines and time.monotonic() < end:
        await asyncio.sleep(0.01)


def test_it_names_the_users_line_and_the_episode_once_and_counts_every_time() -> None:
    said: list[str] = []

    async def play() -> None:
        EPISODE.set("g3.m1.a0")
        await asyncio.create_task(slow_tool())  # a task of the episode's own, as tool calls have

    async def body() -> LoopWatchdog:
        with LoopWatchdog(LIMIT, said.append, "the loop") as dog:
            await asyncio.create_task(play())
            await told(said, 1)
            await asyncio.create_task(play())
            await asyncio.sleep(4 * LIMIT)
        return dog

    dog = asyncio.run(body())
    line = slow_tool.__code__.co_firstlineno + 1
    assert len(said) == 1 and re.match(
        rf"the loop stood still for 0\.[23]\d s in tests/test_watchdog\.py:{line} in slow_tool "
        r"\(`time\.sleep\(0\.3\)`\) \(episode g3\.m1\.a0\)",
        said[0],
    ), said
    # Twice 0.3 s, less what passed of each before the sign of life was asked for (0.05 s at most), and no more.
    row = dog.read()
    assert 0.4 < row["loop/blocked_s"] < 0.75 and 0.2 < row["loop/longest_s"] < 0.4, row

    assert dog.read() == {"loop/blocked_s": 0.0, "loop/longest_s": 0.0}, "each reading begins anew"


def test_agentrls_own_code_is_logged_and_not_said(caplog: pytest.LogCaptureFixture) -> None:
    """The user can change nothing about it; the count has it all the same."""
    said: list[str] = []
    scope: dict[str, Any] = {"time": time}
    code = compile("async def own():\n    time.sleep(0.6)", str(Path(watchdog.__file__).parent / "made_up.py"), "exec")
    exec(code, scope)

    async def body() -> LoopWatchdog:
        with LoopWatchdog(LIMIT, said.append, "the loop") as dog:
            await asyncio.create_task(scope["own"]())
            await asyncio.sleep(4 * LIMIT)
        return dog

    with caplog.at_level(logging.INFO):
        dog = asyncio.run(body())
    assert said == [] and "made_up.py:2 in own" in caplog.text
    assert dog.read()["loop/blocked_s"] > 0.2, "0.6 s, less what a busy machine takes before the sign of life is asked for"


@pytest.mark.parametrize("thread", [False, True], ids=["on the loop", "in a thread"])
def test_a_call_that_keeps_the_interpreters_lock_is_named_as_well(thread: bool) -> None:
    """The watchdog's own thread stands still with it, and the loop too if the call is in another thread."""
    said: list[str] = []

    async def body() -> None:
        with LoopWatchdog(LIMIT, said.append):
            await asyncio.sleep(0.02)
            if thread:
                await TOOLS.call("pattern", catastrophic)
            else:
                catastrophic()
            await told(said, 1)

    asyncio.run(body())
    assert len(said) == 1 and re.search(r"in catastrophic \(`(re\.search\(|for _ in)", said[0]), said
    assert "then in re/__init__.py" in said[0], said


def test_a_thread_that_only_waits_for_work_is_not_named() -> None:
    """Beside an idle thread of the tools', one of a tracker, and one of a library, nothing keeps the lock: there is no line to
    name."""
    looks, outlet = watchdog._StackSamples(), Outlet("idle", Mock(), print)

    async def body() -> None:
        await TOOLS.call("once", int)
        await in_thread("files", int)
        await asyncio.sleep(0.05)
        looks.look(-1)  # as if the loop's own thread were gone

    thread = threading.Thread(target=lambda: asyncio.run(body()))
    thread.start()
    thread.join()
    outlet.finish("done", {})
    outlet.join()
    assert not looks.found, looks.found
    assert {one._serve.__qualname__ for one in (DaemonThreads, Outlet)} == watchdog._IDLE


def test_a_loop_that_turns_is_left_alone_and_so_is_one_without_a_limit() -> None:
    said: list[str] = []

    async def body(limit: float) -> LoopWatchdog:
        with LoopWatchdog(limit, said.append) as dog:
            for _ in range(40):
                time.sleep(0.005)  # a third of a second of work, in short calls
                await asyncio.sleep(0)
            if limit == 0:
                await slow_tool()
        return dog

    for limit in (0.15, 0.0):
        dog = asyncio.run(body(limit))
        assert said == [] and dog.read()["loop/blocked_s"] == 0.0
        assert "agentrl-watchdog" not in {thread.name for thread in threading.enumerate()}, "its thread has ended"


def test_time_without_a_processor_is_not_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.3 s of silence, of which other programs had the processor for 0.28: nothing blocked the loop for 0.05 s."""
    readings = itertools.count()
    monkeypatch.setattr(watchdog, "_seconds_ready", lambda threads: [0.0, 0.28 * next(readings)])
    said: list[str] = []

    async def body() -> dict[str, float]:
        with LoopWatchdog(LIMIT, said.append) as dog:
            await slow_tool()
            await asyncio.sleep(2 * LIMIT)
        return dog.read()

    assert asyncio.run(body()) == {"loop/blocked_s": 0.0, "loop/longest_s": 0.0} and said == []


def test_a_call_that_does_not_end_is_told_before_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "REPORT_AFTER_S", 0.1)

    def tells() -> bool:
        return any("and still does" in record.message and ".stuck (`time.sleep" in record.message for record in caplog.records)

    async def stuck() -> bool:
        end = time.monotonic() + 10
        while not tells() and time.monotonic() < end:
            time.sleep(0.01)
        return tells()

    async def body() -> bool:
        with LoopWatchdog(LIMIT, lambda line: None):
            return await stuck()

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(body()), "told while it ran"


def test_whose_line_is_named() -> None:
    """The innermost line of the user's, however deep the library below it; else the innermost of this package's."""

    class Looking:
        def __init__(self) -> None:
            self.stack: list[object] = []

        def default(self, _: object) -> str:
            frame = sys._getframe()
            while frame is not None and frame.f_code is not watchdog._RUN:
                self.stack.append(frame)
                frame = frame.f_back
            return ""

    looking = Looking()
    json.dumps([object()], default=looking.default)
    stack = list(looking.stack)
    place, inner = watchdog._place(stack)
    assert place is not None and place.function.endswith("Looking.default") and inner is None
    place, inner = watchdog._place(stack[1:])  # as if the library itself were at work
    assert place is not None and place.function == "test_whose_line_is_named" and inner is not None
    assert inner.file.endswith(("json/encoder.py", "json/__init__.py")) and inner.owner == "library"
    assert watchdog._owner(watchdog.__file__) == "package"
    assert watchdog._owner(str(watchdog._PACKAGE / "_shelf" / "envs" / "sql" / "env.py")) == "user"
    assert watchdog._owner(__file__) == "user" and watchdog._owner("<string>") == "library"


@pytest.mark.parametrize(("limit", "lines"), [(0.05, 1), (2.0, 0)])
def test_a_rollout_names_what_blocks_its_loop(limit: float, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an environment whose setup keeps the loop from turning for 0.3 s."""
    from agentrl.config.load import config_from
    from agentrl.run import evaluate as rollout
    from agentrl.run.assembly import RunStart

    async def blocking(*args: Any, **kwargs: Any) -> list[Any]:
        time.sleep(0.3)
        await asyncio.sleep(0.1)
        return []

    async def nothing(*args: Any) -> None:
        pass

    said: list[str] = []
    parts = SimpleNamespace(envs=[SimpleNamespace(name="x")], player=None, starting=str)
    session: Any = SimpleNamespace(start=nothing, parts=parts)
    request = rollout.RolloutRequest("rollout", "a model", 1, 1, "heldout", tmp_path)
    display: Any = SimpleNamespace(warn=said.append, doing=lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(rollout, "run_tasks", blocking)
    monkeypatch.setattr(rollout, "SLOW_LOOP", limit)
    config = config_from({"env": {"id": "key_value"}, "model": {"init": {}}}, [])
    asyncio.run(rollout.RolloutJob(RunStart(config), request, display).play(session, []))
    assert len(said) == lines
