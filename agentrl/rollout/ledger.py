"""The group ledger: the one state machine of a run (staleness, replacement, resume).

    PENDING -> RUNNING -> COMPLETE -> { TRAINED | FILTERED | STALE | FAILED | CANCELLED }

Every group that is not FILTERED, STALE, FAILED or CANCELLED holds a slot; slot s is meant for update s // B
(B groups an update). A group is admitted while the update that the next free slot belongs to is
<= version + eta. A group that is dropped gives its slot back, so another takes its place: the schedule is
the same whatever happens to single groups.

With `spare` slots more (oversampling) that many groups more are admitted, and an update need not wait for
the last ones: what it would push over the bound, up to `spare` running groups, is CANCELLED instead.

The bound is hard at consumption: for every trained token, version_at_update - token_version <= eta.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentrl.trajectory import Group


class GroupState(StrEnum):
    """Where a group stands. The last five are final. CANCELLED: nobody's fault, there were enough others."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETE = "complete"
    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"


_GAVE_BACK = (GroupState.FILTERED, GroupState.STALE, GroupState.FAILED, GroupState.CANCELLED)


@dataclass(slots=True)
class GroupEntry:
    """One dispatched group. `born` is the version of the weights when it was admitted: a lower bound for
    the version of each of its tokens. `oldest`: the oldest weights that sampled one of its tokens, set once when
    the group completes (`born` while it still runs), so that selecting groups never reads a token."""

    index: int
    born: int
    state: GroupState = GroupState.RUNNING
    group: Group | None = None
    oldest: int = field(init=False)

    def __post_init__(self) -> None:
        self.oldest = self.born if self.group is None else _oldest(self.group, self.born)

    def complete(self, group: Group) -> None:
        """All members are back; their tokens do not change any more."""
        self.group, self.state, self.oldest = group, GroupState.COMPLETE, _oldest(group, self.born)


def _oldest(group: Group, born: int) -> int:
    versions = [x.oldest for member in group.trajectories for x in member.ledgers if x.oldest is not None]
    return min(versions, default=born)


class GroupLedger:
    """Admission, selection and accounting of groups. Pure bookkeeping: it starts and awaits nothing.

    Selection looks at each group in the ledger once, at none of its tokens (n groups: O(n), `ready` O(n log n)).
    """

    def __init__(self, groups_per_update: int, max_staleness: int, spare: int = 0) -> None:
        self.groups_per_update = groups_per_update
        self.max_staleness = max_staleness
        self.spare = spare
        self.version = 0
        self._entries: dict[int, GroupEntry] = {}
        self._again: list[int] = []
        self._next = 0
        self._past: Counter[GroupState] = Counter()

    # -- admission ---------------------------------------------------------------------------------

    def admit(self) -> int | None:
        """The index of a group to start now, or None while the staleness bound has no room for one."""
        if self.slots_taken() >= (self.version + self.max_staleness + 1) * self.groups_per_update + self.spare:
            return None
        if self._again:
            index = self._again.pop(0)
        else:
            index, self._next = self._next, self._next + 1
        self._entries[index] = GroupEntry(index, born=self.version)
        return index

    def slots_taken(self) -> int:
        """Groups that run, wait or were trained: all that gave no slot back."""
        return self._past[GroupState.TRAINED] + len(self._entries)

    # -- what happens to a group -------------------------------------------------------------------

    def complete(self, group: Group) -> None:
        """RUNNING -> COMPLETE: all members are back and enough of them survived."""
        self._running(group.index).complete(group)

    def drop(self, index: int, state: GroupState) -> None:
        """To FILTERED, STALE, FAILED or CANCELLED: the group leaves and gives its slot back."""
        if state not in _GAVE_BACK:
            raise ValueError(f"a group cannot be dropped as {state}")
        if index not in self._entries:
            raise ValueError(f"group {index} is not in the ledger")
        del self._entries[index]
        self._past[state] += 1

    def _running(self, index: int) -> GroupEntry:
        entry = self._entries.get(index)
        if entry is None or entry.state is not GroupState.RUNNING:
            raise ValueError(f"group {index} is not running")
        return entry

    # -- selection ---------------------------------------------------------------------------------

    def too_old(self) -> list[int]:
        """Groups, running or complete, that can no longer be trained within the bound."""
        return [e.index for e in self._entries.values() if self.version - e.oldest > self.max_staleness]

    def must_wait_for(self) -> list[int]:
        """Running groups that the next update would push over the bound: they belong into this one."""
        return [
            e.index
            for e in self._entries.values()
            if e.state is GroupState.RUNNING and self.version + 1 - e.oldest > self.max_staleness
        ]

    def surplus(self, chosen: Iterable[Group]) -> list[int]:
        """With spare slots: groups, running or complete, that are not chosen for the next update and that it
        pushes over the bound. Without, nothing is given up before it is too old."""
        if not self.spare:
            return []
        kept = {group.index for group in chosen}
        return [
            e.index for e in self._entries.values() if e.index not in kept and self.version + 1 - e.oldest > self.max_staleness
        ]

    def ready(self) -> list[Group] | None:
        """The B groups of the next update, oldest weights first, then lowest index; None if there are too few,
        or if more running groups than there are spare slots belong into this update."""
        if len(self.must_wait_for()) > self.spare:
            return None
        done = [e for e in self._entries.values() if e.state is GroupState.COMPLETE]
        usable = [e for e in done if self.version - e.oldest <= self.max_staleness]
        if len(usable) < self.groups_per_update:
            return None
        usable.sort(key=lambda entry: (entry.oldest, entry.index))
        chosen = sorted(usable[: self.groups_per_update], key=lambda entry: entry.index)
        return [entry.group for entry in chosen if entry.group is not None]

    def train(self, groups: Iterable[Group]) -> None:
        """COMPLETE -> TRAINED for the groups of one update, and the version goes up by one."""
        for group in groups:
            entry = self._entries.pop(group.index)
            if entry.state is not GroupState.COMPLETE:
                raise ValueError(f"group {group.index} is {entry.state}, not complete")
            self._past[GroupState.TRAINED] += 1
        self.version += 1

    # -- accounting --------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state; the values sum to `dispatched`."""
        now = Counter(entry.state for entry in self._entries.values())
        return {state.value: now[state] + self._past[state] for state in GroupState} | {
            GroupState.PENDING.value: len(self._again)
        }

    @property
    def dispatched(self) -> int:
        """Groups ever given an index (those to be run again after a resume count once)."""
        return self._next

    # -- checkpoint --------------------------------------------------------------------------------

    def to_json(self, *, contents: bool = True) -> dict[str, Any]:
        """Everything but the running groups' progress: those are pending again after a resume.

        Without `contents` the complete groups are only named: `complete_groups` gives them, to be written one
        after the other.
        """
        running = [e.index for e in self._entries.values() if e.state is GroupState.RUNNING]
        return {
            "version": self.version,
            "next": self._next,
            "again": sorted([*self._again, *running]),
            "past": {state.value: count for state, count in self._past.items()},
            "complete": [
                {"index": e.index, "born": e.born} | (e.group.to_json() if contents else {})
                for e in self._entries.values()
                if e.group is not None
            ],
        }

    def complete_groups(self) -> list[Group]:
        """The complete groups, in the order that `to_json` names them in; nothing changes them any more."""
        return [e.group for e in self._entries.values() if e.group is not None]

    def load_json(self, state: Mapping[str, Any], groups: Iterable[Group] = ()) -> None:
        """Inverse of `to_json`; `groups` are what `complete_groups` gave if that was without `contents`.

        Raises ValueError if `groups` are not those of `state`.
        """
        self.version, self._next = state["version"], state["next"]
        self._again = list(state["again"])
        self._past = Counter({GroupState(name): count for name, count in state["past"].items()})
        rows = state["complete"]
        whole = [Group.from_json(row) for row in rows if "trajectories" in row]
        found = {group.index: group for group in (whole or groups)}
        if set(found) != {row["index"] for row in rows}:
            raise ValueError(f"complete groups {sorted(row['index'] for row in rows)}, there are {sorted(found)}")
        self._entries = {
            row["index"]: GroupEntry(row["index"], row["born"], GroupState.COMPLETE, found[row["index"]]) for row in rows
        }
