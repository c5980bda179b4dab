"""Placement of a run's roles: their pools and processes, and the memory of each role per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.placement import (
    WORKER_CPUS,
    Location,
    Unpooled,
    assign,
    driver_card,
    has_gpus,
    is_planned,
    join_locations,
    keys_of_roles,
    locations,
    nodes_of,
    pools_of_roles,
)
from agentrl.cluster.ray_cluster import ray_of
from agentrl.config import ClusterConfig, ModelConfig
from agentrl.rollout.engine import PROCESS_MIB, EngineMaker, EngineMemory
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.services import RunServices
from agentrl.trainer.actor import Actor
from agentrl.trainer.attention import varlen_takes_groups
from agentrl.trainer.language_model import Role
from agentrl.trainer.memory import RoleMemory, numel, shell, token_bytes, width
from agentrl.trainer.optim import optims_of
from agentrl.trainer.pretrained import model_context
from agentrl.trainer.train_engine import TRAIN_ENGINES, mesh_of, offloads_when_idle, separate_reference
from agentrl.utils.errors import AgentrlError, ConfigError, ModelError, ResourceError
from agentrl.utils.processor import usable_memory
from agentrl.utils.terminal import columns

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools


# Places


class RunRoles:
    """Roles of a run, and the places of their processes on the cluster's nodes.

    `engine`: processes of the run's engine, None for one in the driver; `side`: service engines with processes. `names`: roles
    with processes, as in `cluster.roles`; `with_pool`: those with a pool. `colocated`: role -> role whose GPUs it shares."""

    def __init__(self, choice: EngineChoice) -> None:
        self.choice, self.config, self.cluster = choice, choice.config, choice.config.cluster
        config, self.engine = choice.config, choice.maker().processes()
        self.side = RunServices(config).processes()
        present = {
            "actor": True,
            "rollout": self.engine is not None,
            "reference": separate_reference(config.model, config.algorithm),
            "critic": config.critic is not None,
            "reward_model": config.reward_model is not None,
            "teacher": config.algorithm.distillation is not None,
            **{one.role: True for one, _ in self.side},
        }
        self.names = [role for role, used in present.items() if used]
        self.with_pool = [role for role in self.names if role in {str(name) for name in self.cluster.roles}]
        # With `rollout.colocate`, an engine with its own processes uses the actors' GPUs.
        shares = config.rollout.colocate and self.engine is not None and self.cluster.backend == "ray"
        self.colocated = {"rollout": "actor"} if shares else dict[str, str]()

    @property
    def without_pool(self) -> dict[str, Unpooled]:
        """Roles without a pool whose processes reserve GPUs: one per actor, for the engine as many as it computes on. Empty on
        nodes without GPUs, where Ray places the processes by CPU slots."""
        # Actors first: the search gives the fewest nodes to the first role, and actors exchange gradients.
        cluster, engine, found = self.cluster, self.engine, dict[str, Unpooled]()
        if cluster.backend != "ray":
            return {}
        if "actor" not in cluster.roles and has_gpus(cluster, "actor"):
            block = engine.gpus if engine is not None and self.colocated else 1
            key = engine.gpus_key if engine is not None else ""
            found["actor"] = Unpooled("cluster.actors", cluster.actors, 1.0, 1.0, block, key)
        if engine is not None and "rollout" not in {*cluster.roles, *self.colocated} and has_gpus(cluster, "rollout"):
            found["rollout"] = Unpooled(engine.count_key, engine.count, 0.0, engine.gpus, 1, engine.gpus_key)
        for one, processes in self.side:
            if one.role not in cluster.roles and has_gpus(cluster, one.role):
                at, gpus_at = f"{one.key}.{processes.count_key}", f"{one.key}.{processes.gpus_key}"
                found[one.name] = Unpooled(at, processes.count, 0.0, processes.gpus, 1, gpus_at)
        return found

    def check_room(self) -> None:
        """Raise ResourceError, with a table, if even idle nodes have no room for the run's pools and processes with GPUs."""
        pools, unpooled = pools_of_roles(self.cluster, self.with_pool), self.without_pool
        if self.cluster.backend == "ray" and (pools or unpooled):
            assign(dict(pools.values()), list(unpooled.values()), nodes_of(self.cluster, "actor"))

    def worker_lines(self) -> list[str]:
        """Describe the resources of the rollout workers; empty without workers."""
        config, workers, nodes = self.config, self.choice.worker_processes(), nodes_of(self.cluster, "actor")
        if config.rollout.workers and not workers:
            return [f"rollout.workers: {config.rollout.workers}, in the processes of the {self.choice.name} engine"]
        if not workers:
            return []
        room = f"of {sum(node.cpus for node in nodes):g} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        return [
            f"rollout.workers: {workers} processes of {WORKER_CPUS:g} CPU slots ({room}) and about {PROCESS_MIB} MiB each, "
            "spread over the nodes"
        ]

    def open_pools(self) -> Pools | None:
        """Reserve the places of roles with a pool, and of actors and engine processes with GPUs.

        None if there is nothing to reserve, and with backend "inline". Ray must be running. Raises ResourceError, with a table
        of demand and supply, if they do not fit.
        """
        if self.cluster.backend != "ray" or not (self.with_pool or self.without_pool):
            return None
        from agentrl.cluster.placement import Pools

        return Pools(self.cluster, self.with_pool, self.cluster.call_timeout, self.without_pool, self.colocated)

    def locations(self) -> dict[str, list[Location]]:
        """Return node and GPUs of each process, by role and rank.

        They are those that Ray reserves now (and releases again), or an assignment to planned nodes. Empty if there is nothing to
        reserve: then Ray places the processes by CPU slots. Starts or joins Ray as the run would, if it is not running. Raises
        ResourceError if the processes do not fit, now or at all.
        """
        if self.cluster.backend != "ray":
            [node, *_] = nodes_of(self.cluster, "actor")
            one = Location(node.name, "", ("0",))
            return {role: [one] for role in dict.fromkeys(["actor", "rollout", *self.names])} if is_planned() else {}
        if not (self.with_pool or self.without_pool):
            return {}
        roles = [*self.names, *(one.name for one, _ in self.side)]
        size = self.engine.gpus if self.engine is not None else 0
        if is_planned():
            table, unpooled, others = pools_of_roles(self.cluster, self.with_pool), self.without_pool, self.colocated
            by_name = dict(table.values())
            shares = assign(by_name, list(unpooled.values()), nodes_of(self.cluster, "actor"))
            gpus = {name: pool.gpus for name, pool in by_name.items()} | {one.key: one.gpus for one in unpooled.values()}
            places, keys = locations(shares, gpus), keys_of_roles(table, unpooled, others)
            placed = {
                role: join_locations(places[key], size) if role in others and gpus[key] else places[key]
                for role, key in keys.items()
                if role in roles
            }
        else:
            with ray_of(self.cluster):
                pools = self.open_pools()
                assert pools is not None
                try:
                    placed = {role: pools.locations(role, size) for role in roles if role in pools}
                finally:
                    pools.close()
        # A role without its own processes uses the actors' processes.
        shared = placed.get("actor", [])
        elsewhere = {"rollout", *(name for one, _ in self.side for name in (one.role, one.name))}
        return {role: placed.get(role, shared) for role in roles if role in placed or role not in elsewhere}


def start_actors(
    model: ModelConfig, cluster: ClusterConfig, pools: Pools | None, role: type[Any] | None = None
) -> WorkerGroup[Any]:
    """Start the actor's processes, in its pool if it has one. `role`: worker class that learns instead of `Actor`."""
    role = role or Actor
    mesh = mesh_of(model, cluster)
    if pools is None or "actor" not in pools:
        return launch(
            role,
            name="actor",
            backend=cluster.backend,
            world_size=cluster.actors,
            mesh=mesh,
            startup_timeout=cluster.startup_timeout,
            call_timeout=cluster.call_timeout,
        )
    try:
        return pools.launch("actor", role, mesh)
    except AgentrlError:
        pools.close()
        raise


def placement_table(locations: Mapping[str, Sequence[Location]]) -> str:
    """Format the locations, one row per role and node: ranks, node, and the GPUs of each rank."""
    rows = [("role", "ranks", "node", "GPUs of each")]
    for role, of_role in locations.items():
        first = 0
        for (node, address), part in groupby(of_role, key=lambda location: (location.node, location.address)):
            cards = [",".join(location.cards) or "-" for location in part]
            last = first + len(cards) - 1
            at = f"{address} ({node[:8]})" if node else address
            rows.append((role, f"{first}-{last}" if last > first else str(first), at, " ".join(cards)))
            first = last + 1
    return "\n".join(columns(rows))


# Memory

GIB = 1 << 30
MODULE_OF: dict[str, Role] = {
    "actor": "policy",
    "reference": "policy",
    "critic": "value",
    "reward_model": "score",
    "teacher": "policy",
}
PUBLISH = "publish"
HOST = "host memory"
FILL = 0.85
"""Share of a GPU's memory that an engine with the trait "fills" may use; the rest is for the computation of a step."""
COLUMNS = ("weights", "optimizer", "gradients", "gathered", "activations", "working", "cache")


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """Memory of a role on a device. `device`: pool or role whose processes it uses; `rests`: it frees its memory between its
    turns; `lower`: config key that makes an engine's cache smaller."""

    role: str
    device: str
    ranks: int
    memory: RoleMemory
    rests: bool
    lower: str = ""


@dataclass(frozen=True, slots=True)
class Peak:
    """Maximum memory of a device: `size` of `limit` bytes, during the turn of `role` or a publish."""

    device: str
    role: str
    size: int
    limit: int


def host_lines(placed: list[RolePlacement]) -> list[str]:
    """Describe the host memory that roles hold between their turns or always, one line per role."""
    resting = [one for one in placed if one.rests and one.role != "rollout"]
    held = [(one.role, one.memory.resident, "pinned host memory per rank between its turns") for one in resting]
    held += [(one.role, one.memory.host, "host memory per rank (model.offload)") for one in placed if one.memory.host]
    return [f"{role}: {size / GIB:.1f} GiB of {what}" for role, size, what in held]


class RunMemory:
    """Memory of a run's roles on its devices: cards of `card` bytes, or host memory (None)."""

    def __init__(self, choice: EngineChoice, card: int | None) -> None:
        config, dtype = choice.config, choice.config.model.computes_in(card is not None)
        self.config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        self.card, self.choice = card, EngineChoice(self.config)

    def roles(self) -> list[RolePlacement]:
        """Return the memory of every role on one of its devices."""
        found, rollout = self._other_roles(trains=True), self.config.rollout
        try:
            maker, taken = self._with_engine(found)
        except ResourceError:
            self.check_fits(found)  # prefer the error with the table if even the other roles do not fit
            raise
        if taken is not None:
            processes = maker.processes()
            ranks = 1 if processes is None else processes.count * max(processes.gpus, 1)
            device = _device(self.config.cluster, "rollout", processes is not None and not rollout.colocate)
            memory = RoleMemory(weights=taken.weights, cache=taken.cache)
            found.append(RolePlacement("rollout", device, ranks, memory, rollout.colocate, taken.lower))
        return found

    def engine(self) -> EngineMemory | None:
        """Return the engine's memory on a device. Raises UserError if it cannot hold an episode."""
        counted = card_of_engine(self.choice.traits, self.card) is not None and "kv_cache_mib" not in self.config.engine_args
        return self._with_engine(self.count_others(trains=True) if counted else [])[1]

    def _with_engine(self, others: list[RolePlacement]) -> tuple[EngineMaker, EngineMemory | None]:
        """Return the engine's maker, and the memory that the engine takes next to the roles `others`."""
        config = self.config
        maker, dtype = self.choice.maker(), config.model.dtype
        maker.room = self.bytes_for_engine(others, card_of_engine(self.choice.traits, self.card))
        model = shell(config.model.model_copy(update={"lora": None}))
        assert dtype is not None
        return maker, maker.memory(numel(model.parameters()) * width(dtype), token_bytes(model, dtype), self.card)

    def count_others(self, trains: bool) -> list[RolePlacement]:
        """Return `_other_roles`, to size the engine's cache; its errors name `engine_args.kv_cache_mib`."""
        try:
            return self._other_roles(trains)
        except (ConfigError, ModelError) as problem:
            raise type(problem)(
                f"engine_args.kv_cache_mib: not set, and the GPU memory left by the trainer cannot be computed ({problem}). "
                "Set it"
            ) from problem

    def _other_roles(self, trains: bool) -> list[RolePlacement]:
        """Return the memory of all roles except the policy's engine."""
        config, cluster, found = self.config, self.config.cluster, list[RolePlacement]()
        # The same choice as in the run: the attention kernel with grouped key heads needs a card and half precision.
        grouped = self.card is not None and config.model.dtype != "float32" and varlen_takes_groups()
        # Maximum tokens of a micro-batch: its cap, or the longest row if a pass has one row. Transcripts of a warm start and
        # demonstrations may be as long as a micro-batch.
        tokens = config.optim.micro_tokens
        short = config.sft is None and config.algorithm.demonstrations is None
        if trains and short and config.model.packing != "packed":
            tokens = min(tokens, config.widest(config.trained_envs).rollout.max_episode_tokens)
        # Frozen models have no adapters; a reward model has no sequence parallelism either (trainer/roles.py).
        plain: dict[str, dict[str, Any]] = {"reward_model": {"lora": None, "sequence_parallel": 1}, "teacher": {"lora": None}}
        paths = {"critic": "critic.path", "reward_model": "reward_model.path", "teacher": "algorithm.distillation.path"}
        for role in [name for name in RunRoles(self.choice).names if name in MODULE_OF] if trains else []:
            device = _device(cluster, role)
            pool = cluster.pools.get(device)
            ranks = cluster.actors if pool is None else pool.nodes * pool.per_node
            model = config.model.model_copy(update=plain.get(role, {}))
            module = shell(model, MODULE_OF[role], config.other_models().get(paths.get(role, "")), grouped=grouped)
            # A warm start has its own optimizer, before that of the updates.
            sections = {"actor": ("optim", "sft"), "critic": ("critic",)}.get(role, ())
            optims = [optim for section, optim in optims_of(config).items() if section in sections]
            memory = TRAIN_ENGINES.entry(model.engine).make.memory(module, model, ranks, tokens, optims)
            found.append(RolePlacement(role, device, ranks, memory, offloads_when_idle(config, role)))
        # Engines of services, which always hold their memory.
        for one in RunServices(config).engines():
            model_config = one.model
            maker = one.make(model_context(str(model_config.path), model_config.trust_remote_code))
            dtype, processes, side = model_config.computes_in(self.card is not None), maker.processes(), shell(model_config)
            taken = maker.memory(numel(side.parameters()) * width(dtype), token_bytes(side, dtype), self.card)
            memory = RoleMemory() if taken is None else RoleMemory(weights=taken.weights, cache=taken.cache)
            ranks = 1 if processes is None else processes.count * max(processes.gpus, 1)
            # All engines of a role share its pool; without a pool each engine with processes has its own places.
            device = _device(cluster, one.role) if processes is None or one.role in cluster.roles else one.name
            lower = one.lower if processes is None or taken is None else taken.lower
            found.append(RolePlacement(one.name, device, ranks, memory, False, f"{one.key}.{lower}"))
        return found

    def bytes_for_engine(self, found: list[RolePlacement], card: int | None) -> int | None:
        """Return the bytes of a card that the roles `found` leave to the engine; None without a card. If the engine sleeps
        during their turns, only memory that they always hold counts."""
        if card is None:
            return None
        sharing = [one for one in found if one.device == _device(self.config.cluster, "rollout")]
        held = sum(one.memory.resident for one in sharing if not one.rests)
        turns = [] if self.config.rollout.colocate else [turn_of(one, sharing) for one in sharing]
        return int(FILL * card) - max([held, *turns])

    def check_fits(self, placed: list[RolePlacement]) -> None:
        """Raise ResourceError, with keys to change and the table, if a device cannot hold its roles."""
        for peak in peaks(placed, self.card):
            if peak.size > peak.limit:
                raise ResourceError(f"{memory_text(peak)}: it does not fit; {self.advice(placed, peak)}\n{table_of(placed)}")

    def advice(self, placed: list[RolePlacement], peak: Peak) -> str:
        """List keys that reduce a device's peak, largest part first."""
        sharing = [one for one in placed if one.device == peak.device or peak.device == HOST]
        # In a publish the weights and gathered layers belong to the actor.
        [one] = [one for one in sharing if one.role == peak.role.replace(PUBLISH, "actor")]
        memory, ways = one.memory, []
        if memory.activations + memory.working and peak.role != PUBLISH:
            thin = "" if memory.checkpoints else "set model.activation_checkpointing = true, "
            lower = f"lower optim.micro_tokens = {self.config.optim.micro_tokens}"
            ways.append((memory.activations + memory.working, f"{thin}{lower}"))
        if memory.gradients and not memory.shards_gradients and one.ranks > 1 and peak.role != PUBLISH:
            ways.append((memory.gradients, "set model.shard_gradients = true"))
        if memory.optimizer:
            # Remaining ways to reduce both per rank; in host memory more ranks save nothing.
            model, cards = self.config.model, peak.device != HOST
            less = (
                (model.replicas > 1, f"lower model.replicas = {model.replicas}"),
                (cards and self.config.cluster.backend != "inline", f"raise cluster.actors = {one.ranks}"),
                (model.lora is None, "train adapters ([model.lora])"),
                (cards and model.offload == "never", 'set model.offload = "always"'),
                (peak.role == PUBLISH and model.offload == "idle", 'set model.offload = "always" instead of "idle"'),
            )
            ways.append((memory.weights + memory.optimizer, ", or ".join(text for fits, text in less if fits)))
        if memory.cache:
            ways.append((memory.cache, f"lower {one.lower}"))
        held = sum(o.memory.resident for o in sharing if o is not one and not o.rests)
        if held:
            engine = "rollout.colocate = true, " if any(o.role == "rollout" and not o.rests for o in sharing) else ""
            ways.append((held, f'set {engine}model.offload = "idle", or give roles pools of their own (cluster.roles)'))
        if peak.device == HOST:
            ways.append((0, "this machine has no GPU: to plan for cards of another one add --gpu-memory GIB"))
        return "; ".join(text for _, text in sorted(ways, reverse=True) if text)


def engine_room(choice: EngineChoice, *, trains: bool) -> int | None:
    """Return the bytes of this process's GPU that the other roles leave to the engine.

    None if the engine does not fill a GPU, its cache size is set, or there is no GPU. `trains`: the run has training roles.
    Raises UserError as `RunMemory.roles`."""
    if "kv_cache_mib" in choice.config.engine_args or (card := card_of_engine(choice.traits, None)) is None:
        return None
    memory = RunMemory(choice, card)
    return memory.bytes_for_engine(memory.count_others(trains), card)


def card_of_engine(traits: frozenset[str], card: int | None) -> int | None:
    """Return the bytes of the GPU that the engine fills, in this process; `card` in a plan for another machine."""
    if "fills" not in traits:
        return None
    return card if is_planned() else driver_card()


def _device(cluster: ClusterConfig, role: str, own: bool = False) -> str:
    """Return the device of a role: its pool, else the actor's processes, or the role's (`own`)."""
    if cluster.backend == "inline":
        return "actor"
    pools = {str(name): pool for name, pool in cluster.roles.items()}
    return pools.get(role) or (role if own else pools.get("actor", "actor"))


def peaks(placed: list[RolePlacement], card: int | None) -> list[Peak]:
    """Compute the peak of each device; without cards the only device is this machine's memory, for all ranks together."""
    devices = {name: [one for one in placed if one.device == name] for name in dict.fromkeys(one.device for one in placed)}
    turns = {}
    for name, sharing in devices.items():
        found = [(turn_of(one, sharing), one.role) for one in sharing]
        parts = {one.role: one for one in sharing}
        if "actor" in parts and "rollout" in parts and parts["rollout"].rests:
            # The actor sends new weights to a colocated engine, which has no cache yet.
            others = [one.memory.resident for one in sharing if one.role not in ("actor", "rollout") and not one.rests]
            actor, engine = parts["actor"].memory, parts["rollout"].memory
            found.append((actor.resident + actor.gathered + engine.weights + sum(others), PUBLISH))
        turns[name] = max(found)
    if card is not None:
        return [Peak(name, role, size, card) for name, (size, role) in turns.items()]
    ranks = {name: max(one.ranks for one in sharing) for name, sharing in devices.items()}
    # The peaks of different roles' processes may coincide, and all ranks are on this machine.
    total = sum(size * ranks[name] for name, (size, _) in turns.items())
    # `free` and not `total`, because other programs keep their memory.
    return [Peak(HOST, max(turns.values())[1], total, usable_memory().free)]


def turn_of(one: RolePlacement, sharing: list[RolePlacement]) -> int:
    """Return the bytes on a device in the turn of a role: its memory, and that of `sharing` roles that do not rest."""
    return one.memory.resident + one.memory.turn + sum(o.memory.resident for o in sharing if o is not one and not o.rests)


def table_of(placed: list[RolePlacement]) -> str:
    """Format the memory of every role on one of its devices, in GiB; `all`: in its turn, without other roles."""
    rows: list[tuple[str, ...]] = [("device", "role", "ranks", *COLUMNS, "all")]
    for one in placed:
        sizes = [*(getattr(one.memory, column) for column in COLUMNS), one.memory.resident + one.memory.turn]
        rows.append((one.device, one.role, str(one.ranks), *(f"{size / GIB:.2f}" for size in sizes)))
    return "\n".join(["memory on each device, GiB", *columns(rows, str.rjust)])


def memory_text(peak: Peak) -> str:
    when = "a publish" if peak.role == PUBLISH else f"the turn of {peak.role}"
    return f"{peak.device}: {peak.size / GIB:.1f} of {peak.limit / GIB:.1f} GiB, in {when}"
