"""Measure seconds per turn of verifiers 0.4.0 with an instant model and three-turn tool episodes. Run by rollout.py.

    python peer_verifiers_latest.py AT_ONCE ROLLOUTS

Its chat-loop harness ("null") and the tool server are one subprocess each per rollout; the model is the instant server of
stub_server.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

PARTS = Path(__file__).resolve().parent
sys.path.insert(0, str(PARTS))
os.environ["PYTHONPATH"] = os.pathsep.join([str(PARTS), os.environ.get("PYTHONPATH", "")])
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

import verifiers.v1 as vf  # noqa: E402
from bench_lookup import LookupConfig  # noqa: E402

TURNS = 3


async def main(at_once: int, rollouts: int) -> None:
    script = PARTS / "stub_server.py"
    server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
    agent = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset=LookupConfig(id="bench_lookup", num_tasks=rollouts), agent=agent))
    context = vf.ModelContext("stub", vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    gate = asyncio.Semaphore(at_once)

    async def play(tasks: list[vf.Task]) -> float:
        start = time.perf_counter()
        slots = [slot for task in tasks for slot in env.slots(task)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context, gate) for slot in slots))
        spent = time.perf_counter() - start
        for episode in episodes:
            assert episode.ok, (episode.errors, [trace.errors for trace in episode.traces])
        return spent

    async with env.serving():
        tasks = list(env.taskset)
        await play(tasks[:1])
        spent = await play(tasks)
    server.stdin.close()
    server.wait()
    print(json.dumps({"version": version("verifiers"), "seconds_per_turn": spent / rollouts / TURNS}))


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
