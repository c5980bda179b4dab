"""What a run decides by its devices is decided by the nodes that run its roles, not by the driver's machine."""

import copy
import importlib.util
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from agentrl.cluster import placement as devices
from agentrl.cluster import ray_cluster as runtime
from agentrl.config.load import config_from
from agentrl.run import engine_choice as engines
from agentrl.run.assembly import RunStart
from agentrl.run.checks import size_checks
from agentrl.run.checks.size_checks import check_placement
from agentrl.utils.errors import ConfigError, ResourceError
from agentrl.utils.processor import HostMemory
from tests.run.starts import start_of

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


@pytest.mark.parametrize(("nodes", "card", "overrides", "engine"), [
    ([(8, 0), (8, 8)], False, "", "vllm"),  # the driver's machine has none, the nodes have
    ([(8, 0), (8, 0)], True, "", "embedded"),  # and the other way round
    ([(8, 1)], False, "", "embedded"),  # the trainer takes the only one
    ([(8, 2)], False, "", "vllm"),
    ([(8, 4)], False, "cluster.actors=4", "embedded"),
    ([(8, 4)], False, TRAIN, "embedded"),
    ([(8, 8)], False, TRAIN, "vllm"),
    ([(8, 8)], False, "cluster.pools={sample={}} cluster.roles={rollout='sample'}", "embedded"),  # its own pool has no GPUs
])  # fmt: skip
def test_auto_asks_the_nodes_for_gpus_that_the_trainer_leaves(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[float, float]], card: bool, overrides: str, engine: str
) -> None:
    joined(monkeypatch, *nodes, card=card)
    assert engines.EngineChoice(run_of(*overrides.split())).name == engine


def test_an_evaluation_may_use_the_gpu_that_a_trainer_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, (8, 1))
    assert engines.EngineChoice(run_of()).name == "embedded"
    assert engines.EngineChoice(engines.EngineChoice(run_of()).without_trainer()).name == "vllm"
    for settled in (run_of("engine=embedded"), run_of("model={path='api:openai/x'}")):
        assert engines.EngineChoice(settled).without_trainer() == settled


@pytest.mark.parametrize(("nodes", "card", "fits"), [([(8, 8)], False, True), ([(8, 0)], True, False)])
def test_vllms_heads_are_those_of_the_build_on_the_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[float, float]], card: bool, fits: bool
) -> None:
    joined(monkeypatch, *nodes, card=card)
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"head_dim = 16: .*engine=vllm supports head sizes 32"):
        size_checks.check_heads(engines.EngineChoice(run_of(), "vllm"))


@pytest.mark.parametrize(("nodes", "overrides", "message"), [
    ([(2, 0), (1, 0)], "cluster.actors=3 engine=embedded", None),
    ([(2, 0), (1, 0)], "cluster.actors=4 engine=embedded", r"cluster.actors = 4: .* a CPU slot .* 3 "),
    ([(2.5, 0), (1.5, 0)], "cluster.actors=4 engine=embedded", r"cluster.actors = 4"),  # a slot is on one node
    ([(64, 0)], "cluster.actors=64 engine=embedded", None),  # 45 GB are needed: on the nodes, not here
])  # fmt: skip
def test_more_actors_than_slots_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[float, float]], overrides: str, message: str | None
) -> None:
    """Ray would wait `startup_timeout` seconds for a place that there is not. Of this machine's memory nothing is asked."""
    joined(monkeypatch, *nodes)
    monkeypatch.setattr(size_checks, "usable_memory", lambda: HostMemory(8 << 30, 4 << 30))
    with nullcontext() if message is None else pytest.raises(ResourceError, match=message):
        size_checks.check_capacity(RunStart(run_of(*overrides.split())))


def test_one_card_for_an_actor_and_a_replica_is_refused_with_the_table_unless_they_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined(monkeypatch, (8, 1))
    with pytest.raises(ResourceError, match=r"(?s)each actor takes a GPU of its own.*rollout.colocate = true") as caught:
        size_checks.check_capacity(RunStart(run_of("engine=vllm")))
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert ["cluster.actors", "any", "1", "in", "all", "1", "each", "1", "each"] in rows
    assert ["vllm.replicas", "any", "1", "in", "all", "0", "each", "1", "each"] in rows
    assert ["node", "10.0.0.1", "(00000000)", "8", "1"] in rows
    size_checks.check_capacity(RunStart(run_of("engine=vllm", "rollout.colocate=true")))
    size_checks.check_capacity(RunStart(run_of("engine=embedded")))
    with pytest.raises(ResourceError, match="each actor takes a GPU of its own"):
        size_checks.check_capacity(RunStart(run_of("engine=embedded", "cluster.actors=2")))


COLOCATED = ["rollout.colocate=true", "vllm.tensor_parallel=2"]


@pytest.mark.parametrize(("overrides", "message"), [
    ([*COLOCATED, "vllm.replicas=2", "cluster.actors=4"], None),
    ([*COLOCATED, "vllm.replicas=2", "cluster.actors=8"], r"vllm.replicas = 2 need 4 of them: set cluster.actors = 4"),
    (["cluster.pools={a={gpus=1.0},b={gpus=1.0}}", "cluster.roles={actor='a',rollout='b'}", "rollout.colocate=true"],
     "cluster.roles has rollout = 'b' and actor = 'a'"),
    (["cluster.pools={a={nodes=2,per_node=3,gpus=1.0}}", "cluster.roles={actor='a'}", "cluster.actors=6", "vllm.replicas=3",
      *COLOCATED], "per_node = 3: with rollout.colocate it must be a multiple of vllm.tensor_parallel = 2"),
    (["cluster.pools={a={per_node=2,gpus=0.5}}", "cluster.roles={actor='a'}", "cluster.actors=2"],
     "gpus = 0.5: each rank trains on one GPU of its own"),
    (["cluster.pools={a={gpus=2.0}}", "cluster.roles={actor='a'}"], "gpus = 2: each rank trains on one GPU"),
    (["cluster.pools={a={gpus=0.5}}", "cluster.roles={actor='a'}"], None),
])  # fmt: skip
def test_gpus_that_do_not_suit_their_roles_are_refused(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str | None
) -> None:
    joined(monkeypatch, (8, 8))
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_placement(start_of(run_of(*overrides), "vllm"))


def test_the_drivers_own_gpu_is_not_given_to_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """With backend "inline" the trainer computes on GPU 0 of this machine, which Ray would hand out first."""
    joined(monkeypatch, (8, 8))
    assert engines.EngineChoice(run_of("cluster.backend=inline")).name == "embedded", "whatever is joined"
    joined(monkeypatch, (8, 2), card=True)
    inline = ["cluster={backend='inline'}", "cluster.address="]
    assert engines.EngineChoice(run_of(*inline)).name == "embedded"
    with pytest.raises(ConfigError, match="the driver trains on the first GPU, and a vLLM replica would get the same one"):
        check_placement(start_of(run_of(*inline), "vllm"))
    check_placement(start_of(run_of(*inline), "embedded"))
    check_placement(start_of(run_of(*inline, "rollout.colocate=true"), "vllm"))


@pytest.mark.parametrize(("card", "count"), [(True, 1), (False, 0)])
def test_a_local_ray_has_the_gpus_that_torch_can_use(monkeypatch: pytest.MonkeyPatch, card: bool, count: int) -> None:
    """Ray counts those of the driver's library: with a torch without CUDA, ranks would be given cards that they cannot use."""
    joined(monkeypatch, card=card)
    assert runtime._local(None)["num_gpus"] == count == devices.this_machine().gpus


def test_without_ray_nothing_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that must not be imported is None in `sys.modules`; on a card a plan asks for its memory, in one process too."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert runtime.is_connected() is False
