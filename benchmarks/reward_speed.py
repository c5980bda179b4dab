"""Measure reward scoring: trajectories per second on one core, for each packaged profile.

    python benchmarks/reward_speed.py [--seconds 1.0] [--calls 20]

Each profile scores episodes of 20 calls; half of the episodes are correct, in the others calls are reordered, wrong or
missing. The judge profile is not measured, because its speed is the judge's. Also measured is the worst case of
assignment, n calls of one name whose credits all differ, for n up to 200: its time grows as n to the power of
`assignment_exponent`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl.data.trajectory import Message, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.reward import Context, Scorer, compile_spec
from agentrl.reward.replays import FrozenState, Replay, RoundEnd, RoundTurns

SHELF = Path(__file__).resolve().parents[1] / "rewards"
AIM = 5000.0
WITH_AIM = ("exact_calls", "bfcl_ast", "bfcl_ast_parity", "toolrl", "toolrl_parity")


class Tally:
    """Replay environment with almost no cost, so that replays measure the reward code."""

    user_repeats = True

    def __init__(self, task: Task) -> None: ...

    def replay(self, record: Trajectory, rounds: Sequence[RoundTurns], found: Replay, *, gold: bool = False) -> None:
        total = 0
        for one in rounds:
            total += one.calls
            found.ends.append(RoundEnd(FrozenState({"total": total}), ["ok"] * one.calls))


def arguments(rng: random.Random) -> dict[str, Any]:
    return {"key": rng.choice("abcdefgh"), "amount": rng.randint(1, 50), "note": f"item {rng.randint(1, 50)}"}


def episodes(calls: int, count: int, form: str) -> list[Trajectory]:
    """Make seeded episodes of `calls` calls over four tools, with gold in the profile's format."""
    rng = random.Random(0)
    return [one_episode(rng, calls, form, damaged=number % 2 == 1) for number in range(count)]


def one_episode(rng: random.Random, calls: int, form: str, damaged: bool) -> Trajectory:
    gold = [(f"tool_{rng.randint(0, 3)}", arguments(rng)) for _ in range(calls)]
    made = list(gold)
    if damaged:
        rng.shuffle(made)
        made[0] = (made[0][0], arguments(rng))
        made[-1] = ("tool_9", {})
    turns = []
    for index, (name, values) in enumerate(made):
        call = ToolCall(name, values, id=f"c{index}")
        turns.append(Turn(index, Message("assistant", "", (call,), reasoning="so"), [ToolResult(call.id, name, "ok")]))
    turns.append(Turn(calls, Message("assistant", "The total is 42.")))
    listed = [{"name": name, "arguments": values} for name, values in gold]
    if form == "bfcl":
        listed = [{name: {key: [value] for key, value in values.items()}} for name, values in gold]
    task_gold = {
        "calls": listed,
        "rounds": [listed],
        "answer": "42",
        "outputs": ["42"],
        "state": {"total": calls},
    }
    properties = {"key": {"type": "string"}, "amount": {"type": "integer"}, "note": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}} for i in range(4)]
    task = Task("bench", 0, data={"goal": "add"}, gold=task_gold)
    trajectory = Trajectory("Bench/Env-v0", task, turns=turns, tools=tools, state={"total": calls})
    # As if read from a file: equal values must be different objects, or comparing them would be too cheap.
    return Trajectory.from_json(json.loads(json.dumps(trajectory.to_json())))


def rate(scorer: Scorer, trajectories: list[Trajectory], seconds: float) -> float:
    """Return trajectories per processor second, best of three runs."""
    scorer.score(trajectories[0])

    def run() -> float:
        count, start = 0, time.process_time()
        while time.process_time() - start < seconds / 3:
            for trajectory in trajectories:
                scorer.score(trajectory)
            count += len(trajectories)
        return count / (time.process_time() - start)

    return max(run() for _ in range(3))


def assignment_seconds(size: int) -> float:
    """Measure processor seconds for `size` made and expected calls of one name, with different credit for each pair."""
    rng = random.Random(size)
    keys = [f"k{i}" for i in range(8)]

    def call() -> dict[str, Any]:
        return {key: rng.randint(0, 2) for key in rng.sample(keys, rng.randint(3, 8))}

    turn = Turn(0, Message("assistant", "", tuple(ToolCall("f", call(), id=str(i)) for i in range(size))))
    gold = [{"name": "f", "arguments": call()} for _ in range(size)]
    root = {"use": "calls.match", "args": {"expect": {"$": "/task/gold/calls"}, "credit": "partial"}}
    scorer = compile_spec({"agentrl_reward": 1, "name": "assignment", "root": root})
    trajectory = Trajectory("Bench/Env-v0", Task("t", 0, gold={"calls": gold}), turns=[turn])
    return best_of(lambda: scorer.score(trajectory))


def best_of(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="processor seconds per profile")
    parser.add_argument("--calls", type=int, default=20, help="calls per trajectory")
    args = parser.parse_args()
    context = Context(replay_env=Tally)
    rates = {}
    for path in sorted(SHELF.glob("*.json")):
        if path.stem in ("schema", "judge"):
            continue
        form = "bfcl" if path.stem.startswith("bfcl_ast") else "literal"
        rates[path.stem] = rate(compile_spec(path, context=context), episodes(args.calls, 50, form), args.seconds)
        print(f"{path.stem:<20}{rates[path.stem]:>10.0f} trajectories/s per core", file=sys.stderr)
    sizes = {size: assignment_seconds(size) for size in (25, 50, 100, 200)}
    for size, seconds in sizes.items():
        print(f"assignment of {size:>3} calls {1000 * seconds:>10.1f} ms", file=sys.stderr)
    exponent = math.log(sizes[200] / sizes[50]) / math.log(4)
    result = {
        "benchmark": "reward_speed",
        "calls": args.calls,
        "trajectories_per_second": {name: round(value) for name, value in rates.items()},
        "assignment_ms": {str(size): round(1000 * seconds, 2) for size, seconds in sizes.items()},
        "assignment_exponent": round(exponent, 2),
        "ratios": {f"{name}_over_aim": round(rates[name] / AIM, 2) for name in WITH_AIM},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
