"""Where sampled tokens went: how many there were since the last update, and how many of them were thrown away, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentrl.rollout.clock import Watch
from agentrl.rollout.ledger import GroupState
from agentrl.trajectory import Group, Trajectory

RETRIED = "retried"


class Spent:
    """Counts the sampled tokens of each attempt at an episode as it ends, of members and greedy episodes alike, and of episodes
    that are cut off (`watch.cut`) those of the turns that were over. Those of an attempt that is made again, of a member that its
    group does not need and of a group that is dropped are thrown away."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._sampled = 0
        self._thrown: Counter[str] = Counter()
        self._of: Counter[int] = Counter()  # of groups that are running or complete, by index

    def attempt(self, index: int, trajectory: Trajectory, again: bool, runs: bool) -> None:
        """An attempt of group `index` has ended. `again`: another one follows in its place; `runs`: the group still does. An
        attempt may end in the moment between its group being given up and being stopped."""
        tokens = trajectory.sampled_tokens
        self._sampled += tokens
        if again or not runs:
            self._thrown[RETRIED if runs else GroupState.CANCELLED.value] += tokens
        else:
            self._of[index] += tokens

    def finished(self, group: Group) -> None:
        """The group has its members: what others sampled for it is thrown away."""
        tokens = _tokens(group)
        self._thrown[GroupState.CANCELLED.value] += self._of[group.index] - tokens
        self._of[group.index] = tokens

    def dropped(self, index: int, state: GroupState) -> None:
        """The group will not be trained."""
        self._thrown[state.value] += self._of.pop(index, 0)

    def trained(self, group: Group) -> None:
        """The group was trained."""
        self._of.pop(group.index, None)

    def take(self) -> dict[str, float]:
        """The numbers of an update's row, which begin anew: `tokens_sampled`, `tokens_thrown`, and of these `tokens_thrown/WHY`:
        the state in which a group was dropped, or `retried`."""
        cut, self._watch.cut = self._watch.cut, 0
        self._thrown[GroupState.CANCELLED.value] += cut
        thrown = {f"tokens_thrown/{why}": float(count) for why, count in sorted(self._thrown.items()) if count}
        row = {"tokens_sampled": float(self._sampled + cut), "tokens_thrown": float(self._thrown.total()), **thrown}
        self._sampled = 0
        self._thrown.clear()
        return row

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint contains; `load_json` is the inverse."""
        return {
            "sampled": self._sampled,
            "thrown": dict(self._thrown),
            "of": {str(index): n for index, n in self._of.items() if n},
        }

    def load_json(self, state: Mapping[str, Any], complete: list[Group]) -> None:
        """`complete`: groups that wait for an update. Others, which ran, are begun anew: what was sampled for them is lost."""
        self._sampled, self._thrown = state.get("sampled", 0), Counter(state.get("thrown", {}))  # missing in older checkpoints
        for group in complete:
            self._of[group.index] = _tokens(group)
        lost = sum(count for index, count in state.get("of", {}).items() if int(index) not in self._of)
        self._thrown[GroupState.CANCELLED.value] += lost


def _tokens(group: Group) -> int:
    kept = [*group.trajectories, *([] if group.baseline is None else [group.baseline])]
    return sum(member.sampled_tokens for member in kept)
