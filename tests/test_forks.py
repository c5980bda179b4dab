"""A forked process has none of its parent's threads: pools, loops and held locks must work in it."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentrl.config.schema import JudgeConfig
from agentrl.contrib.judges.client import Judge
from agentrl.contrib.judges.leaf import Verdict
from agentrl.contrib.math_equal import leaf as math_leaf
from agentrl.contrib.remote_envs import client as link
from agentrl.contrib.suites import benchmarks as inplace
from agentrl.contrib.suites import foreign, suite
from agentrl.contrib.toolkit import branches as branch
from agentrl.data.trajectory import Message, ToolCall
from agentrl.env.catalog import make_env
from agentrl.env.spaces import MessagesSpace, ToolCallSpace
from agentrl.render import litellm_calls
from agentrl.utils import child_process as tool_process
from agentrl.utils import parsing as python_source
from agentrl.utils import redaction, threads
from agentrl.utils.threads import TOOLS, in_thread


def forked(work: Callable[[], object], seconds: int = 20) -> bool:
    """Whether `work` ends in a forked process, without an error."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("purpose", ["batch", "engine", "files", "load", "sandbox", "text", "tools", "update", "weights"])
def test_a_pool_that_the_parent_used(purpose: Any) -> None:
    def pid() -> int:
        return asyncio.run(TOOLS.call("pid", os.getpid) if purpose == "tools" else in_thread(purpose, os.getpid))

    assert pid() == os.getpid()

    def there() -> None:
        assert pid() == os.getpid() and pid() == os.getpid()
        assert forked(pid), "and a fork of the fork"

    assert forked(there)
    assert pid() == os.getpid()


LOCKS = {
    "tools": lambda: TOOLS._lock, "background": lambda: threads._lock, "branch": lambda: branch._LOCK,
    "foreign": lambda: foreign._LOCK, "inplace": lambda: inplace._LOCK, "suite": lambda: suite._LOCK,
    "python_source": lambda: python_source._LOCK, "litellm": lambda: litellm_calls._IMPORTING,
    "redaction": lambda: redaction._lock, "math_equal": lambda: math_leaf.IDLE.mutex,
}  # fmt: skip


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_another_thread_held(name: str) -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCKS[name]():
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:

        def there() -> None:
            with LOCKS[name]():
                pass

        assert forked(there)
    finally:
        go.set()
        thread.join()


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    def there() -> None:
        suite._LOCK.release()
        with pytest.raises(RuntimeError):
            suite._LOCK.release()

    with suite._LOCK:
        assert forked(there)


def test_the_loops_of_a_thread_of_their_own() -> None:
    async def pid() -> int:
        return os.getpid()

    def both() -> None:
        assert asyncio.run_coroutine_threadsafe(pid(), threads.background().loop).result(10) == os.getpid()
        assert link._submit(pid()).result(10) == os.getpid()

    both()
    assert forked(both)


def test_a_judge_that_the_parent_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "_attempts", lambda self, key, request: Verdict({"by": os.getpid()}))
    judge, request = Judge(JudgeConfig()), type("Request", (), {"model": "m", "schema": {}})()
    assert judge.ask("a", request).value == {"by": os.getpid()}
    judge._running["c"] = threads.threads(1, "stuck").submit(threading.Event().wait, 1)  # asked by a thread of the parent's

    def there() -> None:
        assert judge.ask("b", request).value == {"by": os.getpid()} == judge.ask("c", request).value

    assert forked(there)


def module_pid() -> int:
    return os.getpid()


def test_processes_that_the_parent_keeps_are_not_asked(tmp_path: Path) -> None:
    place = tool_process.function_ref(module_pid, "pid")

    async def run() -> int:
        async with tool_process.child_for("pid", place) as child:
            return await child.call("pid", place, {})

    script = tmp_path / "script.py"
    script.write_text("import os\ndef pid():\n    return os.getpid()\n")
    held = foreign.foreign("python", script)
    mine, theirs = asyncio.run(run()), held.ask("pid")
    assert asyncio.run(run()) == mine and held.ask("pid") == theirs

    def there() -> None:
        assert asyncio.run(run()) != mine
        assert held.ask("pid") != theirs
        held.close()

    assert forked(there)
    assert asyncio.run(run()) == mine and held.ask("pid") == theirs
    held.close()


def test_a_vector_environment_after_the_same_environment_here() -> None:
    """As docs/environments.md recommends it: it waited for 600 s."""

    def play(env: Any) -> Any:
        env.reset(seed=1)
        return env.step('<tool_call>\n{"name": "run", "arguments": {"code": "print(40 + 2)"}}\n</tool_call>')[0]

    env = make_env("python", scorer=None)
    alone = play(env)
    env.close()
    vector = gymnasium.vector.AsyncVectorEnv([lambda: make_env("python", scorer=None)] * 2, shared_memory=False)
    try:
        vector.reset(seed=[1, 1])
        vector.step_async(['<tool_call>\n{"name": "run", "arguments": {"code": "print(40 + 2)"}}\n</tool_call>'] * 2)
        found, *_ = vector.step_wait(timeout=60)
        assert list(found) == [alone, alone]
    finally:
        vector.close(terminate=True)


def test_samples_of_the_spaces_come_back_from_json() -> None:
    """Space.from_jsonable is the inverse of to_jsonable: it gave rows in place of messages."""
    env = make_env("key_value", scorer=None)
    env.reset(seed=1)
    call = ToolCall("get", {"key": "k", "more": None}, id="c1")
    turns = ["text", Message("assistant", "", (call,), reasoning="why"), env.action_space.sample()]
    lists = [env.observation_space.sample(), [], [Message("tool", "x", tool_call_id="c1", name="get"), *turns[1:2]]]
    for space, samples in ((env.action_space, turns), (env.observation_space, lists)):
        assert isinstance(space, MessagesSpace | ToolCallSpace)
        rows = space.to_jsonable(samples)
        back = space.from_jsonable(json.loads(json.dumps(rows)))
        assert back == samples and all(space.contains(one) for one in back)
    env.close()
