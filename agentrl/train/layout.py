"""How an FSDP2 engine uses its ranks: what they shard, what they replicate, and which of them share rows.

dense weights    replicate x shard x tp     tp ranks split matrices by the model's plan, the others hold FSDP2's shards
experts          efsdp x ep                 with expert_parallel: each rank of ep has other experts
rows             dp x sp x tp               sp and tp ranks get the same rows; consecutive ranks, tp the nearest
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError
from agentrl.train.engines import check_on_host
from agentrl.train.ulysses import Ulysses

HOST = ("cpu",)
"""Devices whose memory is the host's."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`fsdp`: the mesh that parameters are sharded over (its last axis; if there are two, the first replicates). `tp`, `experts`:
    the meshes of tensor and expert parallelism ("efsdp" x "ep"), if there are any. `ulysses`: the group that shares tokens;
    `data`: the group that metrics are summed over (None: all ranks)."""

    fsdp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    ulysses: Ulysses | None = None
    data: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, cfg: ModelConfig, device: torch.device, world: int) -> Layout:
        """The layout for a config. Raises ConfigError if its keys do not divide the ranks, or free a GPU's memory where there
        is no GPU."""
        check_divides(cfg, world)
        if device.type in HOST:
            check_on_host(cfg)
        if not dist.is_initialized():
            return cls()
        kind, tp, sp = device.type, cfg.tensor_parallel, cfg.sequence_parallel
        # Parameters are sharded over ranks that share tokens too: these have the same weights and only compute other tokens.
        axes = {"replicate": cfg.replicas, "shard": world // cfg.replicas // tp, "tp": tp}
        used = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
        dense = init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))
        fsdp = dense["replicate", "shard"] if cfg.replicas > 1 else dense["shard"]
        experts = None
        if cfg.expert_parallel > 1:
            sizes = (world // cfg.expert_parallel, cfg.expert_parallel)
            experts = init_device_mesh(kind, sizes, mesh_dim_names=("efsdp", "ep"))
        mesh_of_tp = dense["tp"] if tp > 1 else None
        if sp * tp == 1:
            return cls(fsdp, mesh_of_tp, experts)
        rows = init_device_mesh(kind, (world // (sp * tp), sp, tp), mesh_dim_names=("dp", "sp", "tp"))
        ulysses = Ulysses(rows.get_group("sp")) if sp > 1 else None
        return cls(fsdp, mesh_of_tp, experts, ulysses, rows.get_group("dp"))


def check_divides(cfg: ModelConfig, ranks: int, name: str = "cluster.actors") -> None:
    """Raise ConfigError if a key that divides the ranks does not. `name`: where their number is set, for the message."""
    tp, shared = cfg.tensor_parallel, cfg.sequence_parallel * cfg.tensor_parallel
    parts = {
        f"model.replicas = {cfg.replicas}": cfg.replicas,
        f"model.sequence_parallel = {cfg.sequence_parallel}": cfg.sequence_parallel,
        f"model.tensor_parallel = {tp}": tp,
        f"model.expert_parallel = {cfg.expert_parallel}": cfg.expert_parallel,
        f"model.sequence_parallel x model.tensor_parallel = {shared}": shared,
        f"model.replicas x model.tensor_parallel = {cfg.replicas * tp}": cfg.replicas * tp,
    }
    for words, size in parts.items():
        if ranks % size:
            raise ConfigError(f"{words} does not divide {name} = {ranks}")
