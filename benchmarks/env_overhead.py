"""Measure an episode's cost without a model: time per turn and memory per idle episode.

    python benchmarks/env_overhead.py [--quick]

A scripted agent plays the gold turns of key_value episodes. `us_per_turn` is processor time per turn (one thread),
`wall_us_per_turn` wall-clock time, which other programs lengthen; both include reset, teardown and record keeping of
the episode. `kb_per_episode` is what one reset episode adds to the Python heap (tracemalloc; the first episode, which
also creates shared tables, is not counted).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import tracemalloc

from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef

AIM_US, AIM_KB = 150.0, 50.0


async def play(env: ToolEnv, seed: int, episodes: int) -> int:
    """Play gold episodes one after the other. Every turn yields to other episodes, as with a real engine."""
    turns = 0
    for number in range(episodes):
        await env.areset(seed=seed + number)
        for message in env.gold_turns(env.task):
            await asyncio.sleep(0)
            await env.astep(message)
            turns += 1
    return turns


async def play_concurrently(count: int, episodes: int) -> tuple[float, float]:
    """Measure microseconds per turn (processor, wall) with `count` concurrent episodes."""
    envs = [EnvRef("key_value", {"calls": 4}).build() for _ in range(count)]
    wall, processor = time.perf_counter(), time.process_time()
    turns = sum(await asyncio.gather(*(play(env, 1000 * i, episodes) for i, env in enumerate(envs))))
    spent = time.process_time() - processor, time.perf_counter() - wall
    return spent[0] / turns * 1e6, spent[1] / turns * 1e6


async def idle_kilobytes(count: int) -> float:
    """Measure kilobytes of heap per episode that was reset but not played."""
    first = EnvRef("key_value", {"calls": 4}).build()
    await first.areset(seed=0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    held = [EnvRef("key_value", {"calls": 4}).build() for _ in range(count)]
    for seed, env in enumerate(held):
        await env.areset(seed=seed)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / count / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and at most 1024 idle episodes")
    quick = parser.parse_args().quick
    total = 2_000 if quick else 10_000
    sizes = (1, 64, 1024)
    per_turn: dict[int, float] = {}
    wall: dict[int, float] = {}
    for size in sizes:
        rounds = [asyncio.run(play_concurrently(size, max(1, total // 5 // size))) for _ in range(5)]
        per_turn[size] = statistics.median(spent[0] for spent in rounds)
        wall[size] = statistics.median(spent[1] for spent in rounds)
        print(f"{size:5d} at once: {per_turn[size]:7.1f} us per turn ({wall[size]:.1f} wall-clock)")
    idle = {}
    for size in (64, 1024) if quick else (64, 1024, 10_000):
        idle[size] = asyncio.run(idle_kilobytes(size))
        print(f"{size:5d} idle:    {idle[size]:7.2f} kB per episode")
    ratios = {
        "us_per_turn_over_aim": round(max(per_turn.values()) / AIM_US, 3),
        "kb_per_episode_over_aim": round(max(idle.values()) / AIM_KB, 3),
        "idle_growth_64_to_most": round(idle[max(idle)] / idle[64], 3),
    }
    report = {
        "benchmark": "env_overhead",
        "us_per_turn": {k: round(v, 1) for k, v in per_turn.items()},
        "wall_us_per_turn": {k: round(v, 1) for k, v in wall.items()},
        "kb_per_episode": {k: round(v, 2) for k, v in idle.items()},
        "ratios": ratios,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
