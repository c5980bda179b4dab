"""Threads for functions that may hang, and deadlines that only count what the event loop saw."""

import asyncio
import contextvars
import logging
import sys
import threading
import time
from typing import Any

import pytest

from agentrl.data.trajectory import ToolCall
from agentrl.env import Toolbox, tool
from agentrl.utils import event_loop as deadline
from agentrl.utils import threads as executors
from agentrl.utils.errors import EnvError, HungError, ToolTimeoutError
from agentrl.utils.event_loop import LateError, in_time, within
from agentrl.utils.threads import TOOLS, DaemonThreads


async def test_calls_beyond_the_abandoned_ones_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hang; the third is refused at once, other tools go on, and so does this one when the threads have ended."""
    monkeypatch.setattr(executors, "MOST_ABANDONED", 2)
    release, begun = threading.Event(), []

    @tool(timeout=0.3)
    def stuck() -> str:
        begun.append(1)
        release.wait(30)
        return "free"

    @tool
    def fine() -> int:
        return 1

    box = Toolbox([stuck, fine])
    for _ in range(2):
        with pytest.raises(ToolTimeoutError):
            await box.call(ToolCall("stuck", {}))
    with pytest.raises(HungError, match=r"tool stuck: 2 calls hang in threads that cannot be killed"):
        await box.call(ToolCall("stuck", {}))
    assert len(begun) <= 2, "at once: it was not begun"
    assert (await box.call(ToolCall("fine", {}))).value == 1
    release.set()
    while TOOLS._abandoned["stuck"]:
        await asyncio.sleep(0.01)
    assert str((await box.call(ToolCall("stuck", {}))).value) == "free"


async def test_no_more_threads_run_at_once_than_there_are_slots_and_the_wait_is_not_the_tools_time() -> None:
    """24 calls of 0.05 s on two slots take 0.6 s, and none of them is late at 0.5 s."""
    threads, running, most = DaemonThreads("test", 2), 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1

    async def one() -> None:
        async with threads.slot():
            await within(0.5, threads.call("work", work), "work")

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(24)))
    assert time.monotonic() - began >= 0.59 and most == 2


async def test_calls_that_begin_together_run_together_and_the_loop_waits_for_no_threads_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty calls that wait for each other all get a thread; the loop's own starts the first at most."""
    monkeypatch.setattr(executors, "_IDLE_S", 0.05)
    threads, together, starters = DaemonThreads("crew", 64), threading.Barrier(20, timeout=30), list[int]()
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (starters.append(threading.get_ident()), start(self))[1])

    def named() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("agentrl-crew")}

    def meet() -> str:
        together.wait()
        return threading.current_thread().name

    found = await asyncio.gather(*(threads.call("meet", meet) for _ in range(20)))
    assert starters.count(threading.get_ident()) == 1 and len(starters) >= 20
    assert await threads.call("again", lambda: threading.current_thread().name) == "agentrl-crew again"
    assert starters.count(threading.get_ident()) == 1, "a thread was free"
    end = time.monotonic() + 30
    while (there := sum(thread.name == "agentrl-crew" for thread in threading.enumerate())) > 1 and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert there == 1 and named() == {"agentrl-crew"}
    assert found == ["agentrl-crew meet"] * 20


def test_the_interpreters_lock_is_handed_on_after_a_millisecond_or_what_the_user_says() -> None:
    before = sys.getswitchinterval()
    try:
        for given, wanted in ((0.005, 0.001), (0.0002, 0.0002)):
            sys.setswitchinterval(given)
            executors.share_the_lock()
            assert sys.getswitchinterval() == pytest.approx(wanted)
    finally:
        sys.setswitchinterval(before)


async def test_a_tool_that_waits_for_its_own_concurrency_is_not_late() -> None:
    """Twelve calls of 0.05 s, one at a time, with 0.5 s each: the last one waits 0.55 s before it begins."""

    @tool(timeout=0.5, concurrency=1)
    async def slow() -> int:
        await asyncio.sleep(0.05)
        return 1

    results = await Toolbox([slow]).call_all([ToolCall("slow", {}, str(n)) for n in range(12)])
    assert [result.value for result in results] == [1] * 12 and all(result.seconds < 0.5 for result in results)


async def test_what_a_thread_raises_and_sees_is_the_callers() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")

    name.set("episode 7")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await TOOLS.call("ends", next, iter([]))
    with pytest.raises(ZeroDivisionError):
        await TOOLS.call("breaks", lambda: 1 // 0)
    assert await TOOLS.call("sees", name.get) == "episode 7"


@pytest.mark.parametrize("kind", ["thread", "loop"])
async def test_a_blocked_event_loop_makes_nobody_late(kind: str) -> None:
    """16 calls of 0.05 s with 0.5 s each, while something else blocks the loop for 1 s: none of them is late."""

    @tool(name="work", timeout=0.5)
    def in_thread() -> int:
        time.sleep(0.05)
        return 1

    @tool(name="work", timeout=0.5)
    async def on_loop() -> int:
        for _ in range(5):
            await asyncio.sleep(0.01)
        return 1

    box = Toolbox([in_thread if kind == "thread" else on_loop])
    calls = [asyncio.create_task(box.call(ToolCall("work", {}, str(n)))) for n in range(16)]
    await asyncio.sleep(0.02)
    time.sleep(1.0)
    assert [getattr(result, "value", result) for result in await asyncio.gather(*calls, return_exceptions=True)] == [1] * 16


async def test_a_deadline_ends_what_is_late_and_leaves_others_errors_alone() -> None:
    seen: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cancelled")

    async def own() -> None:
        raise TimeoutError("the database")

    began = time.monotonic()
    with pytest.raises(LateError, match=r"thing: not finished within 0\.1 s"):
        await within(0.1, forever(), "thing")
    assert 0.09 < time.monotonic() - began < 30 and seen == ["cancelled"]
    with pytest.raises(TimeoutError, match="database") as caught:
        await within(0.1, own(), "thing")
    assert not isinstance(caught.value, LateError)
    task = asyncio.create_task(within(60, forever(), "thing"))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and seen == ["cancelled", "cancelled"]


async def test_work_that_swallows_its_cancellation_is_let_go(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(deadline.end, "__defaults__", (0.1,))

    async def deaf(release: asyncio.Event) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    with caplog.at_level(logging.WARNING):
        release = asyncio.Event()
        with pytest.raises(LateError):
            await asyncio.wait_for(within(0.05, deaf(release), "the deaf one"), 60)
        release.set()
    assert "the deaf one did not end within 0.1 s of being cancelled and is abandoned" in caplog.text


async def test_what_is_cancelled_has_its_grace_in_time_in_which_the_loop_listened(caplog: Any) -> None:
    """It ends after three turns of a loop that others hold up for 0.3 s each: 0.9 s, of a grace of 0.5."""

    async def ends() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(3):
                await asyncio.sleep(0.01)
                time.sleep(0.3)

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(ends())
        await asyncio.sleep(0)
        await deadline.end(task, "it", 0.5)
        assert task.done()
    assert "abandoned" not in caplog.text


async def test_who_waits_goes_on_one_turn_after_the_end_whenever_the_clock_is_looked_at() -> None:
    """The embedded engine steps once a turn of the loop: a turn more or less, and another step has the next request."""

    async def turns_after(last: int) -> int:
        """Turns of 1.7 ms from the end of what is awaited, in turn `last`, to the waiter's."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn = 0

        async def turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                if turn == last:
                    future.set_result(None)
                time.sleep(0.0017)  # as a step of the engine does
                await asyncio.sleep(0)

        spinning = asyncio.ensure_future(turns())
        assert await in_time(future, lambda passed: 60.0, longest=0.005)
        spinning.cancel()
        return turn - last

    assert [await turns_after(last) for last in range(1, 25)] == [1] * 24


def test_a_deadline_is_told_of_all_the_time_that_went_by_once() -> None:
    told: list[float] = []

    async def run(seconds: float, limit: float) -> bool:
        told.clear()

        def spend(passed: float) -> float:
            told.append(passed)
            return limit - sum(told)

        task = asyncio.ensure_future(asyncio.sleep(seconds))
        try:
            return await in_time(task, spend, longest=0.02)
        finally:
            task.cancel()

    began = time.monotonic()
    assert asyncio.run(run(0.11, 60.0))
    took = time.monotonic() - began
    assert told[0] == 0.0 and 0.1 <= sum(told) <= took
    assert not asyncio.run(run(60.0, 0.1))
    assert 0.1 <= sum(told) < 1.0


async def test_a_fault_while_time_is_counted_is_raised_to_who_waits() -> None:
    calls = 0

    def spend(passed: float) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise EnvError("gone")
        return 0.1

    with pytest.raises(EnvError, match="gone"):
        await in_time(asyncio.ensure_future(asyncio.sleep(60)), spend)
