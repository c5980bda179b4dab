"""Every strategy with ragged batches of few and many rows; inline here, over Ray in test_ray_group."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Strategy, Worker
from agentrl.data.rows import lengths, select
from agentrl.utils.errors import DispatchError, ModelError, WorkerError
from tests.cluster.cluster_batches import ragged_batch
from tests.cluster.cluster_workers import Plain

SIZES = {1: [5], 3: [4, 0, 9], 7: [1, 8, 3, 0, 2, 30, 6]}


def check_every_strategy(group, sizes):
    """Shared with the Ray tests: rows come back whole, in order, and every rank took part."""
    batch = ragged_batch(sizes)
    world = group.world_size
    out = group.run(Plain.double, batch)
    assert out["id"].tolist() == list(range(len(sizes)))
    assert torch.equal(out["twice"].values(), batch["token_ids"].values() * 2)
    assert torch.equal(out["half"].values(), batch["half"].values())
    assert out["name"] == [f"row{i}" for i in range(len(sizes))] and out["note"] == {"k": 1}
    ranks = (world - 1) / 2  # the mean over those that report a key: "zero" is of rank 0 alone
    assert group.run(Plain.count, batch) == {"rows": len(sizes) / world, "mean": ranks, "zero": 0}
    assert sum(part["rows"] for part in group.run_all(Plain.count, batch)) == len(sizes)
    factor = 3
    tripled = group.run(Plain.apply, batch, lambda rows: rows.update({"id": rows["id"] * factor}))
    assert tripled["id"].tolist() == [3 * i for i in range(len(sizes))]
    assert group.run(Plain.names, batch).keys() == {*batch.keys()} - {"half"}
    owner = torch.tensor([(3 * i) % world for i in range(len(sizes))])
    placed = group.run(Plain.double_column, batch.copy().update({"dp_rank": owner}))
    assert placed["rank"].tolist() == owner.tolist()
    assert group.run(Plain.where, 4) == (0, world, 4) and group.run_all(Plain.where, add=1)[-1] == (
        world - 1,
        world,
        1,
    )
    assert group.run(Plain.first, word="w") == "w0"


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_ragged_batches_over_four_ranks(rows):
    check_every_strategy(launch(Plain, backend="inline", world_size=4), SIZES[rows])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=9), st.integers(1, 5))
def test_any_rows_over_any_ranks_come_back_in_order(sizes, world):
    group = launch(Plain, backend="inline", world_size=world)
    batch = ragged_batch(sizes)
    out = group.run(Plain.double, batch)
    assert torch.equal(out["token_ids"].values(), batch["token_ids"].values())
    assert torch.equal(lengths(out), lengths(batch))


def test_a_worker_cannot_write_into_the_drivers_batch():
    group = launch(Plain, backend="inline", world_size=2)
    batch = ragged_batch([3, 4])
    assert (group.run(Plain.scribble, batch)["token_ids"].values() == -7).all()
    assert batch["token_ids"].values()[1] == 1


def test_errors_name_worker_rank_and_method():
    group = launch(Plain, backend="inline", world_size=2)
    with pytest.raises(WorkerError, match=r"group 'plain': Plain.fail, rank 1: KeyError: 'a deep reason'"):
        group.run(Plain.fail)
    with pytest.raises(ModelError, match="did you mean tiny"):
        group.run(Plain.model_error)
    with pytest.raises(DispatchError, match=r"ranks got \[1, 1\], returned \[0, 0\]"):
        group.run(Plain.wrong_count, select(ragged_batch([1, 2]), [0, 1]))
    with pytest.raises(DispatchError, match="needs a TensorDict from each rank, got list"):
        group.run(Plain.listed, ragged_batch([1]))


def test_a_row_of_rank_minus_one_goes_nowhere_where_results_are_no_rows():
    group = launch(Plain, backend="inline", world_size=2)
    batch = ragged_batch([1, 2, 3, 4]).update({"dp_rank": torch.tensor([1, -1, 0, 1])})
    assert [part["rows"] for part in group.run_all(Plain.count_column, batch)] == [1, 2]
    with pytest.raises(DispatchError, match="dp_rank names rank -1, the axis has 2"):
        group.run(Plain.double_column, batch)
    with pytest.raises(DispatchError, match="dp_rank names rank 2, the axis has 2"):
        group.run(Plain.count_column, batch.update({"dp_rank": torch.tensor([1, -1, 2, 1])}))


# -- threads of the inline backend -----------------------------------------------------------------


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
