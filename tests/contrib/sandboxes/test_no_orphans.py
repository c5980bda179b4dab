"""However an episode or the process that plays it ends, no process and no folder of its sandboxes is left."""

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agentrl.contrib.sandboxes.contract import SANDBOXES
from agentrl.data.trajectory import StopReason
from agentrl.env import Message, ToolCall
from agentrl.env.catalog import make_env
from tests.conftest import proof
from tests.contrib.sandboxes.test_providers import tiny_image
from tests.waits import until

_NUMBERS = itertools.count(os.getpid() % 10000 * 100)


def marked(mark: str) -> list[int]:
    """The processes whose command line has the mark."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if any(mark in part for part in line) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def name_of(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).name()
    return ""


@pytest.fixture
def mark() -> str:
    """A length of sleep that only this test uses."""
    return f"300.{next(_NUMBERS):07}"


def test_an_episode_cancelled_in_the_middle_of_a_command_leaves_nothing(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for the folders of sandboxes

    async def main() -> None:
        env = make_env("harbor")
        await env.areset(seed=0)
        call = ToolCall("shell", {"command": f"(trap '' TERM HUP INT; sleep {mark}) & nohup sleep {mark} & sleep {mark}"})
        step = asyncio.ensure_future(env.astep(Message("assistant", tool_calls=(call,))))
        while len(marked(f"{mark}")) < 3:
            await asyncio.sleep(0.02)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert env.trajectory.stop is StopReason.CANCELLED
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())
    assert until(lambda: not marked(mark), 5.0)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


DRIVER = """
import asyncio, signal, sys
from agentrl.contrib.sandboxes import SANDBOXES, SandboxSpec

signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored, if a shell runs the tests in the background

async def main():
    provider = SANDBOXES.bind(sys.argv[1], {})()
    boxes = [await provider.start(SandboxSpec(image=sys.argv[3] or None)) for _ in range(2)]
    slow = f"(trap '' TERM HUP INT; sleep {sys.argv[2]}) & nohup sleep {sys.argv[2]} >/dev/null 2>&1 & sleep {sys.argv[2]}"
    await asyncio.gather(*(box.exec(slow, timeout=300) for box in boxes))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "provider",
    ["local", pytest.param("bubblewrap", marks=proof), pytest.param("podman", marks=proof), pytest.param("docker", marks=proof)],
)
@pytest.mark.parametrize("how", [signal.SIGKILL, *(pytest.param(how, marks=proof) for how in (signal.SIGINT, signal.SIGTERM))])
def test_a_driver_that_ends_takes_its_sandboxes_with_it(provider: str, how: signal.Signals, mark: str, tmp_path: Path) -> None:
    made = SANDBOXES.bind(provider, {})()
    if reason := made.unavailable():
        pytest.skip(reason)
    lasting = "images" in SANDBOXES.entry(provider).traits
    image = tiny_image(provider) if lasting else ""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, provider, mark, image], env=env, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        # A shell of an image may sleep itself: there the clients' processes are counted as well.
        assert until(lambda: len(marked(mark)) >= 7 if image else sum(name_of(pid) == "sleep" for pid in marked(mark)) == 6)
        driver.send_signal(how)
        driver.wait(20)
        assert until(lambda: not marked(mark), 20.0), [name_of(pid) for pid in marked(mark)]
    finally:
        driver.kill()
    if how is signal.SIGINT:
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("agentrl-")]
    if lasting:
        listed = [provider, "ps", "-q", "--filter", "name=agentrl-"]
        assert until(lambda: not subprocess.run(listed, capture_output=True, check=True).stdout.strip())
