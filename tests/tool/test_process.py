"""Tools in child processes: they answer, they can be killed, and what cannot run there is refused by name."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.trajectory import ToolCall
from agentrl.env import Tool, Toolbox, tool
from agentrl.env.catalog import load_tools
from agentrl.utils.errors import EnvError, ToolTimeoutError
from agentrl.utils.threads import TOOLS
from tests.tool.process_tools import fails, nap, refuse, sleep, spin, square, wrapped
from tests.waits import runs, until


def call(item: Tool, **arguments: Any) -> Any:
    return asyncio.run(Toolbox([item]).call(ToolCall(item.name, arguments)))


def test_a_call_runs_in_another_process_which_serves_the_next_one_too() -> None:
    first, second = (call(square, n=3).value, call(square, n=-4))
    again = call(square, n=5).value
    assert first[0] == 9 and first[1] != os.getpid()
    assert second.error == "tool_error" and "-4 is negative" in second.content
    assert again == [25, first[1]]
    assert call(wrapped, n=4).value == 8  # a plain function around an async one, as decorators make
    closed = call(refuse)  # with an error that pickle cannot make again
    assert closed.error == "tool_error" and "no: closed" in closed.content


@pytest.mark.parametrize("hang", [spin, sleep], ids=["spins", "sleeps"])
def test_a_call_that_hangs_is_killed_and_leaves_no_thread(hang: Tool) -> None:
    pid = call(square, n=2).value[1]  # the child that gets the next call
    with pytest.raises(ToolTimeoutError, match=f"tool {hang.name}: no answer within 0.5 s"):
        call(hang)
    assert until(lambda: not runs(pid), 5) and until(lambda: TOOLS._abandoned[hang.name] == 0, 2)
    fresh = call(square, n=2).value
    assert fresh[0] == 4 and fresh[1] != pid


@pytest.mark.parametrize(("how", "why"), [
    ("dies", ": its process ended with exit code 3"), ("leaves", r" failed: RuntimeError: fails called sys\.exit\(5\)"),
    ("answers what cannot travel", " failed: TypeError: what it returned cannot be pickled"),
])  # fmt: skip
def test_a_process_that_ends_or_answers_what_cannot_travel_is_a_fault_of_the_environment(how: str, why: str) -> None:
    with pytest.raises(EnvError, match=f"tool fails{why}"):
        call(fails, how=how)


def test_a_child_that_died_between_two_calls_gets_no_call() -> None:
    pid = call(square, n=1).value[1]
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not runs(pid), 5)
    answer = call(square, n=1).value
    assert answer[0] == 1 and answer[1] != pid


def test_ctrl_c_does_not_reach_a_child() -> None:
    """The terminal sends it to every process of the run, which then ends its step: that needs its tools."""
    pid = call(square, n=1).value[1]

    async def interrupted() -> Any:
        napping = asyncio.ensure_future(Toolbox([nap]).call(ToolCall("nap", {})))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGINT)
        return (await napping).value

    assert asyncio.run(interrupted()) == pid


def test_a_content_file_of_a_shelf_can_ask_for_it(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("TWO = 2\n")
    (tmp_path / "twice.py").write_text(
        "from agentrl.env import tool\nfrom .helper import TWO\n\n"
        "@tool(process=True, timeout=20)\ndef twice(n: int) -> int:\n    return TWO * n\n"
    )
    [made] = load_tools(tmp_path / "twice.py")
    assert call(made, n=21).value == 42


def test_what_a_child_cannot_import_is_refused_by_name() -> None:
    def inner(n: int) -> int:
        return n

    async def waits() -> None: ...

    with pytest.raises(TypeError, match=r"tool inner: process=True needs a plain function of a module.*inside a function"):
        tool(process=True)(inner)
    with pytest.raises(TypeError, match=r"tool waits: .*a coroutine function"):
        tool(process=True)(waits)
    with pytest.raises(TypeError, match=r"tool m: .*a method"):

        class Env:
            @tool(process=True)
            def m(self) -> int:
                return 1
