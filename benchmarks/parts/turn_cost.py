"""Measure the framework's cost per turn: three-turn tool episodes with an instant engine.

agentrl runs its complete rollout: collector, group ledger, environment, checked tool calls, rendering to token ids and
parsing, token ledgers, reward spec.
"""

from __future__ import annotations

import asyncio
import time

from peers import ask, ratio
from work import CONTEXT, Instant, collector

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Message, StopReason, ToolCall
from agentrl.render import make_renderer
from agentrl.rollout.episode import Policy
from agentrl.trainer.pretrained import packaged_tokenizer

TURNS = [
    Message("assistant", tool_calls=(ToolCall("get", {"key": "a"}),)),
    Message("assistant", tool_calls=(ToolCall("add", {"x": 1}),)),
    Message("assistant", "1"),
]


async def agentrl_turn(at_once: int, episodes: int, repeats: int) -> tuple[float, float]:
    """Return wall-clock and processor seconds per turn, minimum of several rounds, since other load only adds time."""
    renderer = make_renderer(packaged_tokenizer(CONTEXT))
    engine = Instant([renderer.assistant(turn) for turn in TURNS])
    policy = Policy(engine, renderer)
    config = RolloutConfig(
        groups=episodes // 8, group_size=8, max_episodes=at_once, max_turns=8, max_turn_tokens=64, max_episode_tokens=1024
    )
    driver = collector(policy, config)
    times = []
    for _ in range(repeats + 1):
        wall, processor = time.perf_counter(), time.process_time()
        groups = await driver.collect()
        times.append((time.perf_counter() - wall, time.process_time() - processor))
        members = [t for group in groups for t in group.trajectories]
        assert all(t.stop is StopReason.DONE and len(t.turns) == len(TURNS) for t in members)
        driver.trained(groups)
        await driver.exchange(engine.take)
    turns = episodes * len(TURNS)
    return min(wall for wall, _ in times[1:]) / turns, min(cpu for _, cpu in times[1:]) / turns


Pair = tuple[float | None, float | None]


def run(quick: bool) -> tuple[dict[str, float | None], dict[str, list[float | None]]]:
    """Return ratios of wall-clock and processor time to both versions of verifiers, and milliseconds per turn of each."""
    spent: dict[str, Pair] = {}
    repeats = 3 if quick else 5
    for at_once in (64, 1024):
        episodes = max(512, at_once)
        spent[f"agentrl_{at_once}"] = asyncio.run(agentrl_turn(at_once, episodes, repeats))
        for kind in ("in_process", "http"):
            rounds = (256, 1) if quick else (episodes, 3 if kind == "in_process" else 2)
            spent[f"verifiers_0.3.1_{kind}_{at_once}"] = _measure_peer("verifiers", "peer_verifiers.py", kind, at_once, *rounds)
    spent["verifiers_0.4.0_8"] = _measure_peer("verifiers-latest", "peer_verifiers_latest.py", 8, 8)
    spent["agentrl_8"] = asyncio.run(agentrl_turn(8, 128, repeats))
    ratios: dict[str, float | None] = {}
    for name, (wall, processor) in spent.items():
        if name.startswith("verifiers"):
            ours = spent[f"agentrl_{name.rpartition('_')[2]}"]
            ratios[f"turn_over_{name}"] = ratio(ours[0], wall)
            if processor is not None:
                ratios[f"turn_cpu_over_{name}"] = ratio(ours[1], processor)
    return ratios, {name: [x and round(x * 1e3, 4) for x in pair] for name, pair in spent.items()}


def _measure_peer(name: str, script: str, *args: object) -> Pair:
    try:
        answer = ask(name, script, *args, NO_KEY="none")
    except RuntimeError as problem:
        print(f"{name} {args} not measured: {problem}", flush=True)
        return None, None
    return answer["seconds_per_turn"], answer.get("cpu_seconds_per_turn")
