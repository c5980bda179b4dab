"""What is wrong with a worker class is said when the class is defined, and names the class."""

import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from tensordict import TensorDict

from agentrl.cluster.group import Shard
from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Mesh, Worker
from agentrl.utils.errors import DispatchError, ResourceError
from tests.cluster.cluster_workers import Plain, Summing


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


@pytest.mark.parametrize(
    ("table", "method", "said"),
    [
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
    ],
)
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
    assert (
        (mesh.index(4, "dp"), mesh.index(4, "tp")) == (1, 1) and mesh.sources("dp") == [0, 3] and mesh.sources("tp") == [0, 1, 2]
    )
    with pytest.raises(DispatchError, match="exactly 4 ranks"):
        Mesh.of({"dp": 3}, 4)
    with pytest.raises(DispatchError, match="no mesh axis 'pp'"):
        mesh.size("pp")


def test_a_worker_without_batches_imports_no_torch():
    program = "import sys, agentrl.cluster.host, agentrl.cluster.worker, agentrl.cluster.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "tensordict", "ray"} & set(done.stdout.split())
