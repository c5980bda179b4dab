"""Tools that hang keep nobody else from the threads: what shares a process with them goes on."""

import asyncio
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster.launch import InlinePending
from agentrl.config.schema import CheckpointConfig, WeightsConfig
from agentrl.data.trajectory import Task, ToolCall, Trajectory
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.env import Toolbox, tool
from agentrl.reward import compile_spec
from agentrl.run.session import Saver
from agentrl.trainer.publish import Publisher
from tests.weights.publish_parts import trained


class Written:
    """A learner whose files are all there."""

    async def is_saved(self) -> bool:
        return True

    async def check_saved(self, folder: Path) -> None: ...


def saver(folder: Path) -> Any:
    files: Any = SimpleNamespace(checkpoints=folder, sync_metrics=lambda: None)
    learner: Any = Written()
    return Saver(CheckpointConfig(), {}, files, learner, None, print, 60.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("hung", [6, 100])
def test_hung_tools_leave_commits_publishes_updates_and_replays_alone(tiny: str, tmp_path: Path, hung: int) -> None:
    """Six are the threads of asyncio's own pool on two cores; more than any pool has are no different."""
    release, begun = threading.Event(), threading.Semaphore(0)

    @tool(timeout=1.0, on_timeout="answer")
    def hang() -> str:
        begun.release()
        release.wait(60)
        return "late"

    @tool
    def quick() -> int:
        return 7

    async def run() -> list[Any]:
        box = Toolbox([hang, quick])
        engine, actors = EmbeddedEngine(tiny), trained(tiny, steps=0)
        await engine.start()
        publisher = Publisher(actors, engine, WeightsConfig(route="memory", bucket_mib=0.01))
        saving, worker = saver(tmp_path), SimpleNamespace(threads=1, dispatch_table={}, update=lambda: "updated")
        call = SimpleNamespace(ranks=[0], batch=None, args=(), kwargs={})
        folder = saving._checkpoints.begin(3)
        (folder / "driver.json").write_text("{}")
        late = await asyncio.gather(*(box.call(ToolCall("hang", {}, str(n))) for n in range(hung)))
        assert {result.error for result in late} == {"timeout"}
        update: Any = InlinePending(SimpleNamespace(workers=[worker], turn=nullcontext()), "update", call)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(5):
                await saving._finish(3, folder, None)
                await publisher.send(1)
                updated = await update.await_()
                scorer = compile_spec({"agentrl_reward": 1, "name": "one", "root": {"use": "episode.stopped"}})
                scorer._blocking = True
                score = await scorer.ascore(Trajectory("test/E-v0", Task("t", 0)))
                answer = await box.call(ToolCall("quick", {}))
        finally:
            release.set()
            await publisher.close()
            await engine.close()
        return [saving._checkpoints.newest().name, updated, score.value, answer.value]

    assert asyncio.run(run()) == ["step_000003", {0: "updated"}, 1.0, 7]
    assert all(begun.acquire(timeout=0) for _ in range(hung))  # each of them had a thread


def test_a_process_ends_although_its_tools_and_specs_hang() -> None:
    code = """
import asyncio, threading
from agentrl.utils.threads import SCORING
from agentrl.env import Toolbox, tool
from agentrl.data.trajectory import ToolCall

@tool(timeout=0.1, on_timeout="answer")
def hang() -> str:
    threading.Event().wait()

async def main():
    print((await Toolbox([hang]).call(ToolCall("hang", {}))).error)
    try:
        async with asyncio.timeout(0.1):
            await SCORING.call("slow", threading.Event().wait)
    except TimeoutError:
        print("late")

asyncio.run(main())
print("over", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.split()) == (0, ["timeout", "late", "over"]), done.stderr
