"""What a run decides by its devices is decided by the nodes that run its roles, not by the driver's machine."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch

from agentrl.config.load import config_from
from agentrl.errors import ConfigError, ResourceError
from agentrl.run import engines
from agentrl.run.checks import capacity, sizes

BASE = {"env": {"id": "key_value"}, "cluster": {"address": "head:6379"}, "model": {"init": {"head_dim": 16}}}


def joined(monkeypatch: pytest.MonkeyPatch, *nodes: tuple[float, float], card: bool = False) -> None:
    """A cluster of nodes (CPU slots, GPUs) that is joined from a machine with or without a card; vLLM is installed."""
    import ray

    told = [
        {"Alive": True, "NodeID": f"{number:056x}", "NodeManagerAddress": f"10.0.0.{number}", "Resources": {"CPU": c, "GPU": g}}
        for number, (c, g) in enumerate(nodes, 1)
    ]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: told)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(card))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: object() if name == "vllm" else found(name, *more))


def run_of(*overrides: str) -> Any:
    return config_from(copy.deepcopy(BASE), [*overrides])


TRAIN = "cluster.pools={train={per_node=4,gpus=1.0}} cluster.actors=4 cluster.roles={actor='train'}"
SAMPLE = "cluster.pools={sample={}} cluster.roles={rollout='sample'}"


@pytest.mark.parametrize(
    ("nodes", "card", "overrides", "engine"),
    [
        ([(8, 0), (8, 8)], False, "", "vllm"),  # the driver's machine has none, the nodes have
        ([(8, 0), (8, 0)], True, "", "embedded"),  # and the other way round
        ([(8, 1)], False, "", "embedded"),  # the trainer takes the only one
        ([(8, 2)], False, "", "vllm"),
        ([(8, 4)], False, "cluster.actors=4", "embedded"),
        ([(8, 4)], False, TRAIN, "embedded"),
        ([(8, 8)], False, TRAIN, "vllm"),
        ([(8, 8)], False, SAMPLE, "embedded"),  # its own pool has no GPUs
    ],
)  # fmt: skip
def test_auto_asks_the_nodes_for_gpus_that_the_trainer_leaves(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[float, float]], card: bool, overrides: str, engine: str
) -> None:
    joined(monkeypatch, *nodes, card=card)
    assert engines.engine_name(run_of(*overrides.split())) == engine


@pytest.mark.parametrize(("nodes", "card", "fits"), [([(8, 8)], False, True), ([(8, 0)], True, False)])
def test_vllms_heads_are_those_of_the_build_on_the_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[float, float]], card: bool, fits: bool
) -> None:
    joined(monkeypatch, *nodes, card=card)
    if fits:
        sizes.check_heads(run_of(), "vllm")
        return
    with pytest.raises(ConfigError, match=r"head_dim = 16: .*engine=vllm supports head sizes 32"):
        sizes.check_heads(run_of(), "vllm")


def test_inline_asks_this_machine_whatever_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, (8, 8))
    assert engines.engine_name(run_of("cluster.backend=inline")) == "embedded"


@pytest.mark.parametrize(
    ("nodes", "overrides", "message"),
    [
        ([(2, 0), (1, 0)], "cluster.actors=3 engine=embedded", None),
        ([(2, 0), (1, 0)], "cluster.actors=4 engine=embedded", r"cluster.actors = 4: .* a CPU slot .* 3 "),
        ([(2.5, 0), (1.5, 0)], "cluster.actors=4 engine=embedded", r"cluster.actors = 4"),  # a slot is on one node
    ],
)
def test_more_actors_than_slots_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[float, float]], overrides: str, message: str | None
) -> None:
    """Ray would wait `startup_timeout` seconds for a place that there is not."""
    joined(monkeypatch, *nodes)
    config = run_of(*overrides.split())
    if message is None:
        capacity.check_capacity(config)
        return
    with pytest.raises(ResourceError, match=message):
        capacity.check_capacity(config)


def test_memory_of_processes_on_other_machines_is_not_asked_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 actors need 45 GB: on the nodes, not here."""
    joined(monkeypatch, (64, 0))
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: type("", (), {"available": 4 << 30})())
    capacity.check_capacity(run_of("cluster.actors=64", "engine=embedded"))
