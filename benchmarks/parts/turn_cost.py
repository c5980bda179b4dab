"""What the framework costs a turn: three-turn tool episodes with an engine that answers at once.

agentrl does its whole rollout here: collector, group ledger, environment, tool calls checked and run, rendering
to token ids and back, token ledgers, the reward spec.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from peers import ask, ratio
from work import CONTEXT, Instant, collector

from agentrl.config import RolloutConfig
from agentrl.render import make_renderer
from agentrl.rollout.episode import Policy
from agentrl.train.tokenizer import packaged_tokenizer
from agentrl.trajectory import Message, StopReason, ToolCall

TURNS = [
    Message("assistant", tool_calls=(ToolCall("get", {"key": "a"}),)),
    Message("assistant", tool_calls=(ToolCall("add", {"x": 1}),)),
    Message("assistant", "1"),
]


async def agentrl_turn(at_once: int, episodes: int, repeats: int) -> float:
    """Median wall seconds a turn."""
    renderer = make_renderer(packaged_tokenizer(CONTEXT))
    policy = Policy(Instant([renderer.assistant(turn) for turn in TURNS]), renderer)
    config = RolloutConfig(groups=episodes // 8, group_size=8, max_episodes=at_once, max_turns=8, max_turn_tokens=64,
                           max_episode_tokens=1024)
    driver = collector(policy, config)
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        groups = await driver.collect()
        found.append((time.perf_counter() - began) / episodes / len(TURNS))
        members = [t for group in groups for t in group.trajectories]
        assert all(t.stop is StopReason.DONE and len(t.turns) == len(TURNS) for t in members)
        driver.trained(groups)
        await driver.publish([])
    return statistics.median(found[1:])


def run(quick: bool) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Ratios against both versions of verifiers, and milliseconds a turn."""
    spent: dict[str, float | None] = {}
    for at_once in (64, 1024):
        spent[f"agentrl_{at_once}"] = asyncio.run(agentrl_turn(at_once, max(512, at_once), 3))
        for kind in ("in_process", "http"):
            spent[f"verifiers_0.3.1_{kind}_{at_once}"] = _peer("verifiers", "peer_verifiers.py", kind, at_once,
                                                               256 if quick else max(512, at_once))
    spent["verifiers_0.4.0_8"] = _peer("verifiers-latest", "peer_verifiers_latest.py", 8, 8 if quick else 16)
    spent["agentrl_8"] = asyncio.run(agentrl_turn(8, 128, 3))
    ratios = {}
    for name, value in spent.items():
        if name.startswith("verifiers"):
            at_once = name.rpartition("_")[2]
            ratios[f"turn_over_{name}"] = ratio(spent[f"agentrl_{at_once}"], value)
    return ratios, {name: None if value is None else round(value * 1e3, 4) for name, value in spent.items()}


def _peer(name: str, script: str, *args: object) -> float | None:
    try:
        return float(ask(name, script, *args, NO_KEY="none")["seconds_per_turn"])
    except RuntimeError as problem:
        print(f"no figure of {name} {args}: {problem}", flush=True)
        return None
