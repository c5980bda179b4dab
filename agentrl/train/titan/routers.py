"""torchtitan's routers, repeating what the engine chose, and counted. Import it after `library.require_torchtitan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from agentrl.experts import FREE, Load, Routers
from agentrl.train.attention import PackedSequences
from agentrl.train.routing import Routing
from agentrl.train.ulysses import Ulysses


class Router(TokenChoiceTopKRouter):
    """Sends tokens where `rows` says (`PackedSequences.experts`), and where it says nothing to the experts with the highest
    scores; `told` is called with what was chosen. `layer`: which of the model's routers it is."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.experts, self.layer, self.strict = config.num_experts, 0, False
        self.rows: PackedSequences | None = None
        self.told: Callable[[Tensor], None] | None = None

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gates and experts of the tokens, both [1, T, k], and the scores of all experts [1, T, E]."""
        gates, chosen, scores = super().forward(x_BLD, expert_bias_E)
        if self.rows is not None and self.rows.experts is not None:
            dictated = self.rows.experts[None, :, self.layer]
            chosen = torch.where(dictated == FREE[dictated.dtype], chosen, dictated.to(chosen.dtype))
            gates = scores.gather(-1, chosen)
            if self.route_norm:
                gates = gates / gates.sum(-1, keepdim=True)
            gates = gates * self.route_scale
        if self.told is not None:
            self.told(chosen[0])
        return gates, chosen, scores


class RoutedBlock(Qwen3TransformerBlock):
    """A layer that tells its router where the tokens are to go; also when it is computed again for the backward pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(self, x: Tensor, attention_masks: PackedSequences, positions: Tensor | None = None) -> Tensor:
        self.moe.router.rows = attention_masks
        found: Tensor = super().forward(x, attention_masks, positions)
        return found


class TitanRouters(Routers):
    """The routers of a torchtitan model, in the order of its layers."""

    def __init__(self, decoder: nn.Module) -> None:
        self._dictated, self.problem = None, ""
        found: Any = [module for module in decoder.modules() if isinstance(module, Router)]
        for layer, router in enumerate(found):
            router.layer = layer
        self._routers = found


class TitanRouting(Routing):
    """`Routing` of a torchtitan model."""

    def __init__(self, decoder: nn.Module, group: Ulysses | None) -> None:
        self._routers, self._group = TitanRouters(decoder), group
        self._load = Load(self._routers)
