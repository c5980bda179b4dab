"""Experts of each token of a mixture of experts: the column of a batch, and the door to the code that reads and dictates them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.config.schema import VllmConfig
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Registry

FREE = {torch.uint8: 255, torch.int16: -1}
"""Mark of a token that its router may send anywhere, by the type of the column."""


def narrow(experts: int) -> torch.dtype:
    """The type that holds the numbers of that many experts, and one more for "none"."""
    return torch.uint8 if experts <= FREE[torch.uint8] else torch.int16


def free(like: Tensor, rows: int) -> Tensor:
    """Rows of a column of choices, [rows, routers, k], whose tokens go where their router sends them."""
    return torch.full((rows, *like.shape[1:]), FREE[like.dtype], dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class RouterCode:
    """Access to the routers of transformers' models and of vLLM."""

    check: Callable[[Any, str], None]
    """Raises ConfigError if choices of a model on the meta device cannot be repeated; takes the model's name, too."""
    check_vllm: Callable[[VllmConfig], None]
    """Raises ConfigError for keys of vLLM that do not go with `rollout.router_replay`."""
    vllm_receiver: str
    """Import path of vLLM's worker extension that notes experts."""
    watch: Callable[[Any], Any]
    """Of a model: `watching()` notes the choices of a pass, and `experts()` gives them. Raises ModelError for a dense one."""
    trained: Callable[[Any, Any], Any]
    """Of a trained model and the ranks that share tokens: `passing(micro)` around a pass, `take_load()`; None for a dense one."""
    load_metrics: Callable[[npt.NDArray[Any]], dict[str, float]]
    """Metrics of how evenly experts are used, from counts [routers, experts]."""


ROUTERS: Registry[Callable[[], RouterCode]] = Registry("rollout.router_replay", "ROUTERS", "agentrl.data.expert_routing")
TOPK = "topk"
"""Name of the code for routers that choose by one `torch.topk`."""


def router_code() -> RouterCode:
    """The code for routers. Raises ConfigError if agentrl.contrib.moe is missing."""
    if TOPK not in ROUTERS:
        raise ConfigError("rollout.router_replay: agentrl.contrib.moe is missing. Install it, or set the key to false")
    return ROUTERS.entry(TOPK).make()
