"""Measure tasks: rewards of agents that solve nothing, and content that splits share."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.env.base import ToolEnv
from agentrl.env.check import floors, share_interval
from agentrl.env.check_tools import Subject
from agentrl.env.official import WHOLE, Benchmark

# The floor


def counted_tasks(env: ToolEnv, split: str | None, most: int | None) -> tuple[str, int, bool]:
    """Return (split, number of tasks to measure, are these all). Default: every task of a suite, else the first `most` (200)
    tasks of "heldout"."""
    suite = isinstance(env.unwrapped, Benchmark)
    chosen = split or (WHOLE if suite else "heldout")
    there = env.task_count(chosen)
    wanted = most if most is not None else there if suite and there is not None else 200
    count = wanted if there is None else min(wanted, there)
    return chosen, count, there is not None and count == there


def measure(subject: Subject, split: str | None = None, most: int | None = None) -> dict[str, Any]:
    """Measure each script of `IDLERS`: the mean reward over scored tasks, and the fully rewarded tasks: their number with the
    95 % interval of their share (Wilson), IDs, and families with (paid, all). "any": fully rewarded for at least one script. For
    a suite also the source's `version` and each script's official table ("official"). Raises Skipped if there is no scorer."""
    env = subject.build()
    chosen, count, every = counted_tasks(env, split, most)
    inner = env.unwrapped
    assert isinstance(inner, ToolEnv)
    made = [env.make_task(seed, chosen) for seed in range(count)]
    families = Counter(inner.family(task) for task in made)
    found = list(floors(subject, env, chosen, range(count)))
    env.close()
    any_paid = {task.id for floor in found for task in floor.paid}
    agents: dict[str, dict[str, Any]] = {}
    for floor in found:
        scored = [value for value in floor.values if value is not None]
        paid = Counter(inner.family(task) for task in floor.paid)
        agents[floor.agent] = {
            "mean": statistics.fmean(scored) if scored else None,
            "unscored": len(floor.values) - len(scored),
            **_share(len(floor.paid), len(floor.values)),
            "families": {name: [number, families[name]] for name, number in sorted(paid.items())},
            "ids": [task.id for task in floor.paid],
            "official": [asdict(row) for row in inner.official(floor.played)] if isinstance(inner, Benchmark) else [],
        }
    return {
        "env": env.id,
        "version": inner.version if isinstance(inner, Benchmark) else "",
        "split": chosen,
        "tasks": count,
        "every": every,
        "agents": agents,
        "any": _share(len(any_paid), count),
    }


def _share(count: int, of: int) -> dict[str, Any]:
    low, high = share_interval(count, of) if of else (0.0, 1.0)
    return {"paid": count, "low": low, "high": high}


def headline(found: Mapping[str, Any]) -> str:
    """Return the main row of a suite's official table with its value: the first known row whose name begins with "overall", else
    the first row. "" without rows, or if its value is unknown."""
    rows = found["official"]
    known = (row for row in rows if row["name"].startswith("overall") and row["value"] is not None)
    row = next(known, rows[0] if rows else {"value": None})
    return "" if row["value"] is None else f"{row['name']} {row['value']:.4g}"


# Shared content of training and held-out tasks: function names, n-grams of prompts, arguments of gold calls

KINDS = ("functions", "n-grams", "gold arguments")
EXAMPLES = 5
"""Examples per kind in a report."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Shared content of a kind. `shared`: number of distinct items in both splits. Numbers of held-out tasks: `tasks` with a
    shared item, `half` with at least half of their items shared, `of` with any item. `examples`: (item, held-out task, training
    task)."""

    kind: str
    shared: int
    tasks: int
    half: int
    of: int
    examples: list[tuple[str, str, str]] = field(repr=False)


def find_leaks(env: ToolEnv, train: Iterable[int], heldout: Iterable[int], n: int = 8) -> list[Leak]:
    """Compare the tasks of "train" and "heldout" with the given seeds. `n`: words per n-gram."""
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
    """Return all runs of `n` lower-case words; for a shorter text, one run of all its words."""
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[at : at + n]) for at in range(max(len(words) - n + 1, 1))} if words else set()
