"""Group ledger: state machine of a run's groups (staleness, replacement, resume)."""

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


def zero_variance(group: Group) -> bool:
    """Return True if all scored members, and the greedy baseline if any, have the same reward (zero variance).

    Compared as float32, the trainer's type: rewards that differ only by a rounding error give no learning signal."""
    with np.errstate(over="ignore"):
        rewards = [np.float32(t.reward) for t in [*group.scored(), *([group.baseline] if group.baseline else [])]]
    return len(set(rewards)) == 1


def unscored_cause(trajectory: Trajectory) -> str:
    """Return the cause of a missing score: the infrastructure's stop reason, or `reward_spec` if its root was null."""
    return trajectory.stop.value if trajectory.stop.infrastructure else "reward_spec"


def extra_count(count: int, factor: float) -> int:
    """Return the extra number that an oversampling factor adds to `count`, rounded up (1e-9 absorbs 1.1 x 10 = 11.000..01)."""
    return math.ceil(count * (factor - 1.0) - 1e-9)


# Group ledger
#
# PENDING -> RUNNING -> COMPLETE -> { TRAINED | FILTERED | REFUSED | STALE | FAILED | CANCELLED }
#
# Every group that is not FILTERED, REFUSED, STALE, FAILED or CANCELLED holds a slot; slot s belongs to update s // B
# (B groups per update). A group is admitted while the update of the next free slot is <= version + eta
# (eta = `max_staleness`). A dropped group frees its slot for another one, so the schedule does not depend on the
# fate of single groups.
#
# With `spare` slots (oversampling), that many more groups are admitted, and an update need not wait for the slowest:
# up to `spare` running groups that it would push over the staleness bound are CANCELLED instead.
#
# The bound is enforced when groups are consumed: for every trained token, version_at_update - token_version <= eta.


class GroupState(StrEnum):
    """State of a group; the last six are final. FILTERED: all members have the same reward. REFUSED: by the user's filter
    (`rollout.accept`). FAILED: too few scored members. CANCELLED: not needed, since enough other groups were complete."""

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
    """One dispatched group. `born`: weight version at admission, a lower bound on the version of each of its tokens. `oldest`:
    lowest version that sampled one of its tokens, set when the group completes (until then `born`), so that selection
    reads no tokens."""

    index: int
    born: int
    oldest: int
    state: GroupState = GroupState.RUNNING
    group: Group | None = None


class GroupLedger:
    """Admission, selection and accounting of groups. Pure bookkeeping: it neither starts nor awaits anything.

    Selection visits each group once and none of its tokens (O(n) for n groups; `ready` O(n log n)). While too few groups are
    complete and none can be too old, it visits none.
    """

    def __init__(self, groups_per_update: int, max_staleness: int, spare: int = 0) -> None:
        self.groups_per_update = groups_per_update
        self.max_staleness = max_staleness
        self.spare = spare
        self.version = 0
        self._entries: dict[int, GroupEntry] = {}
        self._again: list[int] = []
        self.total = 0
        """Number of indices ever assigned (a group that is rerun after a resume counts once)."""
        self._past: Counter[GroupState] = Counter()  # groups that have left the ledger, by their final state
        # Kept up to date so that most queries need not visit every group: thousands of groups end one by one.
        self.waiting_count = 0
        """Number of complete groups that wait for an update."""
        self._lowest = 0  # lower bound on the `oldest` of all groups

    # -- admission ---------------------------------------------------------------------------------

    def admit(self) -> int | None:
        """Admit a group and return its index, or None while the staleness bound does not allow another one."""
        # Running, complete and trained groups hold slots: after v updates v * B are trained, so at most (eta + 1) * B groups
        # (plus the spare ones) are ahead of the trainer.
        slots_taken = self._past[GroupState.TRAINED] + len(self._entries)
        if slots_taken >= (self.version + self.max_staleness + 1) * self.groups_per_update + self.spare:
            return None
        if self._again:
            # Before new indices: tasks and seeds follow from the index, so groups interrupted by a checkpoint are not skipped.
            index = self._again.pop(0)
        else:
            index, self.total = self.total, self.total + 1
        self._entries[index] = GroupEntry(index, self.version, self.version)
        return index

    # -- transitions of a group --------------------------------------------------------------------

    def complete(self, group: Group) -> None:
        """RUNNING -> COMPLETE: all members have ended and enough are scored; their tokens no longer change."""
        entry = self._entries.get(group.index)
        if entry is None or entry.state is not GroupState.RUNNING:
            raise ValueError(f"group {group.index} is not running")
        versions = [x.oldest for member in group.trajectories for x in member.ledgers if x.oldest is not None]
        entry.group, entry.state, entry.oldest = group, GroupState.COMPLETE, min(versions, default=entry.born)
        self.waiting_count += 1

    def drop(self, index: int, state: GroupState) -> None:
        """Remove a group as FILTERED, REFUSED, STALE, FAILED or CANCELLED, which frees its slot."""
        if state not in _DROPPED:
            raise ValueError(f"a group cannot be dropped as {state}")
        if index not in self._entries:
            raise ValueError(f"group {index} is not in the ledger")
        self.waiting_count -= self._entries.pop(index).state is GroupState.COMPLETE
        self._past[state] += 1

    # -- selection ---------------------------------------------------------------------------------

    def too_old(self) -> list[int]:
        """Indices of running or complete groups that can no longer be trained within the staleness bound."""
        if self.version - self._lowest <= self.max_staleness:
            return []
        self._lowest = min((e.oldest for e in self._entries.values()), default=self.version)
        return [e.index for e in self._entries.values() if self.version - e.oldest > self.max_staleness]

    def surplus(self, chosen: Iterable[Group]) -> list[int]:
        """Indices of running or complete groups, not chosen for the next update, that it pushes over the bound. Empty without
        spare slots: no group is dropped before it is too old."""
        if not self.spare:
            return []
        kept = {group.index for group in chosen}
        late = [e.index for e in self._entries.values() if self.version + 1 - e.oldest > self.max_staleness]
        return [index for index in late if index not in kept]

    def ready(self) -> list[Group] | None:
        """Choose the B groups of the next update by oldest weights, then lowest index. Returns None if there are too few, or if
        more running groups than spare slots must still join this update."""
        if self.waiting_count < self.groups_per_update:
            return None
        urgent, usable = 0, list[tuple[int, int, Group]]()
        for entry in self._entries.values():
            if entry.group is None:
                # Groups that the next update would push over the bound must join this one. Their age counts from admission:
                # their tokens may turn out newer, but that is known too late for this update.
                urgent += self.version + 1 - entry.oldest > self.max_staleness
            elif self.version - entry.oldest <= self.max_staleness:
                usable.append((entry.oldest, entry.index, entry.group))
        if urgent > self.spare or len(usable) < self.groups_per_update:
            return None
        usable.sort()  # oldest first (indices are unique), so that the groups left over are those that can wait longest
        # In index order, so that a batch does not depend on which group finished first.
        chosen = sorted(usable[: self.groups_per_update], key=itemgetter(1))
        return [group for _, _, group in chosen]

    def train(self, groups: Iterable[Group]) -> None:
        """COMPLETE -> TRAINED for the groups of one update; increments the version."""
        for group in groups:
            entry = self._entries.pop(group.index)
            if entry.state is not GroupState.COMPLETE:
                raise ValueError(f"group {group.index} is {entry.state}, not complete")
            self._past[GroupState.TRAINED] += 1
            self.waiting_count -= 1
        self.version += 1

    # -- accounting --------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Number of groups by state; the values sum to `total`."""
        now = Counter(entry.state for entry in self._entries.values())
        now[GroupState.PENDING] = len(self._again)
        return {state.value: now[state] + self._past[state] for state in GroupState}

    # -- checkpoint --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """State for a checkpoint. Running groups become pending again; complete groups are written separately, one at a time
        (see `complete_groups`)."""
        running = [e.index for e in self._entries.values() if e.state is GroupState.RUNNING]
        return {
            "version": self.version,
            "next": self.total,
            "again": sorted([*self._again, *running]),
            "past": {state.value: count for state, count in self._past.items()},
            "complete": [{"index": e.index, "born": e.born} for e in self._entries.values() if e.group is not None],
        }

    def complete_groups(self) -> list[Group]:
        """Return the complete groups in the order of `to_json`; they no longer change."""
        return [e.group for e in self._entries.values() if e.group is not None]

    def load_json(self, state: Mapping[str, Any], groups: Iterable[Group] = ()) -> None:
        """Restore the state of `to_json`. `groups`: result of `complete_groups`. Raises ValueError if they are not of `state`."""
        self.version, self.total = state["version"], state["next"]
        self._again = list(state["again"])
        self._past = Counter({GroupState(name): count for name, count in state["past"].items()})
        rows = state["complete"]
        given = {group.index: group for group in groups}
        if set(given) != {row["index"] for row in rows}:
            raise ValueError(f"expected complete groups {sorted(row['index'] for row in rows)}, got {sorted(given)}")
        self._entries = {row["index"]: GroupEntry(row["index"], row["born"], row["born"]) for row in rows}
        self.waiting_count = 0
        for index in self._entries:
            self.complete(given[index])
        self._lowest = min((e.oldest for e in self._entries.values()), default=0)
