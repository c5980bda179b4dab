"""FSDP2's shards as parts of memory that all ranks of a machine share, for weights that are published without gathering them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from agentrl.weights.joined import RowShard


def row_shards(parts: Sequence[FSDPModule], names: dict[int, str]) -> list[RowShard]:
    """The shards of all parameters, if each is cut into as many runs of rows as there are ranks, and lies in host memory; else
    none.

    `names`: by the parameter's id. FSDP2 holds a shard twice, as the module's parameter and, with its padding, as what it
    gathers; both must move. torch has no public way to them: a torch without these fields has no such shards."""
    found: list[RowShard] = []
    for part in parts:
        part.reshard()  # a forward pass without backward may have left it whole
        for held in _parameters(part):
            if not _by_rows(held):
                return []
            move = partial(_move, held)
            found.append(RowShard(names[id(held.sharded_param)], tuple(held._orig_size), held._sharded_param_data, move))
    return found


def _parameters(part: FSDPModule) -> Iterator[Any]:
    state = part._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        yield from group.fsdp_params


def _by_rows(held: Any) -> bool:
    own, mesh = held._sharded_param_data, held.mesh_info
    plain = type(own) is Tensor and own.device.type == "cpu" and not held.is_dtensor and not held.offload_to_cpu
    if not plain or held.fsdp_placement.dim != 0 or mesh.mesh.ndim != 1:
        return False
    return bool((mesh.shard_mesh_rank, mesh.shard_mesh_size) == (dist.get_rank(), dist.get_world_size()))


def _move(held: Any, memory: Tensor) -> None:
    local = held.sharded_param._local_tensor
    with torch.no_grad():
        held._sharded_param_data = memory
        # The parameter stays the same object, which the optimizer has; only its memory is another.
        local.data = memory[: local.numel()].view(local.shape)
