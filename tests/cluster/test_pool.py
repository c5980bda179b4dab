"""Pools: pure placement, its table, and the config keys."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError

from agentrl.cluster import placement as reserve
from agentrl.cluster.placement import ClusterNode, Unpooled, assign, node_need, place
from agentrl.config.schema import (
    ClusterConfig,
    CriticConfig,
    EnvConfig,
    KlConfig,
    ModelConfig,
    PoolConfig,
    TrainConfig,
    VllmConfig,
)
from agentrl.run.checks.size_checks import check_placement
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.role_placement import RunRoles
from agentrl.utils.errors import ConfigError, ResourceError
from tests.conftest import examples
from tests.run.starts import start_of

NODES = [ClusterNode("a", 4, 2), ClusterNode("b", 4, 0)]


def test_a_pool_that_fits_in_total_but_on_no_node_is_refused_with_the_table():
    with pytest.raises(ResourceError) as caught:
        place({"train": PoolConfig(per_node=6), "rollout": PoolConfig(gpus=1.0)}, NODES)
    lines = str(caught.value).splitlines()
    assert "do not fit" in lines[0]
    assert any(line.split() == ["pool", "train", "1", "6", "6", "0"] for line in lines)
    assert any(line.split() == ["node", "b", "4", "0"] for line in lines)
    assert place({"p": PoolConfig()}, NODES) == {"p": ["b"]}  # one that needs no GPU leaves them to others


def test_a_pool_is_held_in_one_bundle_a_process_with_consecutive_ranks_on_a_node(monkeypatch):
    """Two nodes of three processes, each with 1.5 CPU slots and half a GPU; slots 0 to 2 are on one, 3 to 5 on the other."""
    monkeypatch.setattr(reserve, "available_resources_per_node", dict)
    nodes = {ClusterNode("a", 8, 2): "id a", ClusterNode("b", 8, 2): "id b", ClusterNode("c", 4, 0): "id c"}
    monkeypatch.setattr(reserve, "_nodes", lambda left: nodes)
    asked = []
    monkeypatch.setattr(reserve, "placement_group", lambda bundles, **how: asked.append((bundles, how)) or "held")
    held = reserve._request({"p": PoolConfig(nodes=2, per_node=3, cpus=1.5, gpus=0.5)}, [])["p"]
    [(bundles, how)] = asked
    assert bundles == [{"CPU": 1.5, "GPU": 0.5}] * 6
    pins = [pin[reserve.NODE_LABEL] for pin in how["bundle_label_selector"]]
    assert pins in (["id a"] * 3 + ["id b"] * 3, ["id b"] * 3 + ["id a"] * 3)
    options = held.options()
    assert [one["scheduling_strategy"].placement_group_bundle_index for one in options] == list(range(6))
    assert {(one["num_cpus"], one["num_gpus"]) for one in options} == {(1.5, 0.5)}


pool = st.builds(
    PoolConfig,
    nodes=st.integers(1, 2),
    per_node=st.integers(1, 3),
    cpus=st.sampled_from([1.0, 2.0]),
    gpus=st.sampled_from([0.0, 1.0]),
)
node = st.tuples(st.integers(0, 6), st.integers(0, 3))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(pool, min_size=1, max_size=3), st.lists(node, min_size=1, max_size=3))
def test_a_place_is_found_exactly_where_one_exists(pools, offers):
    named = {f"p{i}": item for i, item in enumerate(pools)}
    nodes = [ClusterNode(f"n{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(offers)]
    options = [list(itertools.combinations(range(len(nodes)), item.nodes)) for item in pools]

    def fits(choice):
        for at, one in enumerate(nodes):
            used = [node_need(item) for item, where in zip(pools, choice, strict=True) if at in where]
            if sum(cpus for cpus, _ in used) > one.cpus or sum(gpus for _, gpus in used) > one.gpus:
                return False
        return True

    if any(fits(choice) for choice in itertools.product(*options)):
        chosen = place(named, nodes)
        assert fits([[int(name[1:]) for name in chosen[f"p{i}"]] for i in range(len(pools))])
        assert all(len(set(chosen[f"p{i}"])) == item.nodes for i, item in enumerate(pools))
    else:
        with pytest.raises(ResourceError):
            place(named, nodes)


def run_of(pools, roles, replicas=1, backend="ray", **sections):
    cluster = ClusterConfig(pools=pools, roles=roles, backend=backend)
    return TrainConfig(env=EnvConfig(id="none"), cluster=cluster, vllm=VllmConfig(replicas=replicas), **sections)


def test_each_role_of_a_run_may_have_a_pool_of_its_own():
    config = run_of(
        {"train": PoolConfig(), "judge": PoolConfig(per_node=3), "sample": PoolConfig(nodes=2, per_node=2)},
        {"actor": "train", "reference": "train", "critic": "judge", "reward_model": "judge", "rollout": "sample"},
        replicas=4, critic=CriticConfig(),
    )  # fmt: skip
    check_placement(start_of(config, "vllm"))
    assert RunRoles(EngineChoice(config, "vllm")).names == ["actor", "rollout", "critic"]  # the others are not in this run
    penalty = config.algorithm.model_copy(update={"kl": KlConfig(coef=0.1)})
    assert "reference" in RunRoles(EngineChoice(config.model_copy(update={"algorithm": penalty}), "embedded")).names


@pytest.mark.parametrize(("roles", "pool", "engine", "message"), [
    ({"rollout": "p"}, PoolConfig(), "embedded", 'embedded engine samples in the driver; set engine = "vllm"'),
    ({"rollout": "p"}, PoolConfig(per_node=2), "vllm", r"p has 2 processes .* vllm.replicas = 1.*set vllm.replicas = 2"),
    ({"actor": "p"}, PoolConfig(nodes=3), "embedded", r"p has 3 processes .* cluster.actors = 1.*set cluster.actors = 3"),
    ({"actor": "p", "rollout": "p"}, PoolConfig(gpus=1.0), "vllm", "cannot share the GPUs of actor"),
    ({"rollout": "p"}, PoolConfig(gpus=2.0), "vllm", "gpus = 2, but a vLLM replica uses vllm.tensor_parallel = 1"),
    ({"critic": "p"}, PoolConfig(), "embedded", r"cluster.pools.p: no role uses it \(of actor\)"),  # there is no critic
    ({"critic": "po"}, PoolConfig(), "embedded", r"cluster.roles.critic names the pool 'po', .*did you mean 'p'"),
])  # fmt: skip
def test_a_place_that_does_not_suit_its_role_is_refused(roles, pool, engine, message):
    with pytest.raises(ConfigError, match=message):
        check_placement(start_of(run_of({"p": pool}, roles), engine))


def test_pools_are_left_aside_inline_and_must_divide_for_sequence_parallel():
    check_placement(start_of(run_of({"p": PoolConfig(nodes=3)}, {"actor": "p"}, backend="inline"), "embedded"))
    shared = ModelConfig(sequence_parallel=2)
    config = run_of({"p": PoolConfig(per_node=3)}, {"critic": "p"}, critic=CriticConfig(), model=shared)
    with pytest.raises(ConfigError, match="sequence_parallel = 2 does not divide a pool of processes = 3"):
        check_placement(start_of(config, "embedded"))
    copied = config.model_copy(update={"model": ModelConfig(replicas=2)})
    with pytest.raises(ConfigError, match="replicas = 2 does not divide a pool of processes = 3"):
        check_placement(start_of(copied, "embedded"))


def test_a_node_that_does_not_say_where_it_is_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def late(asked: list[str], timeout: float) -> None:
        limits.append((asked, timeout))
        raise GetTimeoutError("Get timed out: some object(s) not ready.")

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: "ref"))
    monkeypatch.setattr(reserve, "ray", SimpleNamespace(remote=lambda **_: lambda function: task, get=late))
    held = SimpleNamespace(options=lambda: [{}, {}], counts=(2,), slots=2)
    with pytest.raises(ResourceError, match=r"^cluster.startup_timeout = 7: no process started on a node in this time. Raise it"):
        reserve.locations_of(held, 7.0)
    assert limits == [(["ref"], 7.0)]  # the first slot of the node, and no further one after it


# -- processes without a pool on nodes with GPUs ---------------------------------------------------


def nodes(*gpus: float, cpus: float = 64.0) -> list[ClusterNode]:
    return [ClusterNode(name, cpus, has) for name, has in zip("abcdefgh", gpus, strict=False)]


def actors(count: int, block: int = 1) -> Unpooled:
    return Unpooled("cluster.actors", count, 1.0, 1.0, block)


def replicas(count: int, tp: int = 1) -> Unpooled:
    return Unpooled("vllm.replicas", count, 0.0, float(tp))


@pytest.mark.parametrize(("wanted", "cluster", "placed"), [
    ([actors(16)], (8, 8), [[("a", 8), ("b", 8)]]),  # never all on one node
    ([actors(4), replicas(4)], (8,), [[("a", 4)], [("a", 4)]]),
    ([actors(8), replicas(8)], (8, 8), [[("a", 8)], [("b", 8)]]),  # ranks that exchange gradients within a node
    ([actors(4), replicas(6, tp=2)], (8, 8), [[("a", 4)], [("a", 2), ("b", 4)]]),
    ([actors(6)], (4, 4), [[("a", 3), ("b", 3)]]),
    ([actors(12)], (8, 4), [[("a", 8), ("b", 4)]]),
    ([actors(4), replicas(1, tp=8)], (8, 4), [[("b", 4)], [("a", 1)]]),
    ([actors(10), replicas(3, tp=2)], (8, 8), None),  # any place will do
    ([actors(4, block=2)], (3, 3), [[("a", 2), ("b", 2)]]),  # two ranks whose cards one replica uses
    ([actors(4, block=4)], (3, 3), "refused"),
    ([actors(1), replicas(1)], (1,), "refused"),
    ([actors(8), replicas(1, tp=8)], (8, 7), "refused"),
    ([actors(9)], (8, 0), "refused"),
])  # fmt: skip
def test_where_they_go(wanted: list[Unpooled], cluster: tuple[float, ...], placed: object) -> None:
    if placed == "refused":
        with pytest.raises(ResourceError, match=r"each actor takes a GPU of its own|these GPUs are on one node") as caught:
            assign({}, wanted, nodes(*cluster))
        rows = [line.split() for line in str(caught.value).splitlines()]
        assert ["cluster.actors", "any", str(wanted[0].count), "in", "all", "1", "each", "1", "each"] in rows
        assert ["node", "a", "64", str(cluster[0])] in rows
        return
    found = assign({}, wanted, nodes(*cluster))
    if placed is not None:
        assert [found[one.key] for one in wanted] == placed
    assert [sum(count for _, count in found[one.key]) for one in wanted] == [one.count for one in wanted]


def test_pools_choose_first_and_leave_the_rest() -> None:
    """A pool of 4 GPUs for the rollouts on the node that has just so many; the eight actors on the other one."""
    found = assign({"sample": PoolConfig(per_node=4, gpus=1.0)}, [actors(8)], nodes(8, 4))
    assert found == {"sample": [("b", 4)], "cluster.actors": [("a", 8)]}
    assert place({"sample": PoolConfig(per_node=4, gpus=1.0)}, nodes(8, 4)) == {"sample": ["b"]}


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(1, 6), st.integers(0, 3), st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=3),
)  # fmt: skip
def test_a_place_is_found_exactly_if_one_exists(ranks: int, count: int, tp: int, offers: list[tuple[int, int]]) -> None:
    """Actors and replicas, against all ways of putting both on the nodes."""
    wanted = [actors(ranks), *([replicas(count, tp)] if count else [])]
    cluster = [ClusterNode(f"n{number}", cpus, gpus) for number, (cpus, gpus) in enumerate(offers)]
    rooms = [
        {(a, r) for a in range(ranks + 1) for r in range(count + 1) if a <= node.cpus and a + r * tp <= node.gpus}
        for node in cluster
    ]
    exists = any(
        sum(a for a, _ in choice) == ranks and sum(r for _, r in choice) == count for choice in itertools.product(*rooms)
    )
    try:
        found = assign({}, wanted, cluster)
    except ResourceError:
        assert not exists
        return
    assert exists
    taken = {node.name: [0.0, 0.0] for node in cluster}
    for one in wanted:
        assert sum(number for _, number in found[one.key]) == one.count
        for name, number in found[one.key]:
            taken[name] = [taken[name][0] + number * one.cpus, taken[name][1] + number * one.gpus]
    assert all(taken[node.name][0] <= node.cpus and taken[node.name][1] <= node.gpus for node in cluster)
