"""Credit to single turns from trees of episodes (`rollout.branch`): what followed from a turn, against what followed otherwise.

A *segment* is what one member of a group sampled between two places at which others branched off it. At a *place* several
segments begin: the member's own next one and those of its branches; at the group's place, all that begin at the task's prompt.

    V(place)   = the mean of V over the segments that begin there
    V(segment) = V of the place at its end; at the end of an episode its reward

This estimator is our own, derived in docs/howto/branching.md: segments that begin at one place are draws of the policy from one
history, so their mean estimates what it is worth; by place and not by leaf, so that a history does not count more because what
followed was long enough to branch once more. That a segment is compared with all and with its siblings is as in TreeRL (Hou et
al. 2025, arXiv:2506.11902) and Tree-GRPO (Ji et al. 2025, arXiv:2509.21240); departures: values by place, the two mixed as one
baseline, and one scale, that of the group, so that a group without branches is exactly GRPO's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, episodes
from agentrl.algorithm.ragged import spread
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]


@ADVANTAGES.register("tree", needs={"group"}, traits={"branches"})
def tree(
    batch: AdvantageInput, *, local: Share = 0.5, share: Share = 0.0, eps: Annotated[float, Field(ge=0)] = 1e-6
) -> AdvantageOutput:
    """m(s)^share (V(s) - (1 - local) V(group) - local V(p(s))) / (std + eps) on the tokens of segment s, which begins at p(s).

    m(s) is its share of its tree: 1 / (segments that begin there) over all places on its way, the group's left out. With `share`
    = 1 a tree weighs as much as an episode without branches; with 0 each sampled token counts alike, and turns after a
    branching count once for each time they were played. std is the unbiased one of the rewards of the scored members. Exactly
    `grpo` without branches, and 0 if all rewards are equal. What an unscored member sampled has advantage 0 and is in no mean;
    what branched off it is. Raises ConfigError for branches without turn numbers.
    """
    units = episodes(batch)
    above, std = _above(units), units.std() + eps
    scale = torch.where(std > 0, std, 1.0)
    out = torch.zeros(len(batch.mask), dtype=batch.reward.dtype)
    for group in range(units.groups):
        members = (units.group == group).nonzero().reshape(-1).tolist()
        forest = _Forest(batch, units, members, above)
        for unit in members:
            starts, values = forest.advantages(_member(batch, units, unit), local, share)
            _put(out, batch, units.episode == unit, starts, [value / scale[unit].item() for value in values])
    return AdvantageOutput(out)


@dataclass(slots=True)
class _Node:
    """A member: its reward (None if unscored), where it begins, and what branched off it, by turn."""

    reward: float | None = None
    parent: int = -1
    start: int = 0
    branches: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


class _Forest:
    """The members of one group by number, also those of whom nothing is known but that others branched off them."""

    def __init__(self, batch: AdvantageInput, units: Episodes, members: list[int], above: Tensor) -> None:
        self._nodes: defaultdict[int, _Node] = defaultdict(_Node)
        for unit in members:
            number, row = _member(batch, units, unit), int(units.first[unit])
            self._nodes[number].reward = above[unit].item()
            if batch.parent is not None and batch.branch_turn is not None and int(batch.parent[row]) >= 0:
                self._nodes[number].parent, self._nodes[number].start = int(batch.parent[row]), int(batch.branch_turn[row])
        for number, node in list(self._nodes.items()):
            if node.parent >= 0:
                self._nodes[node.parent].branches[node.start].append(number)
        self._whole = _mean(self._value(number, node.start) for number, node in self._nodes.items() if node.parent < 0)

    def advantages(self, number: int, local: float, share: float) -> tuple[list[int], list[float]]:
        """The turns at which a member's segments begin, and their advantages before they are scaled."""
        node = self._nodes[number]
        starts = sorted({node.start, *node.branches})
        values = []
        for start in starts:
            value, whole = self._value(number, start), self._whole
            if value is None or whole is None:  # nothing that followed is scored
                values.append(0.0)
                continue
            place = self._begins(number, start)
            parent = whole if place is None else self._place(*place)
            assert parent is not None
            # In this form exactly V - V(group) where the place is the group's.
            values.append(self._portion(number, start) ** share * (value - whole + local * (whole - parent)))
        return starts, values

    def _begins(self, number: int, start: int) -> tuple[int, int] | None:
        """The place where a member's segment begins: whose, and before which turn; None is the group's."""
        node = self._nodes[number]
        if start > node.start:
            return number, start
        return None if node.parent < 0 else (node.parent, node.start)

    def _value(self, number: int, start: int) -> float | None:
        """V of a member's segment that begins at turn `start`; None if nothing that followed is scored."""
        node = self._nodes[number]
        following = min((turn for turn in node.branches if turn > start), default=None)
        return node.reward if following is None else self._place(number, following)

    def _values(self, number: int, turn: int) -> list[float]:
        """V of each segment that begins before `turn` of a member, its own first; without those that have none."""
        found = [self._value(number, turn), *(self._value(branch, turn) for branch in self._nodes[number].branches[turn])]
        return [value for value in found if value is not None]

    def _place(self, number: int, turn: int) -> float | None:
        return _mean(self._values(number, turn))

    def _portion(self, number: int, start: int) -> float:
        """m of a member's segment that begins at turn `start`."""
        place, found = self._begins(number, start), 1.0
        while place is not None:
            member, turn = place
            found /= len(self._values(member, turn))
            node = self._nodes[member]
            place = self._begins(member, max((at for at in (node.start, *node.branches) if at < turn), default=node.start))
        return found


def _put(out: Tensor, batch: AdvantageInput, rows: Tensor, starts: list[int], values: list[float]) -> None:
    """Each segment's advantage on its sampled tokens, in the rows of one episode."""
    tokens = batch.mask & spread(rows, batch.offsets, len(batch.mask))
    if len(starts) == 1:
        out[tokens] = values[0]
        return
    if batch.turns is None:
        raise ConfigError('algorithm.advantage "tree" needs the column `turns` for episodes that others branched off')
    turns = batch.turns[tokens].tolist()
    out[tokens] = torch.tensor([values[max(bisect_right(starts, turn) - 1, 0)] for turn in turns], dtype=out.dtype)


def _above(units: Episodes) -> Tensor:
    """Rewards above the smallest of their group: if all are equal, every mean below is exactly 0."""
    least = units.reward.new_full((units.groups,), torch.inf).scatter_reduce(0, units.group, units.reward, "amin")
    return units.reward - least[units.group]


def _member(batch: AdvantageInput, units: Episodes, unit: int) -> int:
    row = int(units.first[unit])
    return row if batch.member is None else int(batch.member[row])


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
