"""A torchtitan layer of experts, with transformers' weights. Import it after `library.require_torchtitan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common.config_utils import make_moe_config, make_token_dispatcher_config
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.moe_sharding import set_moe_sharding_config

from agentrl.train.titan.parts import local
from agentrl.train.titan.routers import Router

NAMES = {
    f"layers.{{}}.moe.routed_experts.inner_experts.{name}": f"model.layers.{{}}.mlp.experts.{name}"
    for name in ("gate_up_proj", "down_proj")
}
"""The Hugging Face names of the experts' weights, which torchtitan's own table has one by one."""


class Experts(GroupedExperts):
    """All experts of a layer, with the two weights that transformers has for them; torchtitan has three.

    They compute in the type of their weights; torchtitan's always compute in bfloat16, which in a float32 run is not what the
    engine that sampled computed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_dim, config.dim))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Tokens [R, D], sorted by expert, and their numbers per expert [E] -> [R, D]."""
        offsets = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        gate_up, down = (local(weight).to(x_RD.dtype).transpose(-2, -1) for weight in (self.gate_up_proj, self.down_proj))
        gate, up = torch._grouped_mm(x_RD, gate_up, offs=offsets).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, down, offs=offsets)


def is_sparse(config: Any, layer: int) -> bool:
    """Whether a layer of a Qwen3-MoE model has experts."""
    listed = layer in (config.mlp_only_layers or [])
    return not listed and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


def experts_config(config: Any) -> Any:
    """torchtitan's config of the experts of one layer, without its balancing of their load, which is no part of the model."""
    count, top = config.num_experts, config.num_experts_per_tok
    return make_moe_config(
        num_experts=count,
        load_balance_coeff=None,
        router=Router.Config(
            num_experts=count,
            gate=Linear.Config(in_features=config.hidden_size, out_features=count),
            top_k=top,
            score_func="softmax",
            route_norm=config.norm_topk_prob,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(dim=config.hidden_size, hidden_dim=config.moe_intermediate_size, num_experts=count),
            token_dispatcher=make_token_dispatcher_config(num_experts=count, top_k=top, comm_backend="standard"),
        ),
    )


def shard_experts(config: Any, expert_parallel: bool) -> None:
    """Fill in how the experts of all layers of a torchtitan config are divided."""
    for layer in config.layers:
        if layer.moe is not None:
            layout = {"gate_up_proj": spmd_types.R, "down_proj": spmd_types.R}  # over tensor-parallel ranks
            set_moe_sharding_config(layer.moe, enable_ep=expert_parallel, enable_sp=False, expert_param_layout=layout)
