"""Turn-level credit from trees of episodes (`rollout.branch`): the outcomes after a turn, compared with alternatives.

A *segment* is the part that one member of a group sampled between two branch points. At a *place* several segments begin: the
member's own next one and those of its branches; at the group's place, all that begin at the task's prompt.

V(place)   = the mean of V over the segments that begin there
V(segment) = V of the place at its end; at the end of an episode its reward

The estimator is our own, derived in docs/howto/branching.md. Like TreeRL (Hou et al. 2025, arXiv:2506.11902) and Tree-GRPO (Ji et
al. 2025, arXiv:2509.21240) it compares segments with all and with their siblings. Departures: values by place instead of leaf,
both comparisons in one baseline, and one scale per group, so that a group without branches is exactly GRPO's."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.data.rows import spread
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, deviation, episodes
from agentrl.utils.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]


@ADVANTAGES.register("tree", needs={"group"}, traits={"branches"})
def tree(
    batch: AdvantageInput, *, local: Share = 0.5, share: Share = 0.0, eps: Annotated[float, Field(ge=0)] = 1e-6
) -> AdvantageOutput:
    """Return m(s)^share (V(s) - (1 - local) V(group) - local V(p(s))) / (std + eps) on the tokens of segment s, which begins at
    p(s).

    m(s) is its share of its tree: the product of 1 / (segments that begin there) over the places on its path, except the group's.
    With `share` = 1 a tree weighs as much as an episode without branches; with 0 every sampled token counts equally, and turns
    after a branch point count once per continuation. std: unbiased, of the rewards of scored members. Equals `grpo` without
    branches, and 0 if all rewards are equal. Tokens of an unscored member have advantage 0 and enter no mean; its branches count.
    Raises ConfigError for branches without turn numbers.
    """
    units = episodes(batch)
    # Relative to the smallest reward of the group: if all are equal, every mean below is exactly 0.
    least = units.reward.new_full((units.groups,), torch.inf).scatter_reduce(0, units.group, units.reward, "amin")
    above, std = units.reward - least[units.group], deviation(units.reward, units.group, units.groups) + eps
    scale = torch.where(std > 0, std, 1.0)
    out = torch.zeros(len(batch.mask), dtype=batch.reward.dtype)
    names = (units.first if batch.member is None else batch.member[units.first]).tolist()
    for group in range(units.groups):
        members = {names[unit]: unit for unit in (units.group == group).nonzero().reshape(-1).tolist()}
        forest = _Forest(batch, {number: (above[unit].item(), int(units.first[unit])) for number, unit in members.items()})
        whole = _mean(forest.value(root, 0) for root in forest.roots)
        found: dict[int, list[tuple[int, float]]] = {number: [] for number in members}
        for number, start, value, place, portion in forest.segments([(root, 0) for root in forest.roots], whole, 1.0):
            if number not in members:
                continue
            if value is None or whole is None or place is None:  # no scored continuation
                found[number].append((start, 0.0))
            else:  # in this form exactly V - V(group) if the place is the group's
                found[number].append((start, portion**share * (value - whole + local * (whole - place))))
        for number, unit in members.items():
            _put(out, batch, units.episode == unit, found[number], scale[unit].item())
    return AdvantageOutput(out)


Segment = tuple[int, int]
"""A member's number and the turn at which one of its segments begins."""


class _Forest:
    """Members of a group by number, including members known only as parents of branches."""

    def __init__(self, batch: AdvantageInput, members: dict[int, tuple[float, int]]) -> None:
        """`members`: reward and one row of each scored member."""
        self._rewards = {number: reward for number, (reward, _) in members.items()}
        self._branches: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        parents = {}
        for number, (_, row) in members.items():
            if batch.parent is not None and batch.branch_turn is not None and int(batch.parent[row]) >= 0:
                parents[number] = int(batch.parent[row])
                self._branches[parents[number]][int(batch.branch_turn[row])].append(number)
        self.roots = [number for number in dict.fromkeys([*members, *parents.values()]) if number not in parents]

    def value(self, number: int, start: int) -> float | None:
        """Return V of a member's segment that begins at turn `start`; None without a scored continuation."""
        after = self._after(number, start)
        return _mean(self.value(*segment) for segment in after) if after else self._rewards.get(number)

    def segments(
        self, begin: list[Segment], place: float | None, portion: float
    ) -> Iterator[tuple[int, int, float | None, float | None, float]]:
        """Yield the segments at a place of value `place` and all later ones: member, first turn, V, V of its place, m."""
        for number, start in begin:
            value, after = self.value(number, start), self._after(number, start)
            yield number, start, value, place, portion
            scored = sum(self.value(*segment) is not None for segment in after)
            yield from self.segments(after, value, portion / max(scored, 1))

    def _after(self, number: int, start: int) -> list[Segment]:
        """Return the segments that begin at the end of a member's segment, its own first; [] at the end of the episode."""
        branches = self._branches[number]
        turn = min((turn for turn in branches if turn > start), default=None)
        return [] if turn is None else [(number, turn), *((branch, turn) for branch in branches[turn])]


def _put(out: Tensor, batch: AdvantageInput, rows: Tensor, segments: list[tuple[int, float]], scale: float) -> None:
    """Write each segment's advantage on its sampled tokens, in the rows of one episode."""
    tokens = batch.mask & spread(rows, batch.offsets, len(batch.mask))
    starts, values = [start for start, _ in segments], [value / scale for _, value in segments]
    if len(starts) == 1:
        out[tokens] = values[0]
        return
    if batch.turns is None:
        raise ConfigError('algorithm.advantage "tree" needs the column `turns` for episodes that others branched off')
    turns = batch.turns[tokens].tolist()
    out[tokens] = torch.tensor([values[max(bisect_right(starts, turn) - 1, 0)] for turn in turns], dtype=out.dtype)


def _mean(values: Iterable[float | None]) -> float | None:
    """Average the known values; None without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
