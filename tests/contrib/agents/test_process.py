"""The processes of an agent end as a whole, however they hide and however their starter ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from agentrl.contrib.agents.programs import AgentProcess, Output

ENV = {"PATH": os.environ["PATH"]}

# A child, a grandchild that left the process group and the session by a double fork, and one that ignores SIGTERM.
HIDES = """
import os, signal, subprocess, sys, time
def sleeper(kind):
    return subprocess.Popen([sys.executable, "-S", "-c",
        "import os, signal, sys, time\\n"
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" if kind == "deaf" else "")
        + ("if os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n" if kind == "detached" else "")
        + f"open(sys.argv[1] + '.{kind}', 'w').write(str(os.getpid()))\\ntime.sleep(600)", sys.argv[1]])
kinds = ["plain", "detached", "deaf"]
started = [sleeper(kind) for kind in kinds]
while not all(os.path.exists(f"{sys.argv[1]}.{kind}") and open(f"{sys.argv[1]}.{kind}").read() for kind in kinds):
    time.sleep(0.01)
print("ready", flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
"""


def pids(note: Path) -> list[int]:
    return [int(file.read_text()) for file in note.parent.glob(f"{note.name}.*")]


def gone(found: list[int], within: float) -> list[int]:
    """Those that still run after so many seconds."""
    until = time.monotonic() + within
    while time.monotonic() < until and any(map(runs, found)):
        time.sleep(0.01)
    return [pid for pid in found if runs(pid)]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_surely(found: list[int]) -> None:
    """So that a red test leaves nothing behind either."""
    for pid in filter(runs, found):
        os.kill(pid, signal.SIGKILL)


def ended(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_a_command_that_is_not_there_ends_with_127_and_its_name() -> None:
    async def body() -> tuple[int, str]:
        process = await AgentProcess.start(["no-such-agent"], ENV)
        return await process.wait(), process.stderr.text()

    assert ended(body()) == (127, "no-such-agent: No such file or directory\n")


@pytest.mark.parametrize("how", ["it ends", "it is ended", "its starter is killed"])
def test_no_process_of_a_command_outlives_it(how: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = [sys.executable, "-S", "-c", HIDES, str(note), "leave" if how == "it ends" else "stay"]

    async def body() -> None:
        process = await AgentProcess.start(command, ENV)
        while "ready" not in process.stdout.text():
            await asyncio.sleep(0.01)
        if how == "it is ended":
            assert len([pid for pid in pids(note) if runs(pid)]) == 3
        assert len(pids(note)) == 3
        ending = asyncio.create_task(process.end() if how == "it is ended" else process.wait())
        # The keeper's own end, seen without its output, which stays open for as long as anybody who was left holds it.
        while process._process.returncode is None:
            await asyncio.sleep(0.01)
        assert gone(pids(note), 0) == []
        await ending

    try:
        if how == "its starter is killed":
            starter = textwrap.dedent(f"""
                import asyncio
                from agentrl.contrib.agents.programs import AgentProcess
                async def body():
                    process = await AgentProcess.start({command!r}, {ENV!r})
                    while "ready" not in process.stdout.text():
                        await asyncio.sleep(0.01)
                    print("ready", flush=True)
                    await process.wait()
                asyncio.run(body())
            """)
            driver = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE)
            assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            assert gone(pids(note), 1.0) == []
        else:
            ended(body())
    finally:
        end_surely(pids(note))


def test_of_a_long_output_the_beginning_and_the_end_are_kept() -> None:
    output = Output(head=4, tail=6)
    for piece in (b"ab", b"cdef", b"ghijklmnop"):
        output.add(piece)
    assert output.text() == "abcd\n[6 bytes left out]\nklmnop"
    short = Output(head=4, tail=6)
    short.add(b"abcdefghij")
    assert short.text() == "abcdefghij"


def test_a_start_that_is_cancelled_leaves_nothing_whatever_had_begun(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    # Away from the pipes, for whose end asyncio waits: one that is left is to be found below, and not to hang this test.
    command = ["sh", "-c", f"sleep 600 >/dev/null 2>&1 & echo $! >> '{note}'; wait"]

    def begun() -> list[int]:
        return [int(line) for line in note.read_text().split()] if note.exists() else []

    async def body() -> None:
        for delay in (0.0, 0.002, 0.01, 0.02, 0.03, 0.05):
            start = asyncio.create_task(AgentProcess.start(command, ENV))
            # Blocking, so that the command gets on while nobody here notices that it has started.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(delay * 4)
            start.cancel()
            await asyncio.wait([start], timeout=10)
            assert start.cancelled()
        # A start that nobody waits for gets to its end, since asyncio cannot cancel one halfway while its command runs.
        if halfway := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(halfway, timeout=2)
        try:
            assert gone(begun(), 1.0) == []
        finally:
            end_surely(begun())

    ended(body())
    assert begun()
