"""Compare turns per second of an environment over HTTP and in process, and measure a thousand waiting episodes.

    python benchmarks/remote_env.py [--quick]

A scripted agent plays the gold turns of key_value episodes, in this process and on a server in another process on this machine
(`agentrl env serve key_value --http`), in the same run. `client_us_per_turn` is processor time of this process per turn, with
its connection thread. Then 1,000 concurrent episodes wait for a sleeping tool: `threads` are the additional threads here and on
the server, `wait_over_sleep` is the time for all episodes / the time slept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.address import EnvAddress
from agentrl.env.catalog import EnvRef

VARIABLE = "AGENTRL_BENCH_TOKEN"
SLEEPER = '''
import asyncio
from agentrl.env import Message, Task, ToolEnv
from agentrl.env import tool

class Sleeper(ToolEnv):
    """A tool that waits."""

    id = "bench/Sleeper-v0"

    def make_task(self, rng_seed, split):
        return Task(f"{split}/{rng_seed}", rng_seed, split)

    def prompt(self, task):
        return [Message("user", "wait")]

    @tool
    async def nap(self, seconds: float) -> str:
        """wait"""
        await asyncio.sleep(seconds)
        return "done"
'''


@contextmanager
def server(env_id: str, *words: str) -> Iterator[tuple[EnvAddress, psutil.Process]]:
    """Run `agentrl env serve ID --http` on a free port."""
    command = [sys.executable, "-m", "agentrl.cli.main", "env", "serve", env_id, *words, "--http", "0", "--token-env", VARIABLE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            yield EnvAddress(url, "agentrl", VARIABLE), psutil.Process(process.pid)
        finally:
            process.terminate()


async def play(env: ToolEnv, seed: int, episodes: int, turns: list[list[Message]]) -> int:
    done = 0
    for number in range(episodes):
        await env.areset(seed=seed + number)
        for message in turns[(seed + number) % len(turns)]:
            done += 1
            if (await env.astep(message))[2]:
                break
        await env.aclose()
    return done


async def rates(ref: EnvRef, count: int, episodes: int, turns: list[list[Message]]) -> tuple[float, float]:
    """Measure turns per second, and microseconds of this process per turn, with `count` concurrent episodes."""
    envs = [ref.build() for _ in range(count)]
    began, spent = time.perf_counter(), time.process_time()
    done = sum(await asyncio.gather(*(play(env, 1000 * place, episodes, turns) for place, env in enumerate(envs))))
    return done / (time.perf_counter() - began), (time.process_time() - spent) / done * 1e6


async def waiting(ref: EnvRef, count: int, seconds: float, process: psutil.Process) -> dict[str, float]:
    """Measure `count` concurrent episodes that wait for a tool of `seconds`."""
    envs = [ref.build() for _ in range(count)]
    await asyncio.gather(*(env.areset(seed=seed) for seed, env in enumerate(envs)))
    before = threading.active_count(), process.num_threads()
    nap = Message("assistant", tool_calls=(ToolCall("nap", {"seconds": seconds}),))
    began = time.perf_counter()
    steps = asyncio.gather(*(env.astep(nap) for env in envs))
    await asyncio.sleep(seconds / 2)
    here, there = threading.active_count() - before[0], process.num_threads() - before[1]
    await steps
    took = time.perf_counter() - began
    await asyncio.gather(*(env.aclose() for env in envs))
    return {"episodes": count, "threads_here": here, "threads_there": there, "wait_over_sleep": round(took / seconds, 2)}


def compare(quick: bool) -> dict[str, object]:
    local = EnvRef("key_value", {"calls": 4})
    probe = local.build()
    turns = [probe.gold_turns(probe.make_task(seed, "train")) for seed in range(8)]
    rows: dict[str, object] = {}
    with server("key_value", "calls=4") as (address, _):
        remote = replace(local, at=address)
        for count in (1, 64):
            episodes = max(1, (300 if quick else 1500) // 5 // count)
            found = [
                (asyncio.run(rates(local, count, episodes, turns)), asyncio.run(rates(remote, count, episodes, turns)))
                for _ in range(5)
            ]
            here, there = (statistics.median(pair[side][0] for pair in found) for side in (0, 1))
            spent = statistics.median(pair[1][1] for pair in found)
            rows[f"{count}_at_once"] = {
                "turns_per_s_in_process": round(here),
                "turns_per_s_http": round(there),
                "http_over_in_process": round(there / here, 4),
                "client_us_per_turn": round(spent),
            }
            print(
                f"{count:4d} at once: {here:8.0f} turns/s in process, {there:7.0f} over HTTP, {spent:5.0f} us of client time each"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    quick = parser.parse_args().quick
    os.environ.setdefault(VARIABLE, "a-token-of-this-benchmark")
    rows = compare(quick)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "envs").mkdir()
        (Path(folder) / "envs" / "sleeper.py").write_text(SLEEPER)
        os.environ["AGENTRL_PATH"] = folder
        with server("sleeper") as (address, process):
            rows["waiting"] = asyncio.run(waiting(EnvRef("sleeper", at=address), 1000, 5.0, process))
    print(json.dumps({"benchmark": "remote_env", **rows}))


if __name__ == "__main__":
    main()
