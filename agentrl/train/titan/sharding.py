"""A torchtitan model on the meta device, sharded over the ranks by torchtitan. Import it after `library.require_torchtitan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import set_spmd_backend

from agentrl.config.schema import ModelConfig
from agentrl.train.titan.families import Family
from agentrl.train.titan.parts import LogprobDecoder
from agentrl.train.ulysses import Ulysses

BACKEND = "partial_dtensor"
"""Parameters as DTensors, which can be gathered and saved like those of FSDP2; with torchtitan's default they are plain."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """What torchtitan is asked for: the type of the computation, and whether layers compute their activations twice."""

    dtype: torch.dtype
    checkpoints: bool


def dims_of(cfg: ModelConfig, device: torch.device) -> ParallelDims:
    """torchtitan's meshes over all ranks."""
    world = dist.get_world_size()
    # torchtitan takes the kind of accelerator that the machine has, and a GPU if it has none.
    torchtitan.distributed.parallel_dims.device_type = device.type
    set_spmd_backend(BACKEND)
    tensor, experts = cfg.tensor_parallel, cfg.expert_parallel
    found = ParallelDims(cfg.replicas, -1, cp=1, tp=tensor, pp=1, ep=experts, world_size=world, spmd_backend=BACKEND)
    found.build_mesh()
    return found


def sharded_decoder(family: Family, config: Any, dims: ParallelDims, asked: Sharding) -> nn.Module:
    """The model on the meta device, with torchtitan's names. Gradients are summed over the ranks, in float32."""
    name = str(asked.dtype).removeprefix("torch.")
    with torch.device("meta"):
        decoder: nn.Module = type("TitanDecoder", (LogprobDecoder, family.model), {})(config)
    family.parallelize(
        decoder,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=name),
        parallelism=ParallelismConfig(spmd_backend=BACKEND),
        compile_config=CompileConfig(),
        ac_config=FullAC.Config(preserve_rng_state=False) if asked.checkpoints else None,
        dump_folder="",
    )
    if dims.tp > 1:
        head: Any = decoder.lm_head
        head.tensor = Ulysses(dims.get_mesh("tp").get_group())
    for part in decoder.modules():
        if isinstance(part, FSDPModule):
            # torchtitan asks for sums by the divide factor alone, which gloo does not support.
            part.set_force_sum_reduction_for_comms(True)
    return decoder
