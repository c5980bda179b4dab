"""Work that swallows its cancellation does not keep a run from ending."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from agentrl.utils.event_loop import end, run_loop

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def polite():
    try:
        await asyncio.sleep(60)
    finally:
        print("ended")

async def train():
    beside = asyncio.create_task(polite())
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task, "the agent", 0.1)
    if len(sys.argv) > 1:
        raise ValueError("failed")
    return 7

try:
    print(run_loop(train(), grace=0.2))
except ValueError as fault:
    print(fault)
print("summary", flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(("args", "said"), [([], "7"), (["fail"], "failed")])
def test_a_run_ends_although_a_task_does_not(args: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, timeout=10)
    assert (done.stdout.split(), done.returncode) == (["ended", said, "summary"], 3), done.stderr
    assert "1 tasks did not end within 0.2 s" in done.stderr
