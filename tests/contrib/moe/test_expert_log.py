"""Which experts a request's tokens went to, from made-up steps: chunks, the prefix cache, what is computed again, and who
never asks."""

from typing import Any

import numpy as np

from agentrl.contrib.moe.routers import Computed, ExpertLog


def rows(*values: int) -> Any:
    return np.asarray(values, np.uint8).reshape(-1, 1, 1)


def part(request: str, start: int, count: int, first_slot: int = 0, asked: bool = True) -> Computed:
    """A request whose tokens lie in adjacent slots."""
    return Computed(request, start, count, np.arange(first_slot, first_slot + start + count), asked)


def told(log: ExpertLog, request: str, start: int = 0, stop: int = 99) -> list[int] | None:
    found = log.take(request, start, stop)
    return None if found is None else found.reshape(-1).tolist()


def test_chunks_and_steps_of_several_requests() -> None:
    log = ExpertLog(100)
    log.add([part("a#1-x", 0, 3), part("b#1-y", 0, 2, 50)], rows(1, 2, 3, 11, 12))
    log.add([part("b#1-y", 2, 1, 50), part("a#1-x", 3, 2)], rows(13, 4, 5))
    log.end(["a#1-x"])
    assert told(log, "a#1", 1, 4) == [2, 3, 4], "as of an ended request"
    assert told(log, "a#1") is None, "once"
    assert told(log, "b#1") == [11, 12, 13], "before its end was told"


def test_tokens_of_the_prefix_cache_are_found_by_their_slots() -> None:
    """Computed for a request that nobody asks about; one token of the second is computed by itself."""
    log = ExpertLog(100)
    log.add([part("a#1-x", 0, 4, 8, asked=False)], rows(1, 2, 3, 4))
    log.end(["a#1-x"])
    shared = Computed("b#2-y", 4, 2, np.array([8, 9, 10, 11, 30, 31]), True)
    log.add([shared], rows(7, 8))
    assert told(log, "b#2") == [1, 2, 3, 4, 7, 8] and told(log, "a#1") is None


def test_what_is_computed_again_keeps_its_first_experts() -> None:
    """After a preemption in other slots and with other choices; what follows is new."""
    log = ExpertLog(100)
    log.add([part("a#1-x", 0, 3)], rows(1, 2, 3))
    log.add([part("a#1-x", 3, 1)], rows(4))
    log.add([part("a#1-x", 0, 5, 60)], rows(91, 92, 93, 94, 5))
    log.add([part("a#1-x", 5, 1, 60)], rows(6))
    assert told(log, "a#1") == [1, 2, 3, 4, 5, 6]
    log.add([part("b#1-z", 0, 2, 0)], rows(8, 9))
    log.add([Computed("c#1-z", 5, 1, np.array([60, 61, 62, 63, 64, 65]), True)], rows(7))
    assert told(log, "c#1") == [91, 92, 93, 94, 5, 7], "the slots have the newest, as the keys and values there do"


def test_requests_that_nobody_asks_for_are_dropped_oldest_first() -> None:
    log = ExpertLog(100, unread=2)
    for number in range(4):
        log.add([part(f"r#{number}-x", 0, 1)], rows(number))
        log.end([f"r#{number}-x", "never-seen"])
    assert [told(log, f"r#{number}") for number in range(4)] == [None, None, [2], [3]]
