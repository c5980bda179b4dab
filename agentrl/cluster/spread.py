"""Roles without a pool on a cluster with GPUs: how many of their processes go on which node. Does not import ray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.cluster.pool import ClusterNode, largest, need, place, table
from agentrl.config.schema import PoolConfig
from agentrl.errors import ResourceError

WORKER_CPUS = 0.5
"""CPU slots of a rollout worker: it waits for the engine and for tools much of the time, so two share a core."""

Shares = list[tuple[str, int]]
"""Names of nodes, each with the number of processes on it, in the order of their ranks."""


@dataclass(frozen=True, slots=True)
class Unpooled:
    """`count` processes, each with `cpus` CPU slots and `gpus` GPUs. `key`: the config key that sets the count.

    `block`: each node gets a multiple of so many, for a process of another role that uses the cards of all of a block.
    `size_key`: the config key that sets the GPUs of a process, or of a block.
    """

    key: str
    count: int
    cpus: float
    gpus: float
    block: int = 1
    size_key: str = ""

    def blocks(self) -> Unpooled:
        """The same with each block as one process."""
        size = self.block
        return replace(self, count=-(-self.count // size), cpus=self.cpus * size, gpus=self.gpus * size, block=1)

    def fit(self, room: Sequence[float]) -> int:
        """How many fit into (CPU slots, GPUs)."""
        # What it does not ask for sets no limit; a process that asks for nothing fits anywhere.
        each = [has // asks for has, asks in zip(room, (self.cpus, self.gpus), strict=True) if asks and not math.isinf(has)]
        return int(min(each, default=self.count))

    def taken(self, room: Sequence[float], count: int) -> list[float]:
        """What is left of (CPU slots, GPUs) beside `count` of them."""
        return [room[0] - count * self.cpus, room[1] - count * self.gpus]


def assign(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], nodes: Sequence[ClusterNode]) -> dict[str, Shares]:
    """The nodes of every pool, by its name, and of the processes without one, by their key; the pools choose first.

    Raises ResourceError, with a table of demand and supply, if no place is found.
    """
    chosen = place(pools, nodes)
    left = {node.name: [node.cpus, node.gpus] for node in nodes}
    shares: dict[str, Shares] = {}
    for name, pool in pools.items():
        cpus, gpus = need(pool)
        shares[name] = [(node, pool.per_node) for node in chosen[name]]
        for node in chosen[name]:
            left[node] = [left[node][0] - cpus, left[node][1] - gpus]
    units = [one.blocks() for one in unpooled]
    # Few nodes are faster to train on. Any nodes will do before a run is refused that has room.
    found = _on_few_nodes(units, left)
    if found is None:
        found = _on_any_nodes(units, left)
    if found is None:
        raise ResourceError(
            f"the run's processes do not fit the cluster: {_obstacle(pools, unpooled, nodes)}\n"
            + table(pools, nodes, demands(unpooled))
        )
    order = [node.name for node in nodes]
    for one in unpooled:
        shares[one.key] = [(node, found[one.key][node] * one.block) for node in order if found[one.key].get(node)]
    return shares


def _obstacle(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], nodes: Sequence[ClusterNode]) -> str:
    """The key whose value has no place, with the way out."""
    _, most = largest(nodes)
    for one in (each.blocks() for each in unpooled):
        if one.gpus > most:
            return f"{one.size_key} = {one.gpus:g}: these GPUs are on one node, and the largest has {most:g}. Lower it"
    wanted = sum(one.count * one.gpus for one in unpooled)
    left = sum(node.gpus for node in nodes) - sum(need(pool)[1] * pool.nodes for pool in pools.values())
    keys = " and ".join(f"{one.key} = {one.count}" for one in unpooled)
    # Else the GPUs suffice, but not in the right sizes, or not with CPU slots.
    problem = f"{keys} take {wanted:g} GPUs, and {left:g} are left" if wanted > left else f"{keys} do not divide among the nodes"
    turns = ", or set rollout.colocate = true (both then use the same)" if len(unpooled) > 1 else ""
    return (
        f"{problem}: without a pool each actor takes a GPU of its own, and so does each process of the engine. Lower one, or add "
        f"nodes{turns}"
    )


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process is, or will be: the address of its node, the node's id, and the GPUs that it uses there."""

    address: str
    node: str
    cards: tuple[str, ...]


def locations(shares: Mapping[str, Shares], gpus: Mapping[str, float]) -> dict[str, list[Location]]:
    """The node and the GPUs of each process, which are numbered on each node as they are taken; `gpus`: of a process, by key."""
    taken: dict[str, float] = {}
    found: dict[str, list[Location]] = {key: [] for key in shares}
    for key, node in ((key, node) for key, share in shares.items() for node, count in share for _ in range(count)):
        first = taken.get(node, 0.0)
        taken[node] = first + gpus[key]
        found[key].append(Location(node, "", tuple(map(str, range(int(first), math.ceil(taken[node]))))))
    return found


def joined(ranks: Sequence[Location], size: int) -> list[Location]:
    """Of processes that use the GPUs of `size` ranks each, where they are."""
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return [Location(part[0].address, part[0].node, tuple(card for one in part for card in one.cards)) for part in parts]


def keys_of_roles(
    pools: Mapping[str, tuple[str, PoolConfig]], unpooled: Mapping[str, Unpooled], beside: Mapping[str, str]
) -> dict[str, str]:
    """The key in `Shares` of each role that has a place: its pool, its own, or that of the role that it is beside."""
    keys = {role: name for role, (name, _) in pools.items()} | {role: one.key for role, one in unpooled.items()}
    # Last, because a role beside another is in that one's pool, whatever it is.
    return keys | {role: keys[other] for role, other in beside.items()}


def demands(unpooled: Sequence[Unpooled]) -> dict[str, tuple[int, float, float]]:
    """The processes for `pool.table`."""
    return {one.key: (one.count, one.cpus, one.gpus) for one in unpooled}


def _on_few_nodes(wanted: Sequence[Unpooled], left: Mapping[str, list[float]]) -> dict[str, dict[str, int]] | None:
    """Each on the fewest nodes that leave room for the next, equally many on each if that fits: ranks that exchange gradients
    are fastest within a node. None if that is not found."""
    if not wanted:
        return {}
    first, rest = wanted[0], wanted[1:]
    # Those with most room first: then the first few are the fewest that can hold all.
    order = sorted(left, key=lambda node: -first.fit(left[node]))
    for used in range(1, len(order) + 1):
        counts = _counts(first.count, [first.fit(left[node]) for node in order[:used]])
        if counts is None:
            continue
        chosen = dict(zip(order, counts, strict=False))
        after = {node: first.taken(room, chosen.get(node, 0)) for node, room in left.items()}
        others = _on_few_nodes(rest, after)
        if others is not None:
            return {first.key: chosen, **others}
    return None


def _counts(count: int, room: Sequence[int]) -> list[int] | None:
    """`count` over nodes with `room`, equally if that fits, else filling one after the other; None if there is too little."""
    even = [count // len(room) + (number < count % len(room)) for number in range(len(room))]
    if all(wanted <= has for wanted, has in zip(even, room, strict=True)):
        return even
    counts = []
    for has in room:
        counts.append(min(has, count))
        count -= counts[-1]
    return None if count else counts


def _on_any_nodes(wanted: Sequence[Unpooled], left: Mapping[str, list[float]]) -> dict[str, dict[str, int]] | None:
    """Those with most GPUs first, one by one where they take the least room from the smallest: with two kinds of processes, of
    which one takes one GPU, this finds a place whenever there is one."""
    if not wanted:
        return {}
    # Large ones first: small ones fit into the gaps that these leave, but not the other way round.
    order = sorted(wanted, key=lambda one: -one.gpus)
    smallest, room = order[-1], {node: list(has) for node, has in left.items()}
    found: dict[str, dict[str, int]] = {one.key: {} for one in wanted}
    for one in order:
        for _ in range(one.count):
            fitting = [node for node in room if one.fit(room[node])]
            if not fitting:
                return None
            node = min(fitting, key=lambda name: smallest.fit(room[name]) - smallest.fit(one.taken(room[name], 1)))
            room[node] = one.taken(room[node], 1)
            found[one.key][node] = found[one.key].get(node, 0) + 1
    return found
