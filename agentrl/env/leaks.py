"""Contents that training and held-out tasks share: function names, n-grams of prompts, arguments of gold calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.env.base import ToolEnv

KINDS = ("functions", "n-grams", "gold arguments")
SHOWN = 5
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
    held = list(_contents(env, "heldout", heldout, n))
    return [_leak(kind, seen[kind], [(task, items[kind]) for task, items in held if items[kind]]) for kind in KINDS]


def _leak(kind: str, seen: Mapping[str, str], held: Sequence[tuple[str, frozenset[str]]]) -> Leak:
    shares = [(task, len(items), sorted(items & seen.keys())) for task, items in held]
    leaks = [(task, count, common) for task, count, common in shares if common]
    return Leak(
        kind,
        shared=len({item for _, _, common in leaks for item in common}),
        tasks=len(leaks),
        half=sum(2 * len(common) >= count for _, count, common in leaks),
        of=len(held),
        examples=[(common[0], task, seen[common[0]]) for task, _, common in leaks[:SHOWN]],
    )


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
