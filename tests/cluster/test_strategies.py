"""Every strategy with ragged batches of few and many rows; inline here, over Ray in test_ray_group."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from agentrl.cluster.group import Shard
from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Mesh, Strategy, Worker
from agentrl.data.rows import Ragged, select
from agentrl.utils.errors import DispatchError, ModelError, ResourceError, WorkerError
from tests.cluster.cluster_batches import ragged_batch
from tests.cluster.cluster_workers import Plain, Summing

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
    assert group.run(Plain.where, 4) == (0, world, 4) and group.run_all(Plain.where, add=1)[-1] == (world - 1, world, 1)
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
    assert Ragged.of(out).lengths.tolist() == Ragged.of(batch).lengths.tolist()


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


# -- a worker class and its table ------------------------------------------------------------------


def plain(self: Worker) -> int:
    return 1


def counts(self: Worker, count: int) -> int:
    return count


def silent(self: Worker, batch: TensorDict) -> None:
    return None


def measured(self: Worker, batch: TensorDict) -> dict[str, float]:
    return {}


async def later(self: Worker) -> int:
    return 1


@pytest.mark.parametrize(("table", "method", "said"), [
    ({"updaet": Broadcast()}, plain, "dispatch_table names 'updaet'.*did you mean 'update'"),
    ({}, plain, "public method 'update' has no entry"),
    ({"update": "broadcast"}, plain, "is not a strategy: 'broadcast'"),
    ({"update": Shard()}, plain, "the method has no parameter for it"),
    ({"update": Shard()}, counts, "'count', which is declared as"),
    ({"update": Shard()}, silent, "needs a result, the method returns None"),
    ({"update": Shard(collect="median")}, measured, "unknown collect 'median'"),
    ({"update": Shard(balance="rows")}, measured, "unknown balance 'rows'"),
    ({"update": Broadcast()}, later, "must be a plain method: a worker runs one call"),
    ({"update": Broadcast()}, staticmethod(plain), "static"),
])  # fmt: skip
def test_what_does_not_fit_fails_at_definition_and_names_the_class(table, method, said):
    with pytest.raises(DispatchError, match=rf"Wrong\b.*{said}"):
        type("Wrong", (Worker,), {"dispatch_table": table, "update": method})


class Loud(Broadcast):
    """A strategy of the test's own."""


OTHER = Loud()


def test_tables_are_inherited_and_can_be_overridden():
    class Base(Worker):
        dispatch_table: ClassVar[dict[str, object]] = {"f": Broadcast()}
        collective = False

        def f(self) -> int:
            return self.rank

    class Child(Base):
        dispatch_table: ClassVar[dict[str, object]] = {"g": Broadcast(), "f": OTHER}

        def g(self) -> int:
            return 5

    assert Child.dispatch_table == {"f": OTHER, "g": Broadcast()}
    group = launch(Child, backend="inline", world_size=2)
    assert group.run(Child.g) == 5 and group.run(Base.f) == 0


def test_a_method_of_another_class_is_refused():
    group = launch(Plain, backend="inline")
    with pytest.raises(DispatchError, match=r"Summing.total is not a method of Plain"):
        group.run(Summing.total, 1.0)
    with pytest.raises(DispatchError, match="must be a TensorDict"):
        group.run(Plain.double, 3)
    with pytest.raises(DispatchError, match="no argument is given for the batch"):
        group.run(Plain.double)  # type: ignore[call-arg]


def test_inline_holds_one_rank_of_a_collective_class():
    with pytest.raises(ResourceError, match=r"cluster\.actors = 1"):
        launch(Summing, backend="inline", world_size=2)
    assert launch(Summing, backend="inline").run(Summing.total, 2.0) == 2.0


def test_the_process_group_of_the_test_before_is_gone():
    """With one left, every later engine of this process shards itself (tests/conftest.py)."""
    assert not torch.distributed.is_initialized()


def test_mesh():
    mesh = Mesh.of({"dp": 2, "tp": 3}, 6)
    assert mesh.places("dp") == [0, 0, 0, 1, 1, 1] and mesh.places("tp") == [0, 1, 2, 0, 1, 2] and mesh.size("tp") == 3
    with pytest.raises(DispatchError, match="exactly 4 ranks"):
        Mesh.of({"dp": 3}, 4)
    with pytest.raises(DispatchError, match="no mesh axis 'pp'"):
        mesh.size("pp")


def test_a_worker_without_batches_imports_no_torch():
    program = "import sys, agentrl.cluster.host, agentrl.cluster.worker, agentrl.cluster.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "tensordict", "ray"} & set(done.stdout.split())
