"""Processes without a pool on nodes with GPUs: which node gets how many."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster.placement import ClusterNode, Unpooled, assign, place
from agentrl.config.schema import PoolConfig
from agentrl.utils.errors import ResourceError
from tests.conftest import examples


def nodes(*gpus: float, cpus: float = 64.0) -> list[ClusterNode]:
    return [ClusterNode(name, cpus, has) for name, has in zip("abcdefgh", gpus, strict=False)]


def actors(count: int, block: int = 1) -> Unpooled:
    return Unpooled("cluster.actors", count, 1.0, 1.0, block)


def replicas(count: int, tp: int = 1) -> Unpooled:
    return Unpooled("vllm.replicas", count, 0.0, float(tp))


@pytest.mark.parametrize(
    ("wanted", "cluster", "placed"),
    [
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
    ],
)  # fmt: skip
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
