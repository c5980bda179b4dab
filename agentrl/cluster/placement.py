"""The roles of a run on a Ray cluster: their resources reserved together, then filled role by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ray

from agentrl.cluster.actors import RayBackend
from agentrl.cluster.cards import VISIBLE
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.hosts import Hosts
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.pool import pools_of_roles
from agentrl.cluster.reserve import locations_of, reserve
from agentrl.cluster.spread import Location, Unpooled, joined, keys_of_roles
from agentrl.cluster.worker import Worker
from agentrl.config.schema import ClusterConfig
from agentrl.errors import AgentrlError

W = TypeVar("W", bound=Worker)


class Pools:
    """The resources of a run's roles: all pools that they name are reserved together, then filled role by role.

    `unpooled`: roles without a pool whose processes are reserved too. `beside`: roles whose own processes use the GPUs of
    another role's (rollout.colocate).

    Raises ConfigError for an unknown pool, and ResourceError, with the table of `reserve`, if they do not fit.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        roles: Sequence[str],
        call_timeout: float | None = None,
        unpooled: Mapping[str, Unpooled] | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        self._timeout, self._call_timeout = cluster.startup_timeout, call_timeout
        found, loose = pools_of_roles(cluster, roles), unpooled or {}
        self._pool_of = keys_of_roles(found, loose, beside or {})
        self._beside = frozenset(beside or {})
        self._held = reserve(dict(found.values()), list(loose.values()), cluster.startup_timeout)
        self._hosts: dict[str, Hosts] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._pool_of

    def slots(self, role: str) -> int:
        """Number of processes of a role that has a place here."""
        return self._held[self._pool_of[role]].slots

    def launch(self, role: str, cls: type[W], mesh: Mapping[str, int] | None = None) -> WorkerGroup[W]:
        """A group in the role's pool; the processes of a pool start with its first role and are shared by its roles.

        Raises ResourceError if they do not start in time.
        """
        name = self._pool_of[role]
        held = self._held[name]
        # Without handles they have ended with their last role; the reservation stays, so others can start in it.
        if name not in self._hosts or not self._hosts[name].handles:
            self._hosts[name] = Hosts(name, held.options(), self._timeout)
        grid = Mesh.of(mesh, held.slots)
        self._hosts[name].create(role, cls, grid)
        return WorkerGroup(cls, role, grid, RayBackend(role, cls, self._hosts[name], self._call_timeout))

    def ray_options(self, role: str, gpus: int = 0) -> list[dict[str, Any]]:
        """Ray's options for processes that the role starts itself, one per slot of its pool. If other roles
        use the pool's processes, these are on the same nodes and take none of their slots. `gpus`: of each process, if it is
        `beside` another role's: it uses the cards of the next so many ranks, which must have been started."""
        name = self._pool_of[role]
        held = self._held[name]
        # Alone in its pool it takes the slots. Else the pool's processes hold them, and asking for them again would wait forever.
        if sum(other == name for other in self._pool_of.values()) == 1:
            return held.options()
        nothing = {"num_cpus": 0.0, "num_gpus": 0.0}
        if not self._uses_cards_of_others(role):
            return [{**nothing, **held.at(slot)} for slot in range(held.slots)]
        # Ray cannot give parts of several cards to one process, so each is told which ones it sees instead.
        cards = self._hosts[name].cards()
        visible = [[card for rank in cards[first : first + gpus] for card in rank] for first in range(0, held.slots, gpus)]
        return [
            # In the bundle of the first of its ranks: blocks of ranks never span two nodes, so all of their cards are there.
            {**nothing, **held.at(number * gpus), "runtime_env": {"env_vars": {VISIBLE: ",".join(seen)}}}
            for number, seen in enumerate(visible)
        ]

    def locations(self, role: str, gpus: int = 0) -> list[Location]:
        """Where each process of a role will be, asked before they are started; `gpus` as in `ray_options`."""
        ranks = locations_of(self._held[self._pool_of[role]])
        return joined(ranks, gpus) if self._uses_cards_of_others(role) else ranks

    def _uses_cards_of_others(self, role: str) -> bool:
        """Whether a role's own processes are beside those of other roles, which hold the GPUs."""
        name = self._pool_of[role]
        return role in self._beside and self._held[name].gpus > 0

    def release_with_groups(self) -> None:
        """Release each pool's resources with the last group in it, for a caller that does not keep the Pools."""
        for name, hosts in self._hosts.items():
            hosts.on_end = self._held[name].release

    def close(self) -> None:
        """End what still runs in the pools and release their resources; idempotent."""
        for hosts in self._hosts.values():
            # Before the release, with which Ray kills what still runs there: a killed process runs no exit handlers.
            hosts.end()
        # After a shutdown nothing is held any more, and asking would fail.
        if ray.is_initialized():
            for held in self._held.values():
                held.release()
        self._hosts, self._held = {}, {}


def launch_in_pools(
    cluster: ClusterConfig,
    classes: Mapping[str, type[Worker]],
    meshes: Mapping[str, Mapping[str, int]],
    call_timeout: float | None,
) -> dict[str, WorkerGroup[Any]]:
    """Start roles that have a pool; each pool is released with its last role. See `roles.launch_roles`."""
    pools = Pools(cluster, list(classes), call_timeout)
    try:
        groups = {role: pools.launch(role, cls, meshes.get(role)) for role, cls in classes.items()}
    except AgentrlError:
        pools.close()
        raise
    pools.release_with_groups()
    return groups
