"""`agentrl train --dry-run`: all checks, and the memory of every role on every device, counted before anything starts.

Roles that share a device take turns, so its peak is what all of them hold between turns and what the largest turn needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from agentrl.config import TrainConfig
from agentrl.config.schema import InitModelConfig
from agentrl.errors import ResourceError
from agentrl.run.checks import check_config, check_train
from agentrl.run.engines import engine_name, maker_of
from agentrl.run.placement import roles_of
from agentrl.train.fsdp import Role
from agentrl.train.memory import RoleMemory, count, numbers, shell, token_bytes, width
from agentrl.train.pretrained import head_dim, model_context

GIB = 1 << 30
MODULE_OF: dict[str, Role] = {"actor": "policy", "reference": "policy", "critic": "value", "reward_model": "score"}
COLUMNS = ("weights", "optimizer", "gradients", "gathered", "cache")


@dataclass(frozen=True, slots=True)
class Placed:
    """A role on a device: its part of the memory there. `device`: the pool or the role whose processes it uses."""

    role: str
    device: str
    ranks: int
    memory: RoleMemory


def dry_run(config: TrainConfig, gpu_memory: float | None = None) -> str:
    """All that would be refused before a run, and the table of its memory. `gpu_memory`: GiB of each card, for a run on another
    machine; else that of this machine's cards, or host memory if there is none.

    Raises a UserError as the run would, and ResourceError, with the table, if a device cannot hold what is on it.
    """
    if gpu_memory is None:
        check_train(checked(config))
    else:
        check_config(checked(config))
    total = int(gpu_memory * GIB) if gpu_memory is not None else card_bytes()
    placed = memory_of(config, total)
    table = table_of(placed)
    lines = []
    for device, peak, limit in peaks(placed, total):
        lines.append(f"{device}: {peak / GIB:.1f} of {limit / GIB:.1f} GiB")
        if peak > limit:
            raise ResourceError(f"{device} needs {peak / GIB:.1f} GiB and has {limit / GIB:.1f} GiB\n{table}")
    return "\n".join([table, *lines])


def checked(config: TrainConfig) -> TrainConfig:
    """The config that the checks see: with a model folder that has no tokenizer, a model of its sizes with the packaged one."""
    path = config.model.path
    if path is None or not Path(path).is_dir() or any(Path(path).glob("tokenizer*")):
        return config
    sizes = {"context": model_context(path), "head_dim": head_dim(path) or InitModelConfig().head_dim}
    model = config.model.model_copy(update={"path": None, "init": InitModelConfig(**sizes)})
    return config.model_copy(update={"model": model})


def card_bytes() -> int | None:
    """Bytes of this machine's smallest card; None if it has none."""
    cards = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    return min(cards, default=None)


def memory_of(config: TrainConfig, card: int | None) -> list[Placed]:
    """Every role of the run and what it takes on one of its devices."""
    engine, dtype = engine_name(config), config.model.computes_in(card is not None)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    found = [_trained(config, role) for role in roles_of(config, engine) if role != "rollout"]
    maker = maker_of(engine, config)
    model = shell(config.model.model_copy(update={"lora": None}))
    weights = numbers(model.parameters()) * width(dtype)
    taken = maker.memory(weights, token_bytes(model.hf, dtype), card)
    if taken is not None:
        processes = maker.processes()
        ranks = 1 if processes is None else processes.count * max(processes.gpus, 1)
        memory = RoleMemory(weights=taken.weights, cache=taken.cache)
        found.append(Placed("rollout", _device(config, "rollout", own=processes is not None), ranks, memory))
    return found


def _trained(config: TrainConfig, role: str) -> Placed:
    device = _device(config, role)
    pool = config.cluster.pools.get(device)
    ranks = config.cluster.actors if pool is None else pool.nodes * pool.per_node
    paths = {
        "critic": config.critic.path if config.critic is not None else None,
        "reward_model": config.reward_model.path if config.reward_model is not None else None,
    }
    module = shell(config.model, MODULE_OF[role], paths.get(role))
    return Placed(role, device, ranks, count(module, config.model, ranks, trained=role in ("actor", "critic")))


def _device(config: TrainConfig, role: str, own: bool = False) -> str:
    """The pool of a role; else the processes of the actor, or its `own`."""
    if config.cluster.backend == "inline":
        return "actor"
    pools = {str(name): pool for name, pool in config.cluster.roles.items()}
    return pools.get(role) or (role if own else pools.get("actor", "actor"))


def peaks(placed: list[Placed], card: int | None) -> list[tuple[str, int, int]]:
    """Each device: its name, its peak and its limit in bytes. Without cards there is one device, this machine's memory, for all
    ranks together."""
    devices = dict.fromkeys(one.device for one in placed)
    peak = {name: _peak([one for one in placed if one.device == name]) for name in devices}
    if card is not None:
        return [(name, size, card) for name, size in peak.items()]
    ranks = {name: max(one.ranks for one in placed if one.device == name) for name in devices}
    return [("host memory", sum(peak[name] * ranks[name] for name in devices), psutil.virtual_memory().available)]


def _peak(beside: list[Placed]) -> int:
    return sum(one.memory.held for one in beside) + max(one.memory.turn for one in beside)


def table_of(placed: list[Placed]) -> str:
    """The memory of every role on one of its devices, in GiB."""
    rows: list[tuple[str, ...]] = [("device", "role", "ranks", *COLUMNS)]
    for one in placed:
        sizes = [getattr(one.memory, column) / GIB for column in COLUMNS]
        rows.append((one.device, one.role, str(one.ranks), *(f"{size:.2f}" for size in sizes)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["memory on each device, GiB", *lines])
