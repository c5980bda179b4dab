"""The advantage `tree` against plain loops over segments, its example in the manual, and its defaults."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from agentrl.contrib.branching import advantage
from tests.algorithm.oracles.advantages import Out, empty, flat_same, never, scored, std
from tests.algorithm.oracles.batches import Row
from tests.algorithm.oracles.test_oracles import BLOCKS, ORACLE, check_advantages, each
from tests.algorithm.test_docs_numbers import documented, group_of

ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "tree": {"local": [0.0, 0.3, 1.0], "share": [0.0, 0.5, 1.0], "eps": [1e-6, 1e-3, 1.0]}
}


@dataclass
class Segment:
    """What one member sampled from turn `start` to turn `stop`; `after`: what goes on from there, that member first."""

    member: int
    start: int
    stop: float
    reward: float
    after: list[Segment]

    def worth(self) -> float:
        return mean_of([segment.worth() for segment in self.after]) if self.after else self.reward


def mean_of(values: list[float]) -> float:
    """NaN is not known."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def tree(rows: list[Row], local: float = 0.5, share: float = 0.0, eps: float = 1e-6) -> Out:
    out, exact = empty(rows), never(rows)
    for members in scored(rows).values():
        first = {member: rows[numbers[0]] for (_, member), numbers in members.items()}
        rewards = [row.reward for row in first.values()]

        def grown(member: int, start: int, first: dict[int, Row] = first) -> Segment:
            turns = sorted({row.branch_turn for row in first.values() if row.parent == member and row.branch_turn > start})
            reward = first[member].reward if member in first else math.nan
            if not turns:
                return Segment(member, start, math.inf, reward, [])
            others = [m for m, row in first.items() if row.parent == member and row.branch_turn == turns[0]]
            return Segment(member, start, turns[0], reward, [grown(m, turns[0]) for m in (member, *others)])

        def put(segment: Segment, place: float, portion: float, whole: float, members: Any = members, std_: float = 0.0) -> None:
            value = segment.worth() - (1 - local) * whole - local * place
            for key, numbers in members.items():
                for n in numbers if key[1] == segment.member else ():
                    row = rows[n]
                    at = np.maximum(row.turns, row.branch_turn)
                    mine = row.mask & (at >= segment.start) & (at < segment.stop)
                    out[n][mine] = 0.0 if math.isnan(value) else portion**share * value / (std_ + eps)
            known = sum(not math.isnan(other.worth()) for other in segment.after)
            for other in segment.after:
                put(other, segment.worth(), portion / max(known, 1), whole, members, std_)

        absent = {row.parent for row in first.values()} - {-1, *first}
        roots = [grown(member, 0) for member in [*(m for m, row in first.items() if row.parent < 0), *absent]]
        whole = mean_of([segment.worth() for segment in roots])
        for segment in roots:
            put(segment, whole, 1.0, whole, members, std(rewards))
        for n in itertools.chain(*members.values()):
            exact[n][:] = flat_same(rewards)
    return Out(out, exact)


def check_tree(seed: int) -> None:
    check_advantages("tree", seed, sys.modules[__name__])


@ORACLE
@given(block=BLOCKS)
def test_it_is_what_the_page_says(block: range) -> None:
    each(block, check_tree)


def test_the_example_of_the_manual() -> None:
    turns, parent, before = torch.tensor([0, 1, 1, 0]), torch.tensor([-1, 0, -1]), torch.tensor([0, 1, 0])
    found = advantage.tree(group_of([1, 0, 0], [2, 1, 1], turns=turns, parent=parent, branch_turn=before))
    assert found.advantages.tolist() == pytest.approx(documented("tree"), abs=1e-4)


def test_its_defaults_are_those_of_the_manual() -> None:
    found = inspect.signature(advantage.tree).parameters.values()
    assert {p.name: p.default for p in found if p.kind is inspect.Parameter.KEYWORD_ONLY} == {
        "local": 0.5, "share": 0.0, "eps": 1e-6,
    }  # fmt: skip
