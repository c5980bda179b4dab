"""Spans lie in what was open where they began, cost nothing if nobody listens, and are in this process's time."""

import asyncio
import pickle
from collections.abc import Iterator

import pytest

from agentrl.rollout.workers import rollout_worker as traces
from agentrl.utils import spans
from agentrl.utils.spans import TracePlace, TraceSpan, add_listener, at, here, in_span, new_id, note, now, span
from agentrl.utils.threads import in_thread


@pytest.fixture
def found() -> Iterator[list[TraceSpan]]:
    ended: list[TraceSpan] = []
    leave = add_listener(ended.append)
    yield ended
    leave()
    assert not spans._LISTENERS.each and spans._LISTENERS.all == 0 and spans.open_spans() == []


async def test_what_is_opened_inside_also_in_tasks_and_threads_lies_in_it(found: list[TraceSpan]) -> None:
    def threaded() -> None:
        with span("call", "in a thread"):
            pass

    async def played(key: str) -> None:
        with span("episode", key, track=key), span("turn", "turn 0"):
            await asyncio.sleep(0)

    with span("call", "in no trace"):
        pass
    with span("step", "step 1", root=True), span("rollout") as part:
        task = asyncio.create_task(played("g0"))
        await in_thread("batch", threaded)
        assert part is not None
        part.set(groups=2)
    await task
    by_name = {one.name: one for one in found}
    assert by_name.keys() == {"step 1", "rollout", "in a thread", "g0", "turn 0"}
    parents = {one.name: next((other.name for other in found if other.id == one.parent), None) for one in found}
    assert parents == {"step 1": None, "rollout": "step 1", "in a thread": "rollout", "g0": "rollout", "turn 0": "g0"}
    assert {one.trace for one in found} == {by_name["step 1"].trace} and by_name["rollout"].values == {"groups": 2}
    assert by_name["turn 0"].track == "g0" and by_name["rollout"].track == "run"
    assert by_name["step 1"].begin <= by_name["rollout"].begin <= by_name["rollout"].end <= by_name["step 1"].end


async def test_an_episode_lies_in_the_part_that_plays_it_wherever_it_was_admitted(found: list[TraceSpan]) -> None:
    with span("step", "step 1", root=True), span("publish"), span("episode", "e"):
        pass
    by_kind = {one.kind: one for one in found}
    assert by_kind["episode"].parent == by_kind["step"].id != by_kind["publish"].id


async def test_an_error_is_in_the_span_and_a_note_has_the_time_since(found: list[TraceSpan]) -> None:
    @in_span("evaluation", root=True)
    async def fails(since: int) -> None:
        note("bucket", "b", since, bytes=7)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await fails(now() - 1_000_000)
    bucket, evaluation = found
    assert evaluation.error == "ValueError: no" and bucket.parent == evaluation.id and bucket.values == {"bytes": 7}
    assert 1_000_000 <= bucket.end - bucket.begin < 1_000_000_000


async def test_a_share_of_the_episodes_is_made_and_the_same_ones_each_time(found: list[TraceSpan]) -> None:
    kept = []
    for _ in range(2):
        found.clear()
        with at(TracePlace(new_id(128), 1, "run", True, episodes=0.25)):
            for number in range(400):
                with span("episode", "e", track=f"g{number}"), span("turn"):
                    pass
        kept.append(sorted(one.track for one in found if one.kind == "episode"))
        assert len(found) == 2 * len(kept[-1])
    assert kept[0] == kept[1] and 70 <= len(kept[0]) <= 130  # 100, and 3 standard deviations of 8.7
    found.clear()
    leave = add_listener(lambda one: None, all=True)
    with at(TracePlace(new_id(128), 1, "run", True, episodes=0.0)), span("episode", "e"):
        pass
    leave()
    assert [one.sampled for one in found] == [False], "made for who listens to all, and marked"


def test_it_costs_nothing_if_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock is read and nothing is made: each is the same context, also of the root of a trace."""
    assert here() is None
    monkeypatch.setattr(spans, "now", None)
    monkeypatch.setattr(spans, "new_id", None)
    first = span("step", "step 1", root=True)
    with first as opened, span("tool", "look") as inside:
        assert opened is inside is here() is None
    assert span("tool", "look") is first


@pytest.mark.parametrize(("ahead", "there"), [(0, spans.machine()), (5_000_000_000, "another")])
def test_a_workers_spans_are_in_the_drivers_time(
    ahead: int, there: str, found: list[TraceSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose clock is 5 s behind, over frames that take 2 and 6 ms: off by half of the difference of these."""
    with span("step", "step 1", root=True):
        fields = pickle.loads(pickle.dumps(traces.span_fields()))
        step = here()
    assert step is not None
    found.clear()
    clock = 1_000_000_000_000
    behind = clock - ahead
    box = traces.SpanSender()
    box._all = False  # its listeners are this process's here, which would hear everything twice
    monkeypatch.setattr(traces, "now", lambda: behind + 2_000_000)
    place = box.place({**fields, "sent": clock})
    assert place == TracePlace(step.trace, step.id, "run", True, step.home)
    played = TraceSpan("episode", "e", place.trace, new_id(64), place.id, behind + 10, "g0", True, end=behind + 30)
    played.set(reward=0.5, error=None)
    box._found.append(played)
    monkeypatch.setattr(traces, "machine", lambda: there)
    monkeypatch.setattr(traces, "now", lambda: behind + 40)
    frame = pickle.loads(pickle.dumps(box.frame()))
    assert box.frame() is None
    monkeypatch.setattr(traces, "machine", spans.machine)
    monkeypatch.setattr(traces, "now", lambda: clock + 40 + 6_000_000)
    traces.SpanReceiver("worker 0").notify(frame)
    [arrived] = found
    off = 0 if ahead == 0 else (6_000_000 - 2_000_000) // 2
    assert (arrived.begin, arrived.end) == (clock + 10 + off, clock + 30 + off)
    assert (arrived.trace, arrived.parent, arrived.place) == (step.trace, step.id, "worker 0")
    assert arrived.values == {"reward": 0.5, "error": None}
