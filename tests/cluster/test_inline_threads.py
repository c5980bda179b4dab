"""Of the inline backend: each thread that computes has the number of threads that is asked for."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Strategy, Worker


class Counting(Worker):
    dispatch_table: ClassVar[dict[str, Strategy]] = {"count": Broadcast()}

    def count(self) -> tuple[int, int]:
        return threading.get_ident(), torch.get_num_threads()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(3) as pool:
        # Each has a number of its own already, as a thread that has computed before.
        ready = threading.Barrier(3)
        list(pool.map(lambda number: (ready.wait(), torch.set_num_threads(number)), (2, 4, 5)))
        yield pool
    torch.set_num_threads(before)


@pytest.mark.parametrize(("given", "count"), [("3", 3), (None, 1)])
def test_whichever_thread_a_call_is_made_in(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, given: str | None, count: int
) -> None:
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    ready = threading.Barrier(3)
    with launch(Counting, backend="inline") as group:
        found = list(threads.map(lambda _: (ready.wait(), group.run(Counting.count))[1], range(3)))
    assert len({ident for ident, _ in found}) == 3 and {used for _, used in found} == {count}
