"""Measure tasks: how long gold solutions are, what agents that solve nothing earn, what splits share."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from agentrl.contrib.toolkit.branches import differences
from agentrl.env.base import ToolEnv
from agentrl.env.check import floors, share_interval
from agentrl.env.check_tools import Subject, play
from agentrl.env.official import WHOLE, Benchmark
from agentrl.env.toolbox import CountTokens
from agentrl.utils.errors import AgentrlError

# Difficulty by gold solutions

SHARES = (0, 25, 50, 75, 95, 100)
"""Percentiles of a summary."""


@dataclass(frozen=True, slots=True)
class Difficulty:
    """One task. `calls`, `turns`: the policy's, in the gold solution; `user_turns`: messages of the user, the opening ones
    included; `user_calls`: the user's own calls of tools. `prompt_tokens`: of the opening messages; `tool_tokens`: of the schemas
    of the tools that are offered at first; `gold_tokens`: of what the policy writes, calls included; `read_tokens`: of what it
    is answered. `writes`: paths of the state that differ between its setup and its end."""

    task: str
    family: str
    calls: int
    turns: int
    user_turns: int
    user_calls: int
    prompt_tokens: int
    tool_tokens: int
    gold_tokens: int
    read_tokens: int
    writes: int


def difficulty(env: ToolEnv, seed: int, split: str, count: CountTokens) -> Difficulty:
    """Plays the gold solution of a task. Raises NotImplementedError without one, EnvError if it cannot be played."""
    inner = env.unwrapped
    assert isinstance(inner, ToolEnv)
    opening, _ = env.reset(seed=seed, options={"split": split})
    gold = env.gold_turns(env.task)
    before, offered = deepcopy(env.state()), json.dumps(env.toolbox.schemas(), ensure_ascii=False)
    play(env, gold)
    env.close()
    record = env.trajectory
    answers = [message for message in record.messages[len(opening) :] if message.role != "assistant"]
    written = [turn.message.content for turn in record.turns if turn.message.content]
    for call in (call for turn in record.turns for call in turn.message.tool_calls):
        written.append(json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False))
    return Difficulty(
        task=record.task.id,
        family=inner.family(record.task),
        calls=sum(len(turn.message.tool_calls) for turn in record.turns),
        turns=len(record.turns),
        user_turns=sum(message.role == "user" for message in record.messages),
        user_calls=len(record.user_calls),
        prompt_tokens=sum(count(message.content) for message in opening),
        tool_tokens=count(offered),
        gold_tokens=sum(map(count, written)),
        read_tokens=sum(count(message.content) for message in answers),
        writes=sum(1 for _ in differences(before, record.state)),
    )


@dataclass(frozen=True)
class DifficultyReport:
    """Tasks of a split: those with a gold solution that could be played, and why the others could not, by task id."""

    split: str
    tasks: list[Difficulty]
    unplayed: dict[str, str]

    def by_family(self) -> dict[str, dict[str, list[float]]]:
        """For each family, and for all under "all": the percentiles `SHARES` of each number."""
        parts: dict[str, list[Difficulty]] = defaultdict(list)
        for task in self.tasks:
            parts[task.family].append(task)
        families = {name: parts[name] for name in sorted(parts)}
        # A single family is all of them.
        groups = {**(families if len(families) > 1 else {}), "all": self.tasks} if self.tasks else {}
        return {
            family: {
                name: [float(x) for x in np.percentile([getattr(task, name) for task in tasks], SHARES)]
                for name in Difficulty.__slots__[2:]  # the numbers
            }
            for family, tasks in groups.items()
        }

    def counts(self) -> dict[str, int]:
        """The number of tasks of each family."""
        found = Counter(task.family for task in self.tasks)
        return {**dict(sorted(found.items())), "all": len(self.tasks)}

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            "split": self.split,
            "percentiles": list(SHARES),
            "counts": self.counts(),
            "families": self.by_family(),
            "tasks": [asdict(task) for task in self.tasks],
            "unplayed": self.unplayed,
        }


def measure_tasks(env: ToolEnv, split: str, seeds: Sequence[int], count: CountTokens) -> DifficultyReport:
    """The report on the tasks of some seeds."""
    report = DifficultyReport(split, [], {})
    for seed in seeds:
        try:
            report.tasks.append(difficulty(env, seed, split, count))
        except (NotImplementedError, AgentrlError) as reason:
            report.unplayed[env.make_task(seed, split).id] = f"{type(reason).__name__}: {reason}"
    return report


# The floor


@dataclass(frozen=True, slots=True)
class Tasks:
    """Selection of the counted tasks: the first `count` of a split; `every`: they are all that it has."""

    split: str
    count: int
    every: bool


def counted_tasks(env: ToolEnv, split: str | None, most: int | None) -> Tasks:
    """Of a suite by default every task, of another environment the first `most` (200 by default) of "heldout"."""
    suite = isinstance(env.unwrapped, Benchmark)
    chosen = split or (WHOLE if suite else "heldout")
    there = env.task_count(chosen)
    wanted = most if most is not None else there if suite and there is not None else 200
    count = wanted if there is None else min(wanted, there)
    return Tasks(chosen, count, there is not None and count == there)


def measure(subject: Subject, split: str | None = None, most: int | None = None) -> dict[str, Any]:
    """For each script of `IDLERS` the mean reward over scored tasks, and the tasks paid in full: their number, their share with
    its 95 % interval (Wilson), their ids, and their families with (paid, all). Of all scripts together "any". Of a suite also
    `version`, that of its source, and for each script the benchmark's own table ("official"). Raises Skipped if there is no
    scorer."""
    env = subject.build()
    tasks = counted_tasks(env, split, most)
    inner = env.unwrapped
    assert isinstance(inner, ToolEnv)
    made = [env.make_task(seed, tasks.split) for seed in range(tasks.count)]
    families = Counter(inner.family(task) for task in made)
    found = list(floors(subject, env, tasks.split, range(tasks.count)))
    env.close()
    every = {task.id for floor in found for task in floor.paid}
    agents: dict[str, dict[str, Any]] = {}
    for floor in found:
        scored = [value for value in floor.values if value is not None]
        paid = Counter(inner.family(task) for task in floor.paid)
        agents[floor.agent] = {
            "mean": statistics.fmean(scored) if scored else None,
            "unscored": len(floor.values) - len(scored),
            **_share(len(floor.paid), len(floor.values)),
            "families": {name: [count, families[name]] for name, count in sorted(paid.items())},
            "ids": [task.id for task in floor.paid],
            "official": [asdict(row) for row in inner.official(floor.played)] if isinstance(inner, Benchmark) else [],
        }
    return {
        "env": env.id,
        "version": inner.version if isinstance(inner, Benchmark) else "",
        "split": tasks.split,
        "tasks": tasks.count,
        "every": tasks.every,
        "agents": agents,
        "any": _share(len(every), tasks.count),
    }


def _share(count: int, of: int) -> dict[str, Any]:
    low, high = share_interval(count, of) if of else (0.0, 1.0)
    return {"paid": count, "low": low, "high": high}


def headline(found: Mapping[str, Any]) -> str:
    """The row of a suite's own table that speaks for all, with its value: the known one whose name begins with "overall", else
    the first. "" without one, or if its value is unknown."""
    rows = found["official"]
    known = (row for row in rows if row["name"].startswith("overall") and row["value"] is not None)
    row = next(known, rows[0] if rows else {"value": None})
    return "" if row["value"] is None else f"{row['name']} {row['value']:.4g}"


# Contents that training and held-out tasks share: function names, n-grams of prompts, arguments of gold calls

KINDS = ("functions", "n-grams", "gold arguments")
EXAMPLES = 5
"""Examples that a report keeps per kind."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Shared contents of a kind. `shared`: different items in both splits. `tasks`: held-out tasks with a shared item, `half`:
    with at least half of their items shared, `of`: with any item. `examples`: item, held-out task, training task."""

    kind: str
    shared: int
    tasks: int
    half: int
    of: int
    examples: list[tuple[str, str, str]] = field(repr=False)


def find_leaks(env: ToolEnv, train: Iterable[int], heldout: Iterable[int], n: int = 8) -> list[Leak]:
    """Compare tasks of the splits "train" and "heldout", by their seeds. `n`: words per n-gram."""
    seen: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for task, items in _contents(env, "train", train, n):
        for kind in KINDS:
            for item in items[kind]:
                seen[kind].setdefault(item, task)
    found, held = [], list(_contents(env, "heldout", heldout, n))
    for kind, trained in seen.items():
        shares = [(task, len(items[kind]), sorted(items[kind] & trained.keys())) for task, items in held if items[kind]]
        leaks = [(task, count, common) for task, count, common in shares if common]
        found.append(
            Leak(
                kind,
                shared=len({item for _, _, common in leaks for item in common}),
                tasks=len(leaks),
                half=sum(2 * len(common) >= count for _, count, common in leaks),
                of=len(shares),
                examples=[(common[0], task, trained[common[0]]) for task, _, common in leaks[:EXAMPLES]],
            )
        )
    return found


def _contents(env: ToolEnv, split: str, seeds: Iterable[int], n: int) -> Iterator[tuple[str, dict[str, frozenset[str]]]]:
    for seed in seeds:
        opening, _ = env.reset(seed=seed, options={"split": split})
        try:
            turns = env.gold_turns(env.task)
        except NotImplementedError:
            turns = []
        calls = [call for turn in turns for call in turn.tool_calls if call.arguments]
        found = (
            frozenset(env.toolbox.names),
            frozenset(gram for message in opening if message.role == "user" for gram in ngrams(message.content, n)),
            frozenset(json.dumps(call.arguments, sort_keys=True, ensure_ascii=False) for call in calls),
        )
        env.close()
        yield env.task.id, dict(zip(KINDS, found, strict=True))


def ngrams(text: str, n: int) -> set[str]:
    """Runs of `n` words, lower case; of a shorter text all its words."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[at : at + n]) for at in range(max(len(words) - n + 1, 1))} if words else set()
