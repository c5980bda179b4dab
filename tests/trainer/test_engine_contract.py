"""Each of agentrl's training engines in one process, without a process group or in one of one rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentrl.config.schema import ModelConfig
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.train_engine import TRAIN_ENGINES, BaseEngine
from agentrl.utils.errors import DependencyError
from tests.conftest import proof
from tests.trainer.engine_contract import ROWS, Made, TrainEngineContract, gradients_of, loss_of, micro_of
from tests.trainer.learners import as_rank
from tests.trainer.train_batches import toy_optim

WAYS = [
    pytest.param((entry.name, grouped), id=f"{entry.name}, {'in a group' if grouped else 'alone'}", marks=marks)
    for entry in TRAIN_ENGINES.own()
    for grouped, marks in ((False, ()), (True, [proof] if "alone" in entry.traits else []))
    if grouped or "alone" in entry.traits
]


class TestTrainingEngines(TrainEngineContract):
    @pytest.fixture(params=WAYS)
    def way(self, request: pytest.FixtureRequest) -> Iterator[str]:
        name, grouped = request.param
        try:
            TRAIN_ENGINES.entry(name).make.check(ModelConfig(engine=name), 1)
        except DependencyError as error:
            pytest.skip(str(error))
        if grouped:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield name

    @pytest.fixture
    def traits(self, way: str) -> frozenset[str]:
        return TRAIN_ENGINES.entry(way).traits

    @pytest.fixture
    def made(self, way: str, tiny: str) -> Made:
        def make(role: Any = "policy", **keys: Any) -> BaseEngine:
            cfg = ModelConfig(path=tiny, engine=way, **keys)
            return TRAIN_ENGINES.entry(way).make(tiny, cfg, 0.01, role, torch.device("cpu"))

        return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropped_gradients_leave_nothing_with_the_unsharded_parameters(tiny: str, dtype: Any) -> None:
    """Those of a call that failed before its last micro-batch, which FSDP2 has not reduced: the next ones began with them."""
    with as_rank(0, 1, "gloo"):
        engine, fresh = (FsdpEngine(tiny, ModelConfig(path=tiny, dtype=dtype), 1.0) for _ in range(2))
        engine.use_optimizer(toy_optim())
        engine.backward(loss_of(engine, micro_of(ROWS[:2])), last=False)
        engine.drop()
        for one in (engine, fresh):
            one.backward(loss_of(one, micro_of(ROWS[2:])), last=True)
        mine, theirs = gradients_of(engine), gradients_of(fresh)
        assert all(torch.equal(gradient, mine[name]) for name, gradient in theirs.items())
