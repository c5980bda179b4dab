"""Each of agentrl's own training engines, in one process: without a process group if it can, and in one of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_contract import Made, TrainEngineContract

from agentrl.config.schema import ModelConfig
from agentrl.errors import DependencyError
from agentrl.train.engine import TRAIN_ENGINES, BaseEngine

WAYS = [(entry.name, grouped) for entry in TRAIN_ENGINES.own() for grouped in (False, True) if grouped or "alone" in entry.traits]


class TestTrainingEngines(TrainEngineContract):
    @pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}, {'in a group' if way[1] else 'alone'}")
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
