"""Measure rollouts at scale: driver cost with rollout workers, 10,000 waiting episodes, turns per second by workers.

    python benchmarks/rollout_workers.py [--only driver|waiting|watchdog] [--quick]

`driver`: the collector alone, with a player that returns episodes at once, as from simulated workers (64 episodes each, 3 turns,
groups of 8; two groups per update for each 8 concurrent episodes): microseconds of processor time per turn, seconds per 1,000
episodes. `workers`: real workers (0: in the driver) with 64 concurrent episodes each, a tool that answers at once, and one that
computes for about a millisecond: turns per second of wall-clock time, the driver's processor time per turn and its share of the
wall-clock time. `waiting`: episodes in this process, all in a slow tool: kilobytes per episode, the longest blocking of the event
loop and its processor time per second. `watchdog`: processor time of the watchdog per second of an idle loop.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
import time
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from elsewhere import player_of
from silence import longest_silence
from work import CONTEXT, Instant, collector_of, scorer

from agentrl.config import RolloutConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, ToolCall, Trajectory, Turn
from agentrl.env import ToolEnv, tool
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.player import Job, LocalPlayer, Player, RunEnv
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.event_loop import LoopWatchdog
from agentrl.utils.processor import raise_gc_threshold
from agentrl.utils.threads import share_the_lock

TURNS, GROUP, AT_ONCE = 3, 8, 64
AIM_US = 50.0
CALL = Message("assistant", tool_calls=(ToolCall("wait", {}),))


class Simulated(Player):
    """Player that returns the episodes of one group in each loop iteration, as if workers had sent them."""

    def __init__(self) -> None:
        self._asked: deque[asyncio.Future[None]] = deque()

    def begin(self, version: int) -> None:
        """Set the weight version of the following episodes."""
        ledger = TokenLedger()
        for turn in range(TURNS):
            ledger.append_context(range(200), turn)
            ledger.append_sampled(range(40), [-1.0] * 40, [version] * 40, turn)
        turns = [Turn(n, CALL, prompt_tokens=200, sampled_tokens=40) for n in range(TURNS)]
        self._made = Trajectory("key_value", Task("t", 0), turns=turns, ledgers=[ledger], reward=1.0, success=True)

    async def answer(self) -> None:
        while True:
            for _ in range(min(GROUP, len(self._asked))):
                self._asked.popleft().set_result(None)
            await asyncio.sleep(0)

    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        self._asked.append(asyncio.get_running_loop().create_future())
        await self._asked[-1]
        made = copy.copy(self._made)
        made.member, made.seed = job.spec.member, job.spec.seed
        return [made]


async def driver_seconds_per_turn(workers: int, updates: int) -> float:
    """Measure processor seconds of the driver per turn."""
    groups = 2 * workers * AT_ONCE // GROUP
    config = RolloutConfig(groups=groups, group_size=GROUP, max_episodes=workers * AT_ONCE, max_turns=TURNS)
    part: Any = RunEnv("key_value", EnvRef("key_value"), Policy(None, None), scorer(), Limits.of(config, CONTEXT))  # type: ignore[arg-type]
    player, best = Simulated(), float("inf")
    collector, answering = collector_of(player, part, config), asyncio.create_task(player.answer())
    for version in range(updates):
        player.begin(version)
        before = time.process_time()
        collected = await collector.collect()
        collector.trained(collected)
        best = min(best, time.process_time() - before)
    answering.cancel()
    return best / (groups * GROUP * TURNS)


def driver(quick: bool) -> dict[str, Any]:
    per_turn: dict[int, float] = {}
    for workers in (1, 4, 16, 64):
        per_turn[workers] = spent = asyncio.run(driver_seconds_per_turn(workers, 3 if quick else 6)) * 1e6
        print(f"{workers:4d} workers: {spent:8.1f} us per turn, {spent * TURNS / 1e3:.3f} s per 1,000 episodes")
    return {
        "us_per_turn": {k: round(v, 1) for k, v in per_turn.items()},
        "s_per_1000_episodes": {k: round(v * TURNS / 1e3, 4) for k, v in per_turn.items()},
        "us_per_turn_over_aim": round(max(per_turn.values()) / AIM_US, 3),
        "most_workers_over_one": round(per_turn[64] / per_turn[1], 3),
    }


class Slow(ToolEnv):
    """Environment with one tool, which waits until its gate opens."""

    id = "bench/Slow-v0"
    summary = "waits"
    inside = 0
    gate = asyncio.Event()

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"slow/{rng_seed}", rng_seed, split, {}, {"answer": "1"})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "Wait with wait, then answer 1."), Message("user", "go")]

    @tool(timeout=3000)
    async def wait(self) -> str:
        """Waits."""
        Slow.inside += 1
        await Slow.gate.wait()
        return "done"


class Ref(EnvRef):
    """Substitute for an EnvRef, because `Slow` is not registered."""

    def build(self, **extra: Any) -> ToolEnv:
        return Slow(**extra)


async def measure_waiting(episodes: int) -> dict[str, float]:
    renderer = make_renderer(packaged_tokenizer(CONTEXT))
    engine = Instant([renderer.assistant(CALL), renderer.assistant(Message("assistant", "1"))])
    config = RolloutConfig(groups=episodes // GROUP, group_size=GROUP, max_episodes=episodes, max_turns=4, episode_timeout=3000.0)
    ref = Ref("key_value")
    part = RunEnv("slow", ref, Policy(engine, renderer), scorer(), Limits.of(config, CONTEXT))
    collector = collector_of(LocalPlayer([part]), part, config)
    Slow.inside, Slow.gate = 0, asyncio.Event()
    tracemalloc.start()
    spent = time.process_time()
    collecting = asyncio.create_task(collector.collect())
    while Slow.inside < episodes:
        await asyncio.sleep(0.05)
    memory, starting = tracemalloc.get_traced_memory()[0], time.process_time() - spent
    tracemalloc.stop()
    used, since = time.process_time(), time.monotonic()
    silence = await longest_silence(lambda: asyncio.sleep(3.0), every=0.02)
    used, passed = time.process_time() - used, time.monotonic() - since
    collecting.cancel()
    await collector.close()
    return {
        "kb_per_episode": round(memory / episodes / 1024, 2),
        "start_us_per_episode_traced": round(starting / episodes * 1e6, 1),
        "cpu_s_per_s": round(used / passed, 4),
        "longest_silence_ms": round(silence, 1),
    }


def waiting(quick: bool) -> dict[str, Any]:
    found = {}
    for episodes in (64, 1_000) if quick else (64, 1_000, 10_000):
        found[episodes] = asyncio.run(measure_waiting(episodes))
        print(f"{episodes:6d} wait: {found[episodes]}", flush=True)
    return {"by_episodes": found}


async def idle_cpu_share(limit: float, seconds: float) -> float:
    with LoopWatchdog(limit):
        before = time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - before) / seconds


async def play_with_workers(workers: int, steps: int, episodes: int, rounds: int) -> dict[str, float]:
    config = RolloutConfig(groups=episodes // GROUP, group_size=GROUP, max_episodes=AT_ONCE * max(workers, 1), max_turns=4)
    player, part = await player_of(workers, config, steps)
    wall, cpu = float("inf"), float("inf")
    try:
        for seed in range(rounds + 1):
            # A new collector per round, since the workers' engines keep one version of weights.
            collector = collector_of(player, part, config, seed)
            began, before = time.perf_counter(), time.process_time()
            groups = await collector.collect()
            wall, cpu = min(wall, time.perf_counter() - began), min(cpu, time.process_time() - before)
            assert all(len(t.turns) == TURNS for group in groups for t in group.trajectories)
            await collector.close()
    finally:
        await player.close()
    turns = episodes * TURNS
    return {"turns_per_s": round(turns / wall), "driver_us_per_turn": round(cpu / turns * 1e6, 1),
            "driver_s_per_1000_episodes": round(cpu / episodes * 1e3, 4), "driver_share": round(cpu / wall, 3)}  # fmt: skip


def workers(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, steps in (("instant", 0), ("computing", 20_000)):
        for count in (0, 1, 2, 4):
            found[f"{name}_{count}"] = asyncio.run(
                play_with_workers(count, steps, 256 if quick or steps else 2048, 2 if quick else 4)
            )
            print(f"{name:10s} {count} workers: {found[f'{name}_{count}']}", flush=True)
    return found


def watchdog(quick: bool) -> dict[str, Any]:
    seconds = 2.0 if quick else 10.0
    idle, watched = asyncio.run(idle_cpu_share(0.0, seconds)), asyncio.run(idle_cpu_share(0.2, seconds))
    print(f"watchdog: {(watched - idle) * 100:.3f} % of a processor")
    return {"cpu_s_per_s": round(watched - idle, 5)}


PARTS = {"driver": driver, "workers": workers, "waiting": waiting, "watchdog": watchdog}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    raise_gc_threshold()  # both as in every run
    share_the_lock()
    found = {name: part(asked.quick) for name, part in PARTS.items() if asked.only in (None, name)}
    print(json.dumps({"benchmark": "rollout_workers", **found}))


if __name__ == "__main__":
    main()
