"""BFCL v4: agentrl's verdicts against the leaderboard's own checkers, on gold, idle and corrupted episodes of every task.

    python benchmarks/parity/bfcl.py [--source FOLDER] [--category single_turn multi_turn memory] [--tasks 20] [--speed]

Each episode is played by the suite (`envs/bfcl`), tools and all, and scored by `rewards/bfcl.json`; its calls go to the
leaderboard's checkers as well. Printed are counts by category and variant: episodes, how many the leaderboard pays, how many
differ. A difference that `DOCUMENTED` explains is counted by its reason. Exit code 1 if another is there, or if a category has
no tasks.

`--speed` also measures scoring of the multi-turn episodes, in episodes per second and core: agentrl's and the leaderboard's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import bfcl_variants as variants
from bfcl_official import Official

from agentrl.config.schema import RewardConfig
from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.env import Message, Task, ToolCall
from agentrl.env.catalog import EnvRef, find_spec, make_scorer

DOCUMENTED: dict[str, Callable[[Task, str, bool, bool | None], bool]] = {}
"""Differences that stay, each with the test of whether a case is one of them (task, variant, theirs, ours)."""


@dataclass
class Tally:
    """Of one category and variant."""

    episodes: int = 0
    paid: int = 0
    differ: Counter[str] = field(default_factory=Counter)


@dataclass
class Speed:
    """Multi-turn episodes, kept to be scored again, and what the leaderboard's checkers took for them."""

    records: list[Trajectory] = field(default_factory=list)
    theirs: float = 0.0


class Comparison:
    """One environment, with the leaderboard's checkers beside it."""

    def __init__(self, source: str | None, category: str, memory: str | None = None) -> None:
        self.ref = EnvRef("bfcl", {"category": category, **({"source": source} if source else {})})
        self.category = category
        self.env = cast(Any, self.ref.build())
        self.env.scorer = None
        self.scorer = make_scorer(find_spec(self.ref, None), RewardConfig(), self.ref)
        self.official = Official(Path(self.env.source))
        self.tallies: dict[str, Tally] = {}
        self.examples: list[str] = []
        self.speed = Speed()
        self.gold = self._gold()

    def _gold(self) -> dict[str, Any]:
        """The possible answers as they are written, and the entries, which the leaderboard's checkers read."""
        if self.category.endswith("relevance"):
            return {}
        rows = self.official.utils.load_dataset_entry(self.category, include_prereq=False, include_language_specific_hint=False)
        answers = self.official.utils.load_ground_truth_entry(self.category)
        return {row["id"]: (row, answer["ground_truth"]) for row, answer in zip(rows, answers, strict=True)}

    async def run(self, tasks: int | None, seed: int) -> None:
        """Every variant of the tasks (of the first `tasks` of them, if that is not None)."""
        count = self.env.task_count("all")
        for number in range(count if tasks is None else min(tasks, count)):
            task = self.env.make_task(number, "all")
            rng = random.Random(f"{seed} {task.id}")
            for name, record, theirs in [item async for item in self._episodes(task, rng)]:
                ours = (await self.scorer.ascore(record)).value
                self._count(task, name, theirs, None if ours is None else ours == 1.0)

    async def _episodes(self, task: Task, rng: random.Random) -> Any:
        scoring = task.data["scoring"]
        entry, gold = self.gold.get(task.id, (None, None))
        calls: list[variants.Call] | None
        if scoring == "rounds":
            plain = [
                [[(call["name"], dict(call["arguments"])) for call in calls]] if calls else [] for calls in task.gold["rounds"]
            ]
            for name, rounds, cut in variants.conversations(plain, rng):
                record = await self._play_rounds(task, rounds, cut)
                began = time.process_time()
                theirs = not cut and self.official.conversation(entry, gold, rounds, self.category)
                self.speed.theirs += time.process_time() - began
                self.speed.records.append(record)
                yield name, record, theirs
        elif scoring == "said":
            for name, text in variants.words(list(task.gold["answers"]), rng):
                yield name, await self._play(task, [Message("assistant", text)]), self.official.answer(gold, text)
        elif scoring == "text":
            said = self.env.gold_turns(task)[0].content
            for name, text in variants.texts(said, rng):
                made = self.env.package.written(task.data, text)
                calls = None if made is None else [(call["name"], call["arguments"]) for call in made]
                theirs = self.official.turn(task.data, gold, calls, task.id.split(":")[2])
                yield name, await self._play(task, [Message("assistant", text)]), theirs
        else:
            calls = [(call.name, dict(call.arguments or {})) for call in self.env.gold_turns(task)[0].tool_calls]
            names = [function["name"] for function in task.data["functions"]]
            wrong: list[variants.Call] = [(name, {}) for name in names if name not in [made for made, _ in calls]]
            for name, made in variants.turns([] if scoring == "some" else calls, wrong, rng):
                theirs = self.official.turn(task.data, gold, made, self.category)
                yield name, await self._play(task, [_message(made)]), theirs

    async def _play(self, task: Task, turns: Sequence[Message]) -> Trajectory:
        await self.env.areset(seed=task.seed, options={"task": task})
        for turn in turns:
            await self.env.astep(turn)
        record: Trajectory = self.env.trajectory
        return record

    async def _play_rounds(self, task: Task, rounds: variants.Rounds, cut: bool) -> Trajectory:
        await self.env.areset(seed=task.seed, options={"task": task})
        for steps in rounds:
            for message in [*map(_message, steps), None if cut and steps is rounds[-1] else Message("assistant", "done")]:
                if message is not None and self.env.is_open:
                    await self.env.astep(message)
        if self.env.is_open:
            await self.env.aend(StopReason.MAX_TURNS)
        record: Trajectory = self.env.trajectory
        return record

    def _count(self, task: Task, name: str, theirs: bool, ours: bool | None) -> None:
        tally = self.tallies.setdefault(name, Tally())
        tally.episodes += 1
        tally.paid += theirs
        if theirs != ours:
            reasons = [reason for reason, fits in DOCUMENTED.items() if fits(task, name, theirs, ours)]
            tally.differ[reasons[0] if reasons else "?"] += 1
            if not reasons and len(self.examples) < 20:
                self.examples.append(f"{task.id}, {name}: theirs {theirs}, ours {ours}")


def _message(calls: Sequence[variants.Call] | None) -> Message:
    if calls is None:
        return Message("assistant", "done")
    made = (
        ToolCall(name, dict(arguments)) if isinstance(arguments, dict) else ToolCall(name, None, raw=arguments, error="not JSON")
        for name, arguments in calls
    )
    return Message("assistant", tool_calls=tuple(made))


def measure(found: Comparison) -> dict[str, float]:
    """Episodes per second of processor time that are scored: by agentrl with empty caches, by the leaderboard's checkers."""
    records = found.speed.records
    scorer = make_scorer(find_spec(found.ref, None), RewardConfig(), found.ref)
    began = time.process_time()
    for record in records:
        scorer.score(record)
    ours = time.process_time() - began
    return {
        "episodes": len(records),
        "ours_per_s": round(len(records) / ours, 1),
        "theirs_per_s": round(len(records) / found.speed.theirs, 1),
    }


def table(found: Comparison) -> Iterator[str]:
    """Lines of Markdown."""
    for name, tally in found.tallies.items():
        differ = ", ".join(f"{count} {reason}" for reason, count in tally.differ.items()) or "0"
        yield f"| {found.category} | {name} | {tally.episodes} | {tally.paid} | {differ} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", default=os.environ.get("AGENTRL_BFCL_SOURCE"), help="the folder bfcl_eval (default: as the suite finds it)"
    )
    parser.add_argument("--category", nargs="+", default=["single_turn", "multi_turn"], help="categories or groups")
    parser.add_argument("--tasks", type=int, help="of each category, the first so many (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="also measure how fast multi-turn episodes are scored")
    args = parser.parse_args()
    whole: Any = EnvRef("bfcl", {"category": args.category, **({"source": args.source} if args.source else {})}).build()
    total, bad, speeds = Counter[str](), [], {}
    print("| category | variant | episodes | paid | differ |\n|---|---|---|---|---|")
    for category in whole.categories:
        found = Comparison(args.source, category)
        with contextlib.redirect_stdout(io.StringIO()):  # the leaderboard's classes print
            asyncio.run(found.run(args.tasks, args.seed))
        print("\n".join(table(found)), flush=True)
        bad += found.examples
        for tally in found.tallies.values():
            total += Counter(episodes=tally.episodes, paid=tally.paid, differ=tally.differ.total(), unexplained=tally.differ["?"])
        if args.speed and found.speed.records:
            speeds[category] = measure(found)
    print("\n".join(bad))
    print(json.dumps({key: total[key] for key in ("episodes", "paid", "differ", "unexplained")} | {"speed": speeds}))
    return int(bool(total["unexplained"]) or not total["episodes"])


if __name__ == "__main__":
    raise SystemExit(main())
