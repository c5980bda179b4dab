"""The group ledger's invariants under random finishes, filters, failures and updates."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Task, Trajectory
from agentrl.rollout.group_ledger import GroupLedger, GroupState, zero_variance
from tests.conftest import examples


def ledger_of(versions: list[int]) -> TokenLedger:
    ledger = TokenLedger()
    ledger.append_context([1, 2], 0)
    if versions:  # a ledger may hold context alone
        ledger.append_sampled(list(range(len(versions))), [0.0] * len(versions), versions, 0)
    return ledger


def group_of(index: int, *members: list[list[int]]) -> Group:
    """A group whose members have a ledger per list of versions."""
    return Group(index, index, [Trajectory("x", Task("t", 0), ledgers=list(map(ledger_of, of)), reward=1.0) for of in members])


def begun(groups: int, *settings: int) -> GroupLedger:
    """A ledger that has admitted so many groups."""
    ledger = GroupLedger(*settings)
    assert [ledger.admit() for _ in range(groups)] == list(range(groups))
    return ledger


@pytest.mark.parametrize(
    ("rewards", "same"), [((0.3, 0.1 + 0.2), True), ((0.3, 0.3001), False), ((1e39, 1e39), True), ((0.0, 0.0, 0.5), False)]
)
def test_rewards_that_differ_by_rounding_teach_nothing(rewards: tuple[float, ...], same: bool) -> None:
    """float32, as the trainer has them, has one number for 0.3 and for 0.1 + 0.2."""
    group = group_of(0, *[[[0]]] * len(rewards))
    for member, reward in zip(group.trajectories, rewards, strict=True):
        member.reward = reward
    assert zero_variance(group) is same


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.data())
def test_random_schedules_keep_the_invariants(batch: int, eta: int, spare: int, data: st.DataObject) -> None:
    ledger = GroupLedger(batch, eta, spare)
    born: dict[int, int] = {}
    trained: list[int] = []
    for _ in range(data.draw(st.integers(1, 60))):
        while (index := ledger.admit()) is not None:
            assert index not in born or index not in trained
            born[index] = ledger.version
        there = list(ledger._entries.values())
        assert ledger.too_old() == [e.index for e in there if ledger.version - e.oldest > eta], "however seldom it looks"
        for index in ledger.too_old():
            ledger.drop(index, GroupState.STALE)
            born.pop(index)
        assert sum(ledger.counts().values()) == ledger.total
        taken = sum(ledger.counts()[state] for state in ("running", "complete", "trained"))
        assert taken <= (ledger.version + eta + 1) * batch + spare
        running = [e.index for e in ledger._entries.values() if e.state is GroupState.RUNNING]
        if running:
            index = data.draw(st.sampled_from(running))
            fate = data.draw(st.sampled_from(["complete", "complete", "filtered", "failed"]))
            if fate == "complete":
                # A partial rollout may span every version since it was admitted.
                version = st.integers(born[index], ledger.version)
                ledgers = st.lists(st.lists(version, max_size=3), min_size=1, max_size=3)
                ledger.complete(group_of(index, *data.draw(st.lists(ledgers, min_size=1, max_size=3))))
            else:
                ledger.drop(index, GroupState(fate))
        ready = ledger.ready()
        there = list(ledger._entries.values())
        waited = sum(e.state is GroupState.RUNNING and ledger.version + 1 - e.oldest > eta for e in there)
        usable = [(e.oldest, e.index) for e in there if e.state is GroupState.COMPLETE and ledger.version - e.oldest <= eta]
        assert (ready is not None) == (waited <= spare and len(usable) >= batch)
        if ready is not None:
            chosen = [group.index for group in ready]
            assert chosen == sorted(index for _, index in sorted(usable)[:batch]), "the oldest tokens go first"
            given_up = ledger.surplus(ready)
            late = [e.index for e in there if e.index not in chosen and ledger.version + 1 - e.oldest > eta]
            assert given_up == (late if spare else []), "kept while they may still be trained"
            running = {e.index for e in ledger._entries.values() if e.state is GroupState.RUNNING}
            assert len(running & set(given_up)) <= spare
            assert not set(given_up) & {group.index for group in ready}
            for index in given_up:
                ledger.drop(index, GroupState.CANCELLED)
            for group in ready:
                sampled = [int(v) for t in group.trajectories for x in t.ledgers for v in x.versions if v >= 0]
                assert all(ledger.version - version <= eta for version in sampled)
                assert group.index not in trained
            trained += [group.index for group in ready]
            ledger.train(ready)
            if spare:
                assert not ledger.too_old(), "what an update would push over the bound left with it"
        # The ledger can be written down and read back at any moment; running groups become pending.
        copy = GroupLedger(batch, eta, spare)
        written = [json.loads(json.dumps(group.to_json())) for group in ledger.complete_groups()]
        state = json.loads(json.dumps(ledger.to_json()))
        copy.load_json(state, map(Group.from_json, written))
        assert set(copy.too_old()) == {e.index for e in copy._entries.values() if copy.version - e.oldest > eta}
        assert copy.complete_groups() == ledger.complete_groups()
        complete = [e.oldest for e in ledger._entries.values() if e.state is GroupState.COMPLETE]
        assert [e.oldest for e in copy._entries.values()] == complete
        assert copy.total == ledger.total
        assert sum(copy.counts().values()) == copy.total
    # Something is always admissible, running or ready: no deadlock.
    assert ledger.admit() is not None or ledger._entries


def test_groups_that_are_too_old_are_told_until_they_are_dropped() -> None:
    """Two of three groups of version 0 are left over; what is admitted beside them, and each look, changes nothing of that."""
    ledger = begun(3, 1, 0, 2)
    for index in range(3):
        ledger.complete(group_of(index, [[0]]))
    ready = ledger.ready()
    assert ready is not None and [group.index for group in ready] == [0] and ledger.too_old() == []
    ledger.train(ready)
    assert ledger.admit() == 3, "born under version 1"
    assert ledger.too_old() == [1, 2] and ledger.too_old() == [1, 2]
    ledger.drop(1, GroupState.STALE)
    assert ledger.too_old() == [2] and ledger.too_old() == [2]
    ledger.drop(2, GroupState.STALE)
    assert ledger.too_old() == [] and ledger.ready() is None


@pytest.mark.parametrize(
    "members", [([[0]], [[3]]), ([[3]], [[0]]), ([[3], [0]],), ([[0], [3]],), ([[3, 0]],), ([[], [0]], [[3]])]
)
def test_one_token_that_is_too_old_keeps_its_group_from_an_update(members: tuple[list[list[int]], ...]) -> None:
    """Whichever member, ledger and place has it."""
    ledger = begun(1, 1, 4)
    ledger.version, ledger.max_staleness = 4, 1
    ledger.complete(group_of(0, *members))
    assert ledger.ready() is None and ledger.too_old() == [0]


class Counted(list):
    """Ledgers of a trajectory that count how often they are looked at."""

    looks = 0

    def __iter__(self):
        Counted.looks += 1
        return super().__iter__()


def test_after_a_resume_a_group_that_is_too_old_is_named_whatever_its_neighbours_are() -> None:
    ledger = begun(2, 1, 4)
    ledger.version = 4
    for index, version in enumerate([0, 4]):
        ledger.complete(group_of(index, [[version]]))
    again = GroupLedger(1, max_staleness=1)
    again.load_json(ledger.to_json(), ledger.complete_groups())
    assert again.too_old() == [0]


def test_selection_reads_no_tokens() -> None:
    """Each look at the ledger read every token of every complete group: O(groups^2 x tokens) an update."""
    size, Counted.looks = 64, 0
    ledger = begun(size, size, 1)
    for index in range(size):
        group = group_of(index, [[0, 0]])
        group.trajectories[0].ledgers = Counted(group.trajectories[0].ledgers)
        ledger.complete(group)
        ledger.too_old(), ledger.admit()
        ready = ledger.ready()
    assert ready is not None and ledger.surplus(ready) == [] and len(ready) == size
    assert Counted.looks == size, "once a group, when it completes"
    assert [entry.oldest for entry in ledger._entries.values()] == [0] * len(ledger._entries)


def test_a_group_that_is_missing_from_a_checkpoint_is_told() -> None:
    ledger, copy = begun(2, 2, 1), GroupLedger(2, 1)
    ledger.complete(group_of(1, [[0]]))
    [group] = ledger.complete_groups()
    with pytest.raises(ValueError, match=r"complete groups \[1\], got \[\]"):
        copy.load_json(ledger.to_json())
    copy.load_json(json.loads(json.dumps(ledger.to_json())), [group])
    assert copy.complete_groups() == [group] and copy.admit() == 0
