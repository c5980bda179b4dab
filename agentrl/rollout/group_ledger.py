"""The group ledger: the state machine of a run's groups (staleness, replacement, resume)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any

import numpy as np

from agentrl.data.trajectory import Group, Trajectory

# Facts of a group


def alike(group: Group) -> bool:
    """Return True if all scored members, and the greedy episode if there is one, have the same reward (zero variance),
    as the trainer's float32 have it: a sum of terms that is off by a rounding error teaches nothing."""
    with np.errstate(over="ignore"):
        rewards = [np.float32(t.reward) for t in [*group.scored(), *([group.baseline] if group.baseline else [])]]
    return len(set(rewards)) == 1


def unscored_cause(trajectory: Trajectory) -> str:
    """Why an episode has no score: the fault that ended it, or `reward_spec`, whose root was null."""
    return trajectory.stop.value if trajectory.stop.infrastructure else "reward_spec"


def more(count: int, factor: float) -> int:
    """Number of groups beyond `count` that an oversampling factor starts (rounded up; 1e-9 absorbs 1.1 x 10 = 11.000..01)."""
    return math.ceil(count * (factor - 1.0) - 1e-9)


# The group ledger: the one state machine of a run (staleness, replacement, resume).
#
# PENDING -> RUNNING -> COMPLETE -> { TRAINED | FILTERED | REFUSED | STALE | FAILED | CANCELLED }
#
# Every group that is not FILTERED, REFUSED, STALE, FAILED or CANCELLED holds a slot; slot s is meant for update s // B
# (B groups per update). A group is admitted as long as the update of the next free slot is <= version + eta
# (eta = `max_staleness`). A dropped group frees its slot for another one, so the schedule is the same whatever
# happens to single groups.
#
# With `spare` slots (oversampling), that many more groups are admitted, and an update need not wait for the last
# ones: those that it would push over the bound, up to `spare` running groups, are CANCELLED instead.
#
# The bound is enforced when groups are consumed: for every trained token, version_at_update - token_version <= eta.


class GroupState(StrEnum):
    """The state of a group. The last six are final. REFUSED: by the run's own filter (`rollout.accept`).
    CANCELLED is nobody's fault: there were enough others."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETE = "complete"
    TRAINED = "trained"
    FILTERED = "filtered"
    REFUSED = "refused"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"


_DROPPED = (GroupState.FILTERED, GroupState.REFUSED, GroupState.STALE, GroupState.FAILED, GroupState.CANCELLED)


@dataclass(slots=True)
class GroupEntry:
    """One dispatched group. `born`: the version of the weights when it was admitted, a lower bound on
    the version of each of its tokens. `oldest`: the oldest weights that sampled one of its tokens, set once when
    the group completes (`born` while it is running), so that selecting groups never reads a token."""

    index: int
    born: int
    oldest: int
    state: GroupState = GroupState.RUNNING
    group: Group | None = None


class GroupLedger:
    """Admission, selection and accounting of groups. Pure bookkeeping: it neither starts nor awaits anything.

    Selection looks at each group in the ledger once and at none of its tokens (O(n) for n groups; `ready` O(n log n)); while too
    few are complete, and none can be too old, it looks at none.
    """

    def __init__(self, groups_per_update: int, max_staleness: int, spare: int = 0) -> None:
        self.groups_per_update = groups_per_update
        self.max_staleness = max_staleness
        self.spare = spare
        self.version = 0
        self._entries: dict[int, GroupEntry] = {}
        self._again: list[int] = []
        self.total = 0
        """Groups that were ever given an index (those run again after a resume count once)."""
        self._past: Counter[GroupState] = Counter()  # groups that have left the ledger, by their final state
        # What most looks at the ledger need, so that they need no look at each group: thousands of groups end one by one.
        self.waiting_count = 0
        """Groups that wait for an update."""
        self._lowest = 0  # no group has tokens of older weights

    # -- admission ---------------------------------------------------------------------------------

    def admit(self) -> int | None:
        """The index of a group to start now, or None while the staleness bound does not allow another one."""
        # Running, complete and trained groups hold slots: after v updates v * B are trained, so at most (eta + 1) * B groups
        # (plus the spare ones) are ahead of the trainer.
        slots_taken = self._past[GroupState.TRAINED] + len(self._entries)
        if slots_taken >= (self.version + self.max_staleness + 1) * self.groups_per_update + self.spare:
            return None
        if self._again:
            # Before new indices: a group that ran when the checkpoint was written has its task and seeds from its index, so
            # none is skipped.
            index = self._again.pop(0)
        else:
            index, self.total = self.total, self.total + 1
        self._entries[index] = GroupEntry(index, self.version, self.version)
        return index

    # -- what happens to a group -------------------------------------------------------------------

    def complete(self, group: Group) -> None:
        """RUNNING -> COMPLETE: all members have finished and enough of them survived; their tokens no longer change."""
        entry = self._entries.get(group.index)
        if entry is None or entry.state is not GroupState.RUNNING:
            raise ValueError(f"group {group.index} is not running")
        versions = [x.oldest for member in group.trajectories for x in member.ledgers if x.oldest is not None]
        entry.group, entry.state, entry.oldest = group, GroupState.COMPLETE, min(versions, default=entry.born)
        self.waiting_count += 1

    def drop(self, index: int, state: GroupState) -> None:
        """To FILTERED, REFUSED, STALE, FAILED or CANCELLED: the group leaves the ledger and frees its slot."""
        if state not in _DROPPED:
            raise ValueError(f"a group cannot be dropped as {state}")
        if index not in self._entries:
            raise ValueError(f"group {index} is not in the ledger")
        self.waiting_count -= self._entries.pop(index).state is GroupState.COMPLETE
        self._past[state] += 1

    # -- selection ---------------------------------------------------------------------------------

    def too_old(self) -> list[int]:
        """Groups, running or complete, that can no longer be trained within the bound."""
        if self.version - self._lowest <= self.max_staleness:
            return []
        self._lowest = min((e.oldest for e in self._entries.values()), default=self.version)
        return [e.index for e in self._entries.values() if self.version - e.oldest > self.max_staleness]

    def surplus(self, chosen: Iterable[Group]) -> list[int]:
        """With spare slots: groups, running or complete, that are not chosen for the next update and that it
        pushes over the bound. Without spare slots, no group is given up before it is too old."""
        if not self.spare:
            return []
        kept = {group.index for group in chosen}
        return [
            e.index for e in self._entries.values() if e.index not in kept and self.version + 1 - e.oldest > self.max_staleness
        ]

    def ready(self) -> list[Group] | None:
        """The B groups of the next update, chosen by oldest weights, then lowest index; None if there are too few,
        or if more running groups must be part of this update than there are spare slots."""
        if self.waiting_count < self.groups_per_update:
            return None
        urgent, usable = 0, list[tuple[int, int, Group]]()
        for entry in self._entries.values():
            if entry.group is None:
                # Those that the next update would push over the bound must be part of this one. Their age is counted from their
                # admission: their tokens may turn out newer, but by then the update would be past.
                urgent += self.version + 1 - entry.oldest > self.max_staleness
            elif self.version - entry.oldest <= self.max_staleness:
                usable.append((entry.oldest, entry.index, entry.group))
        if urgent > self.spare or len(usable) < self.groups_per_update:
            return None
        usable.sort()  # oldest first (no two have one index): what is left over is what can wait longest
        # In the order of their indices, so that a batch does not depend on which group finished first.
        chosen = sorted(usable[: self.groups_per_update], key=itemgetter(1))
        return [group for _, _, group in chosen]

    def train(self, groups: Iterable[Group]) -> None:
        """COMPLETE -> TRAINED for the groups of one update, and the version goes up by one."""
        for group in groups:
            entry = self._entries.pop(group.index)
            if entry.state is not GroupState.COMPLETE:
                raise ValueError(f"group {group.index} is {entry.state}, not complete")
            self._past[GroupState.TRAINED] += 1
            self.waiting_count -= 1
        self.version += 1

    # -- accounting --------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state; the values sum to `total`."""
        now = Counter(entry.state for entry in self._entries.values())
        now[GroupState.PENDING] = len(self._again)
        return {state.value: now[state] + self._past[state] for state in GroupState}

    # -- checkpoint --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything except the progress of running groups, which are pending again after a resume, and the complete groups:
        `complete_groups` returns them, to be written one at a time.
        """
        running = [e.index for e in self._entries.values() if e.state is GroupState.RUNNING]
        return {
            "version": self.version,
            "next": self.total,
            "again": sorted([*self._again, *running]),
            "past": {state.value: count for state, count in self._past.items()},
            "complete": [{"index": e.index, "born": e.born} for e in self._entries.values() if e.group is not None],
        }

    def complete_groups(self) -> list[Group]:
        """The complete groups, in the same order as in `to_json`; they no longer change."""
        return [e.group for e in self._entries.values() if e.group is not None]

    def load_json(self, state: Mapping[str, Any], groups: Iterable[Group] = ()) -> None:
        """Inverse of `to_json`; `groups` are the result of `complete_groups`, which the state of an older checkpoint contains.

        Raises ValueError if `groups` are not those of `state`.
        """
        self.version, self.total = state["version"], state["next"]
        self._again = list(state["again"])
        self._past = Counter({GroupState(name): count for name, count in state["past"].items()})
        rows = state["complete"]
        whole = [Group.from_json(row) for row in rows if "trajectories" in row]
        given = {group.index: group for group in (whole or groups)}
        if set(given) != {row["index"] for row in rows}:
            raise ValueError(f"expected complete groups {sorted(row['index'] for row in rows)}, got {sorted(given)}")
        self._entries = {row["index"]: GroupEntry(row["index"], row["born"], row["born"]) for row in rows}
        self.waiting_count = 0
        for index in self._entries:
            self.complete(given[index])
        self._lowest = min((e.oldest for e in self._entries.values()), default=0)
