"""Pools: pure placement, its table, and the config keys."""

from __future__ import annotations

import itertools

import pytest
from cluster_workers import Plain
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster.pool import Node, need, place, pools_of_roles
from agentrl.cluster.roles import launch_roles
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.errors import ConfigError, ResourceError

NODES = [Node("a", 4, 2), Node("b", 4, 0)]


def test_roles_share_a_pool():
    cluster = ClusterConfig(
        actors=3,
        pools={"train": PoolConfig(per_node=2, gpus=1.0)},
        roles={"actor": "train", "critic": "train"},
    )
    found = pools_of_roles(cluster, ["actor", "critic", "reference"])
    assert found["actor"] == found["critic"] == ("train", PoolConfig(per_node=2, gpus=1.0))
    assert "reference" not in found


def test_inline_roles_and_roles_without_a_pool():
    groups = launch_roles(ClusterConfig(backend="inline", actors=2), {"actor": Plain, "critic": Plain})
    assert groups["actor"].world_size == 2 and groups["critic"].run(Plain.where, 1) == (0, 2, 1)
    with pytest.raises(ConfigError, match="'nowhere'"):
        launch_roles(ClusterConfig(backend="inline", roles={"actor": "nowhere"}), {"actor": Plain})


def test_an_unknown_pool_is_named_with_the_nearest():
    cluster = ClusterConfig(pools={"train": PoolConfig()}, roles={"actor": "trian"})
    with pytest.raises(
        ConfigError, match=r"cluster.roles.actor names the pool 'trian'.*did you mean 'train'"
    ):
        pools_of_roles(cluster, ["actor"])


def test_a_pool_that_fits_in_total_but_on_no_node_is_refused_with_the_table():
    with pytest.raises(ResourceError) as caught:
        place({"train": PoolConfig(per_node=6), "rollout": PoolConfig(gpus=1.0)}, NODES)
    lines = str(caught.value).splitlines()
    assert "do not fit" in lines[0]
    assert any(line.split() == ["pool", "train", "1", "6", "6", "0"] for line in lines)
    assert any(line.split() == ["node", "b", "4", "0"] for line in lines)


def test_every_size_of_a_pool_changes_its_place():
    assert place({"p": PoolConfig(gpus=1.0)}, NODES) == {"p": ["a"]}
    assert place({"p": PoolConfig()}, NODES) == {"p": ["b"]}  # leaves the GPUs to others
    assert sorted(place({"p": PoolConfig(nodes=2)}, NODES)["p"]) == ["a", "b"]
    for too_much in (PoolConfig(nodes=3), PoolConfig(cpus=5.0), PoolConfig(per_node=3, gpus=1.0)):
        with pytest.raises(ResourceError):
            place({"p": too_much}, NODES)


pool = st.builds(
    PoolConfig,
    nodes=st.integers(1, 2),
    per_node=st.integers(1, 3),
    cpus=st.sampled_from([1.0, 2.0]),
    gpus=st.sampled_from([0.0, 1.0]),
)
node = st.tuples(st.integers(0, 6), st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(st.lists(pool, min_size=1, max_size=3), st.lists(node, min_size=1, max_size=3))
def test_a_place_is_found_exactly_where_one_exists(pools, offers):
    named = {f"p{i}": item for i, item in enumerate(pools)}
    nodes = [Node(f"n{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(offers)]
    options = [list(itertools.combinations(range(len(nodes)), item.nodes)) for item in pools]

    def fits(choice):
        for at, one in enumerate(nodes):
            used = [need(item) for item, where in zip(pools, choice, strict=True) if at in where]
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
