"""A run's processes on fake GPUs of four nodes of eight, and dry runs of the configs of configs/gpu."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.config import TrainConfig, load_config
from agentrl.engines.vllm import replicas
from agentrl.engines.vllm.vllm_maker import VllmMaker
from agentrl.env.catalog import find_config
from agentrl.run import role_placement as placement
from agentrl.run.assembly import RunStart
from agentrl.run.checks import size_checks as capacity
from agentrl.run.checks.size_checks import check_placement
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.services import RunServices
from agentrl.trainer.pretrained import SHAPES
from agentrl.utils.errors import ConfigError, ResourceError
from tests.conftest import proof
from tests.run.stand_ins import IdleActor, IdleReplica
from tests.run.starts import start_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "configs" / "gpu"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    stop_ray()
    node = {"num_cpus": 16, "num_gpus": 8, "object_store_memory": 96 << 20}
    # Else each node starts 16 processes in advance, for whoever comes: half a second of a core each, and nobody does.
    asked_for = {"prestart_worker_first_driver": False}
    head = {**node, "include_dashboard": False, "_system_config": asked_for}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(3):
            cluster.add_node(**node)
        yield cluster.address
        stop_ray()
        cluster.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a config.json of the models' real sizes, and nothing else, by the last part of their hub names."""
    folder = tmp_path_factory.mktemp("architectures")
    for name, shape in SHAPES.items():
        (folder / name.rpartition("/")[2]).mkdir()
        (folder / name.rpartition("/")[2] / "config.json").write_text(json.dumps(shape))
    return {path.name: str(path) for path in folder.iterdir()}


def overrides(name: str | Path, address: str, models: dict[str, str]) -> list[str]:
    """The cluster and the model's folder in the place of its hub name."""
    config = load_config(name if isinstance(name, Path) else GPU / f"{name}.toml", find=find_config)
    path = models[str(config.model.path).rpartition("/")[2]]
    return [f"model.path={path}", *([f"cluster.address={address}"] if config.cluster.backend == "ray" else [])]


def placed(name: str, address: str, models: dict[str, str], *more: str) -> TrainConfig:
    """A config of configs/gpu, at whose cluster this process is."""
    config = load_config(GPU / f"{name}.toml", [*overrides(name, address, models), *more])
    start_ray(config.cluster)
    return config


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes where the run's would be, which do nothing."""
    monkeypatch.setattr(replicas, "VllmActor", IdleReplica)
    monkeypatch.setattr(placement, "Actor", IdleActor)


def started(config: TrainConfig) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(node, cards) of each actor and each replica, started as a session does it."""
    start_ray(config.cluster)
    pools = placement.RunRoles(EngineChoice(config, "vllm")).open_pools()
    assert pools is not None
    actors: WorkerGroup[Any] | None = None
    try:
        actors = placement.start_actors(config.model, config.cluster, pools)
        engine: Any = EngineChoice(config, "vllm").make(str(config.model.path), pools)

        async def ask() -> list[Any]:
            await engine._replicas.start()
            return [await engine._replicas.ask(one, "place") for one in engine._replicas.alive()]

        sampling = asyncio.run(ask())
        nodes = [node for _, _, node, _ in actors.backend.hosts.nodes]  # type: ignore[attr-defined]
        return list(zip(nodes, actors.run_all(IdleActor.visible), strict=True)), sampling
    finally:
        if actors is not None:
            actors.close()
        pools.close()


WIDE = ["cluster.actors=2", "cluster.pools.train.per_node=2", "cluster.pools.train.gpus=2.0", "vllm.replicas=2",
        "cluster.pools.sample.per_node=2", "cluster.pools.sample.gpus=2.0", "vllm.tensor_parallel=2"]  # fmt: skip
CARDS = [
    # All eight cards of a node, two for a process or one: none waits for another's, and no card has two.
    ("split_4_4", WIDE, ["0,1", "2,3"], ["4,5", "6,7"]), pytest.param("split_4_4", [], [*"0123"], [*"4567"], marks=proof),
    # Two actors without a pool, each with a card of its own, and one replica over both.
    ("colocated_8", ["cluster.actors=2", "vllm.replicas=1"], ["0", "1"], ["0,1"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more", "actors", "replicas"), CARDS)
def test_actors_and_replicas_are_on_one_node_with_these_cards(
    address: str, models: dict[str, str], idle: None, name: str, more: list[str], actors: list[str], replicas: list[str]
) -> None:
    training, sampling = started(placed(name, address, models, *more))
    assert [cards for _, cards in training] == actors and [cards for _, cards in sampling] == replicas
    assert len({node for node, _ in training + sampling}) == 1


STARTED = {"gpu/one_gpu_vllm": 1, "gpu/lora_one_gpu_vllm": 1, "gpu/colocated_8": 8, "gpu/moe_8": 8, "gpu/async_2x8": 16,
           "gpu/multi_node": 32, "recipes/qwen3_4b": 8, "recipes/qwen3_8b": 8, "recipes/qwen3_30b_a3b": 8}  # fmt: skip
"""Configs on vLLM, and the cards that they use; `gpu/split_4_4` is started above."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[proof] if cards > 1 or "lora" in name else []) for name, cards in STARTED.items()]
)
def test_a_config_on_vllm_starts_its_processes_each_on_its_cards(
    name: str, address: str, models: dict[str, str], idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the checks of a start, with processes in the place of actors and replicas that do nothing."""
    monkeypatch.setattr(VllmMaker, "check_installed", lambda: None)
    file = ROOT / "configs" / f"{name}.toml"
    given = overrides(file, address, models)
    check_placement(start_of(load_config(file, given, find=find_config), "vllm"))
    capacity.check_capacity(RunStart(load_config(file, given, find=find_config)))
    training, sampling = started(load_config(file, given, find=find_config))
    used = {(node, card) for node, cards in [*training, *sampling] for card in cards.split(",")}
    assert len(used) == STARTED[name]


@proof
def test_the_other_roles_are_with_the_actors_or_in_their_pool(address: str, models: dict[str, str]) -> None:
    """A critic uses the actors' processes, and so their cards; the reference has a pool, whose cards are others."""
    more = [
        "cluster.actors=4", "vllm.replicas=1", "vllm.tensor_parallel=2", "cluster.pools={frozen={per_node=2,gpus=1.0}}",
        "cluster.roles={reference='frozen'}", "algorithm.kl.coef=0.1", "algorithm.advantage={name='gae'}", "critic={}",
    ]  # fmt: skip
    config = placed("async_2x8", address, models, *more)
    found = placement.RunRoles(EngineChoice(config, "vllm")).locations()
    assert {role: len(of_role) for role, of_role in found.items()} == {"actor": 4, "rollout": 1, "reference": 2, "critic": 4}
    assert found["critic"] == found["actor"]
    own = [(one.node, card) for role in ("actor", "rollout", "reference") for one in found[role] for card in one.cards]
    assert len(own) == len(set(own)) == 4 + 2 + 2


JUDGES = [
    "reward.judge.engines.big={path='x',engine='vllm',vllm={tensor_parallel=2}}",
    "reward.judge.engines.small={path='x',engine='vllm',vllm={replicas=2}}",
]
ONE_EACH = ["reward.judge.engines.big.vllm.tensor_parallel=1"]
POOLED = [*ONE_EACH, "cluster.pools={j={per_node=3,gpus=1.0}}", "cluster.roles.judge=j"]


@pytest.mark.parametrize(
    ("more", "found"), [([], {"judge big": [2], "judge small": [1, 1]}), (POOLED, {"judge": [1, 1, 1]})], ids=["loose", "pooled"]
)
def test_judges_have_cards_that_no_other_process_has(
    address: str, models: dict[str, str], more: list[str], found: dict[str, list[int]]
) -> None:
    """On vLLM, beside four actors and a replica: without a pool by their replicas' needs, else in their pool, in their order."""
    small = ["cluster.actors=4", "vllm.replicas=1", "vllm.tensor_parallel=2"]
    config = placed("async_2x8", address, models, *small, *JUDGES, *more)
    placement.RunRoles(EngineChoice(config, "vllm")).check_room()
    places = placement.RunRoles(EngineChoice(config, "vllm")).locations()
    assert {role: [len(one.cards) for one in of_role] for role, of_role in places.items() if role.startswith("judge")} == found
    own = [(one.node, card) for of_role in places.values() for one in of_role for card in one.cards]
    assert len(own) == len(set(own))
    pools = placement.RunRoles(EngineChoice(config, "vllm")).open_pools()
    assert pools is not None
    try:
        options = {name: RunServices(config, pools).ray_options(f"judge {name}") for name in ("big", "small")}
    finally:
        pools.close()
    assert {name: len(of_judge) for name, of_judge in options.items()} == {"big": 1, "small": 2}
    strategies = [one["scheduling_strategy"] for of_judge in options.values() for one in of_judge]
    bundles = {(str(one.placement_group.id), one.placement_group_bundle_index) for one in strategies}
    assert len(bundles) == 3  # no process gets the place of another


REFUSED = {
    "more than the pool": ([*ONE_EACH, "cluster.pools={j={per_node=2,gpus=1.0}}", "cluster.roles.judge=j"],
     r"pools\.j has 2 processes .*, but the judges have 3 \(.*big\.vllm\.replicas = 1, .*small\.vllm\.replicas = 2\)"),
    "cards": (["cluster.pools={j={per_node=3,gpus=1.0}}", "cluster.roles.judge=j"],
     r"pools\.j\.gpus = 1, but judge big uses reward\.judge\.engines\.big\.vllm\.tensor_parallel = 2 GPUs"),
    "of others": ([*ONE_EACH, "cluster.pools={j={per_node=3,gpus=1.0}}", "cluster.roles={judge='j',reference='j'}",
     "algorithm.kl.coef=0.1"], r"cluster\.roles\.judge: judges cannot share the processes of reference \(pool 'j'\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_pool_that_is_not_for_judges_is_refused(case: str, address: str, models: dict[str, str]) -> None:
    more, said = REFUSED[case]
    config = placed("async_2x8", address, models, *JUDGES, *more)
    with pytest.raises(ConfigError, match=said):
        check_placement(start_of(config, "vllm"))


def test_judges_without_room_are_refused_with_the_table(address: str, models: dict[str, str]) -> None:
    """Sixteen cards are left of 32 beside the actors and the policy's replicas, and 17 are needed."""
    wide = ["reward.judge.engines.big={path='x',engine='vllm',vllm={replicas=17}}"]
    config = placed("async_2x8", address, models, *wide)
    with pytest.raises(ResourceError, match=r"reward\.judge\.engines\.big\.vllm\.replicas +any +17 in all"):
        placement.RunRoles(EngineChoice(config, "vllm")).check_room()


EIGHT = "0 1 2 3 4 5 6 7"
ONE = [("actor", "0", 0, "0"), ("rollout", "0", 0, "0")]
LOCATIONS = {
    "one_gpu": ONE,  # in the driver's process
    "lora_one_gpu": ONE,
    "one_gpu_vllm": ONE,
    "lora_one_gpu_vllm": ONE,
    "split_4_4": [("actor", "0-3", 0, "0 1 2 3"), ("rollout", "0-3", 0, "4 5 6 7")],
    "async_2x8": [("actor", "0-7", 0, EIGHT), ("rollout", "0-7", 1, EIGHT)],
    "multi_node": [("actor", "0-7", 0, EIGHT), ("actor", "8-15", 1, EIGHT), ("rollout", "0-7", 2, EIGHT),
     ("rollout", "8-15", 3, EIGHT)],
    "colocated_8": [("actor", "0-7", 0, EIGHT), ("rollout", "0-3", 0, "0,1 2,3 4,5 6,7")],
    "moe_8": [("actor", "0-7", 0, EIGHT), ("rollout", "0", 0, EIGHT.replace(" ", ","))],
}  # fmt: skip


@pytest.mark.parametrize("name", LOCATIONS)
def test_a_config_is_placed_as_its_comment_says(
    name: str, address: str, models: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Role, ranks, which node (numbered as they come), and the cards of each rank; on cards of 80 GiB all fit."""
    monkeypatch.setattr(VllmMaker, "check_installed", lambda: None)  # whether vLLM is installed is not the question here
    if LOCATIONS[name] != ONE or "vllm" in name:
        start_ray(load_config(GPU / f"{name}.toml", overrides(name, address, models)).cluster)
    code = main(["train", str(GPU / f"{name}.toml"), *overrides(name, address, models), "--dry-run", "--gpu-memory", "80"])
    out = capsys.readouterr()
    assert code == 0, out.err
    table = out.out.partition("\nrole ")[2].partition("\n\n")[0].splitlines()
    rows = [line.split(maxsplit=4) for line in table[1:]]
    order = list(dict.fromkeys(node for _, _, _, node, _ in rows))
    assert [(role, ranks, order.index(node), cards) for role, ranks, _, node, cards in rows] == LOCATIONS[name]
