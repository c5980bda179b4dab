"""Measure how long hostile episodes block the event loop: for each case, the longest time in milliseconds.

    python benchmarks/loop_silence.py [--only output] [--rounds 3]

Each case is one episode with a scripted engine (or a few calls), while a concurrent task measures the gaps between loop
iterations. Time in which the loop's thread had no processor is subtracted; the minimum of several rounds counts, since other
programs only add. Aim: under 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from silence import longest_silence
from work import Instant

from agentrl.config import RolloutConfig, TrainConfig
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, Trajectory, Turn
from agentrl.env import Tool, Toolbox, ToolEnv, tool
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.reward import Context, compile_spec
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.run import evaluate as run_rollout
from agentrl.run.assembly import RunStart
from agentrl.run.folder import lines
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.files import atomic_write
from agentrl.utils.threads import in_thread, share_the_lock

AIM_MS = 50.0
LONG = 4_000_000
WORDS = "".join(f"word{i} says {i * 7} things; " for i in range(40_000))
TOKENIZER = packaged_tokenizer(LONG)
RENDERER = make_renderer(TOKENIZER)
PLAIN = {"agentrl_reward": 1, "name": "plain", "root": {"use": "text.equals", "args": {"expect": "1"}}}
ANSWER = Message("assistant", "1")


class Hostile(ToolEnv):
    """Environment whose tool returns `given`."""

    id = "bench/Hostile-v0"
    summary = "large and slow things"

    def __init__(self, prompt: str = "go", given: Any = None, world: Any = None, **base: Any) -> None:
        super().__init__(**base)
        self.text, self.given, self.world = prompt, given, world

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"hostile/{rng_seed}", rng_seed, split, {}, {"answer": "1", "state": self.world})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", self.text)]

    def state(self) -> Any:
        return self.world

    @tool(max_output=LONG)
    def give(self) -> Any:
        """Gives it."""
        return self.given

    @tool
    def take(self, rows: list[dict[str, int]]) -> int:
        """Takes rows."""
        return len(rows)


def total(n: int) -> int:
    return sum(range(n))  # in one C call, which holds the GIL


async def play(env: ToolEnv, turns: list[Message], spec: dict[str, Any] = PLAIN) -> Trajectory:
    limits = Limits.of(RolloutConfig(max_turns=len(turns), max_turn_tokens=LONG, max_episode_tokens=LONG), LONG)
    engine = Instant([await in_thread("text", RENDERER.assistant, turn) for turn in turns])
    episode = EpisodeSpec(0, "train", 0, 0, "bench")
    found = await run_episode(env, Policy(engine, RENDERER), episode, limits, compile_spec(spec, context=Context()))
    assert found.stop is StopReason.DONE, (found.stop, found.error)
    return found


def calls(name: str, arguments: dict[str, Any], count: int = 1) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(name, arguments, f"call_{i}") for i in range(count)))


def rows(count: int) -> list[dict[str, int]]:
    return [{f"field{k}": i * k for k in range(4)} for i in range(count)]


def spec(root: dict[str, Any]) -> dict[str, Any]:
    return {**PLAIN, "root": root}


async def prompt() -> None:
    await play(Hostile(WORDS[:100_000]), [ANSWER])


async def output() -> None:
    await play(Hostile(given=WORDS[:1_000_000]), [calls("give", {}), ANSWER])


async def nested() -> None:
    await play(Hostile(given=rows(20_000)), [calls("give", {}), ANSWER])


async def cut() -> None:
    env = Hostile(given=WORDS[:1_000_000], count_tokens=lambda text: len(TOKENIZER.backend_tokenizer.encode(text).ids))
    env.toolbox.replace(env.toolbox["give"].with_options(max_output=2048))
    await play(env, [calls("give", {}), ANSWER])


async def turn() -> None:
    await play(Hostile(), [Message("assistant", WORDS[:100_000])])


async def many_calls() -> None:
    await play(Hostile(given=1), [calls("give", {}, 1000), ANSWER])


async def arguments() -> None:
    await play(Hostile(), [calls("take", {"rows": rows(5_000)}), ANSWER])


async def argument_pattern() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["name"]}
    named = Tool.from_schema("named", "Takes a name.", schema, lambda name: name)
    await Toolbox([named]).call(ToolCall("named", {"name": "a" * 22 + "!"}))


async def regex() -> None:
    leaf = {"use": "format.regex", "args": {"pattern": "(a|aa)+$", "match": "full", "seconds": 0.3}}
    await play(Hostile(), [Message("assistant", "a" * 60 + "!")], spec({**leaf, "missing": 0}))


async def state() -> None:
    leaf = {"use": "state.match", "args": {"expect": {"$": "/task/gold/state"}, "by": "fields"}}
    await play(Hostile(world=rows(10_000)), [ANSWER], spec(leaf))


async def number() -> None:
    await play(Hostile(), [Message("assistant", WORDS[:300_000])], spec({"use": "number.close", "args": {"expect": 1}}))


async def matching() -> None:
    gold = [{"name": "give", "arguments": {"x": i}} for i in range(150)]
    made = Message("assistant", tool_calls=tuple(ToolCall("give", {"x": 149 - i}, f"c{i}") for i in range(150)))
    leaf = {"use": "calls.match", "args": {"expect": gold, "order": "free", "credit": "partial"}}
    await play(Hostile(), [made, ANSWER], spec(leaf))


async def heavy_tools() -> None:
    def compute(n: int) -> int:
        return sum(i * i % 7 for i in range(n))

    box = Toolbox([tool(compute)])
    await asyncio.gather(*(box.call(ToolCall("compute", {"n": 300_000}, str(i))) for i in range(16)))


async def locked_tool() -> None:
    await Toolbox([tool(total)]).call(ToolCall("total", {"n": 20_000_000}))


async def locked_process() -> None:
    box = Toolbox([tool(process=True)(total)])
    await box.call(ToolCall("total", {"n": 20_000_000}))


def big_episode() -> Trajectory:
    made = Trajectory("x", Task("t", 0), reward=1.0)
    made.messages = [Message("tool", WORDS[:1_000_000]) for _ in range(4)]
    made.turns = [Turn(0, ANSWER)]
    return made


async def trajectory_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        await in_thread("files", atomic_write, Path(folder) / "x.jsonl", lines([big_episode()] * 4))


async def evaluated() -> None:
    async def fake_run(*_: Any, on_episode: Callable[[Trajectory], Any], **__: Any) -> None:
        if (answer := on_episode(big_episode())) is not None:
            await answer

    async def no_op(*_: Any) -> None: ...

    with tempfile.TemporaryDirectory() as folder:
        session: Any = SimpleNamespace(start=no_op, parts=SimpleNamespace(env=SimpleNamespace(name="x"), player=None))
        config = TrainConfig.model_validate({"name": "x", "env": {"id": "key_value"}})
        request: Any = SimpleNamespace(
            out=Path(folder),
            pairs=[],
            split="heldout",
            purpose="rollout",
            note=Path(folder) / "note",
        )
        display: Any = SimpleNamespace(step=lambda *a: None, warn=print)
        with patch.object(run_rollout, "run_tasks", fake_run), patch.object(run_rollout, "SLOW_LOOP", 0.0):
            await run_rollout.RolloutJob(RunStart(config), request, display).play(session, [])


def reset_of(name: str, **params: Any) -> Callable[[], Awaitable[None]]:
    async def reset() -> None:
        env = EnvRef(name, params).build()
        for seed in range(5):
            await env.areset(seed=seed)
        await env.aclose()

    return reset


THREAD = "a tool that holds the GIL, in a thread (not part of the target; the watchdog names it)"
CASES: dict[str, Callable[[], Awaitable[None]]] = {
    "prompt of 100k characters": prompt,
    "tool output of 1 MB": output,
    "tool output of 20k rows as JSON": nested,
    "tool output of 1 MB cut by a tokenizer's count": cut,
    "turn of 100k characters": turn,
    "turn of 1000 calls": many_calls,
    "arguments of 5k objects": arguments,
    "arguments against a catastrophic pattern": argument_pattern,
    "spec: catastrophic regular expression": regex,
    "spec: state of 40k fields": state,
    "spec: number in 300k characters": number,
    "spec: 150 calls matched": matching,
    "16 tools that compute in threads": heavy_tools,
    "a tool that holds the GIL, with process=True": locked_process,
    THREAD: locked_tool,
    "trajectory file of 16 MB": trajectory_file,
    "evaluation keeps an episode of 4 MB": evaluated,
    **{f"reset of {name}": reset_of(name) for name in ("key_value", "sql", "search", "service_desk", "workspace", "python")},
    "reset of sql, 1000 rows, 3 twins": reset_of("sql", rows=1000, twins=3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    share_the_lock()  # as in every run
    found: dict[str, float] = {}
    for name, case in CASES.items():
        if args.only in name:
            found[name] = round(min(asyncio.run(longest_silence(case)) for _ in range(args.rounds)), 1)
            print(f"{found[name]:9.1f} ms  {name}", flush=True)
    most = max((ms for name, ms in found.items() if name != THREAD), default=0.0)
    print(json.dumps({"benchmark": "loop_silence", "ms": found, "most_over_aim": round(most / AIM_MS, 3)}))


if __name__ == "__main__":
    main()
