"""What is wrong with a worker class is said when the class is defined, and names the class."""

from __future__ import annotations

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


def test_a_misspelt_name_fails_at_definition_and_is_corrected():
    with pytest.raises(DispatchError, match=r"Misspelt.dispatch_table names 'updaet'.*did you mean 'update'"):

        class Misspelt(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"updaet": Broadcast()}

            def update(self) -> int:
                return 1


def test_a_missing_entry_fails_at_definition():
    with pytest.raises(DispatchError, match="Forgetful: public method 'save' has no entry"):

        class Forgetful(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"update": Broadcast()}

            def update(self) -> int:
                return 1

            def save(self) -> int:
                return 1


def bad_classes():
    def no_batch():
        class NoBatch(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"f": Shard()}

            def f(self) -> int:
                return 1

    def not_a_batch():
        class NotABatch(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"f": Shard()}

            def f(self, count: int) -> int:
                return count

    def no_result():
        class NoResult(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"f": Shard()}

            def f(self, batch: TensorDict) -> None:
                return None

    def coroutine():
        class Coroutine(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"f": Broadcast()}

            async def f(self) -> int:
                return 1

    def static():
        class Static(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"f": Broadcast()}

            @staticmethod
            def f() -> int:
                return 1

    def bad_metric():
        class BadMetric(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"f": Shard(collect="metrics", metrics={"loss": "median"})}

            def f(self, batch: TensorDict) -> dict[str, float]:
                return {}

    def no_strategy():
        class NoStrategy(Worker):
            dispatch_table: ClassVar[dict[str, object]] = {"f": "broadcast"}

            def f(self) -> int:
                return 1

    return [
        no_batch,
        not_a_batch,
        no_result,
        coroutine,
        static,
        bad_metric,
        no_strategy,
    ]


@pytest.mark.parametrize("define", bad_classes(), ids=lambda f: f.__name__)
def test_a_signature_that_does_not_fit_fails_at_definition(define):
    name = "".join(part.capitalize() for part in define.__name__.split("_"))
    with pytest.raises(DispatchError, match=f"(?i){name}"):
        define()


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
    with pytest.raises(DispatchError, match="no argument given for 'batch'"):
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
    assert mesh.coordinates(4) == {"dp": 1, "tp": 1} and mesh.sources("dp") == [0, 3] and mesh.sources("tp") == [0, 1, 2]
    with pytest.raises(DispatchError, match="exactly 4 ranks"):
        Mesh.of({"dp": 3}, 4)
    with pytest.raises(DispatchError, match="no mesh axis 'pp'"):
        mesh.size("pp")


def test_a_worker_without_batches_imports_no_torch():
    program = "import sys, agentrl.cluster.host, agentrl.cluster.worker, agentrl.cluster.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "tensordict", "ray"} & set(done.stdout.split())
