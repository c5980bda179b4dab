"""Where requests go: every one to a host that can take it, sessions to their caches, load to where the least is queued."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.engine import BLOCK, MOVE, SHED, SLACK, Need, Placed, RequestRouter, block_names
from tests.conftest import examples


def queue(router: RequestRouter[Any], host: Any) -> float:
    """Tokens that a host has still to compute."""
    return router._loads[host].queued if host in router._loads else 0.0


def need(key: str, prompt: int = 100, expected: float = 10.0, group: Any = None) -> Need:
    """A request whose first whole blocks are those of its group, or of no other session."""
    return Need(key, prompt, expected, lambda: [(group or key, at) for at in range(prompt // BLOCK)])


def places(router: RequestRouter[str], needs: list[Need], able: str) -> str:
    return "".join(router.begin(one, list(able)).host for one in needs)


# -- by hand -------------------------------------------------------------------------------------------


def test_blocks_are_named_by_all_tokens_up_to_their_end() -> None:
    ids = list(range(3 * BLOCK - 1))
    names = block_names(ids)
    assert len(names) == 2 and names[:1] == block_names(ids[:BLOCK])
    assert block_names([9, *ids[1:]])[1] != names[1]  # the second block's own tokens are the same


def test_a_group_stays_together_until_its_load_is_worth_more_than_its_prompt() -> None:
    router: RequestRouter[str] = RequestRouter()
    # 640 tokens of prompt: the first member brings 840 tokens, each other one 200, as long as A has at most 2 x 640 more than B
    members = [need(f"m{i}", 640, 200.0, "g") for i in range(5)]
    assert places(router, members, "AB") == "AAAAB"
    assert (queue(router, "A"), queue(router, "B")) == (840 + 3 * 200, 840)
    # the next one finds the prompt on either
    assert places(router, [need("m5", 640, 200.0, "g")], "AB") == "B"


def test_a_busy_replica_sheds_a_new_group_and_keeps_its_sessions() -> None:
    router: RequestRouter[str] = RequestRouter()
    first = router.begin(need("under way", 640, 100.0, "g"), ["A"])
    router.end(first, 60)
    busy = router.begin(need("busy", 100, 2500.0), ["A"])
    assert places(router, [need("under way", 760, 60.0)], "AB") == "A"  # 700 cached: stays below 4 x 700 + 820
    assert queue(router, "A") == 2600 + 760 - 700 + 60
    assert places(router, [need("new member", 640, 60.0, "g")], "AB") == "B"  # above 2 x 640
    router.end(busy, None)
    assert queue(router, "A") == 120 and places(router, [need("another", 640, 60.0, "g")], "AB") == "A"


def loaded(queues: dict[str, float], cached: dict[str, int]) -> RequestRouter[str]:
    """A router whose hosts have so much queued, and so many tokens of the prompt of group g cached."""
    router: RequestRouter[str] = RequestRouter()
    for host, tokens in cached.items():
        router.end(router.begin(need(f"of {host}", tokens, 0.0, "g"), [host]), 0)
    for host, tokens in queues.items():
        router.begin(need(f"load of {host}", 0, tokens), [host])
    return router


def test_a_member_has_the_choice_among_all_caches_of_its_prompt() -> None:
    router = loaded({"A": 3000, "B": 1000, "C": 0}, {"A": 640, "B": 640})
    assert places(router, [need("m", 640, 10.0, "g")], "ABC") == "B"  # A has too much queued, B at most 2 x 640 more than C
    router = loaded({"A": 5000, "B": 100, "C": 0}, {"A": 640, "B": 576})
    assert places(router, [need("m", 640, 10.0, "g")], "ABC") == "B"  # 100 more than C, and 576 less to compute


def test_the_more_is_queued_everywhere_the_longer_a_group_stays_together() -> None:
    # 640 of 700 tokens cached: 2 x 640 + 10000 / 4 x 640 / 700 = 3565
    for queued, place in ((13565.0, "A"), (13566.0, "B")):
        assert places(loaded({"A": queued, "B": 10000}, {"A": 640}), [need("m", 700, 10.0, "g")], "AB") == place


def test_dropped_caches_draw_no_members_and_a_session_moves_for_less() -> None:
    for dropped, place in ((False, "A"), (True, "B")):
        router, home = loaded({"A": 1000, "B": 0}, {"A": 640}), RequestRouter[str]()
        home.end(home.begin(need("s", 90), ["A"]), 10)
        home.begin(need("other", 140, 10.0), ["A"])
        if dropped:
            router.forget()
            home.forget()
        assert places(router, [need("m", 640, 10.0, "g")], "AB") == place
        assert places(home, [need("s", 120, 29.0)], "AB") == place  # 150 is more than the session's own 149


def test_a_request_that_ends_where_its_session_was_caches_nothing_where_it_is() -> None:
    router: RequestRouter[str] = RequestRouter()
    first = router.begin(need("s", 100, 10.0), ["A"])
    router.begin(need("s", 50, 10.0), ["B"])  # a second one of the session, which moved meanwhile
    router.end(first, 30)
    router.begin(need("s", 130, 10.0), ["B"])
    assert queue(router, "B") == 60 + 140


def test_the_expected_length_follows_what_requests_sampled() -> None:
    router: RequestRouter[str] = RequestRouter()
    assert router.forecast(500) == 500
    for sampled in (100, 200):
        router.end(router.begin(need("s"), ["A"]), sampled)
    assert router.forecast(500) == 105 and router.forecast(50) == 50
    router.end(router.begin(need("s"), ["A"]), None)  # a failure says nothing of lengths
    assert router.forecast(500) == 105


# -- whatever happens ----------------------------------------------------------------------------------

HOSTS = "ABCD"
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "begin", "end", "fail", "told", "leave", "join", "forget"]),
        st.integers(0, 11),
        st.integers(0, 2000),
        st.integers(1, 500),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
def test_any_sequence_of_requests_ends_deaths_and_arrivals(steps: list[tuple[str, int, int, int]]) -> None:
    router: RequestRouter[str] = RequestRouter()
    alive, flying = {"A", "B"}, list[tuple[Placed[str], float]]()
    load, homes, cached = dict.fromkeys(HOSTS, 0.0), dict[str, str](), dict[str, int]()
    for action, number, prompt, sampled in steps:
        key = f"s{number}"
        if action == "begin":
            one = need(key, prompt, float(sampled), group=number % 3)
            before, home = dict(load), homes.get(key)
            placed = router.begin(one, sorted(alive))
            least = min(before[host] for host in alive)
            assert placed.host in alive
            if home in alive:
                n = min(cached[key], prompt)
                assert (placed.host == home) == (before[home] - least <= MOVE * n + prompt + sampled)
            else:
                assert before[placed.host] <= least + (1 + SHED) * prompt + SLACK * (least + prompt)
            if placed.host == home:
                assert placed.left == prompt - min(cached[key], prompt) + sampled
            assert sampled <= placed.left <= prompt + sampled
            homes[key] = placed.host
            cached[key] = min(cached[key], prompt) if placed.host == home else prompt + sampled - int(placed.left)
            load[placed.host] += placed.left
            flying.append((placed, placed.left))
        elif action in ("end", "fail") and flying:
            placed, left = flying.pop(number % len(flying))
            router.end(placed, sampled if action == "end" else None)
            if placed.host in alive:
                load[placed.host] -= left
                if action == "end" and homes.get(placed.need.key) == placed.host:
                    cached[placed.need.key] = placed.need.prompt + sampled
        elif action == "told" and flying:
            placed, left = flying[at := number % len(flying)]
            sampled *= prompt % 4 > 0  # nothing yet: its prompt may still be under way
            router.note_sampled(placed, sampled)
            now = max(placed.need.expected - sampled, 0.0) if sampled else left
            if placed.host in alive:
                load[placed.host] += now - left
                flying[at] = placed, now
        elif action == "leave" and len(alive) > 1:
            gone = sorted(alive)[number % len(alive)]
            alive.discard(gone)
            router.leave(gone)
            assert queue(router, gone) == 0.0
            late = [placed for placed, _ in flying if placed.host == gone]
            flying = [(placed, left) for placed, left in flying if placed.host != gone]
            for placed in late:
                router.end(placed, sampled)
            load[gone] = 0.0
            homes = {key: host for key, host in homes.items() if host != gone}
        elif action == "join":
            alive.add(HOSTS[number % 4])
        elif action == "forget":
            router.forget()
            cached = dict.fromkeys(cached, 0)
        assert {host: queue(router, host) for host in HOSTS} == pytest.approx(load)
        assert {key: home.host for key, home in router._homes.items()} == homes
    for placed, _ in flying:
        router.end(placed, 1)
    assert [queue(router, host) for host in HOSTS] == [0.0] * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 500)), min_size=1, max_size=80), st.integers(1, 8))
def test_sessions_without_common_prompts_are_balanced_to_one_request(sizes: list[tuple[int, int]], count: int) -> None:
    router: RequestRouter[int] = RequestRouter()
    for at, (prompt, expected) in enumerate(sizes):
        router.begin(need(f"s{at}", prompt, float(expected)), range(count))
    loads = [queue(router, host) for host in range(count)]
    assert sum(loads) == sum(prompt + expected for prompt, expected in sizes)
    assert max(loads) - min(loads) <= max(prompt + expected for prompt, expected in sizes)


def test_a_host_that_cannot_take_requests_now_gets_none_even_of_its_own_sessions() -> None:
    router: RequestRouter[str] = RequestRouter()
    router.end(router.begin(need("s"), ["A"]), 5)
    assert places(router, [need("s", 120), need("new")], "BC") == "BC" and queue(router, "A") == 0


def test_of_too_many_sessions_the_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.engine._KEYS_REMEMBERED", 2)
    router: RequestRouter[str] = RequestRouter()
    places(router, [need("a"), need("b"), need("a"), need("c")], "A")
    assert list(router._homes) == ["a", "c"]
