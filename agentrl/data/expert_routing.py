"""Expert routing: the batch column of each token's experts, and the registry of code that records and replays them."""

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
"""Mark of a token that its router may route freely, by dtype of the column."""


def narrow(experts: int) -> torch.dtype:
    """Return the dtype for that many expert numbers and the mark FREE."""
    return torch.uint8 if experts <= FREE[torch.uint8] else torch.int16


def free(like: Tensor, rows: int) -> Tensor:
    """Create `rows` rows [rows, routers, k] of a column like `like`, all marked FREE."""
    return torch.full((rows, *like.shape[1:]), FREE[like.dtype], dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class RouterCode:
    """Implementation that records and replays the routers of transformers models and of vLLM."""

    check: Callable[[Any, str], None]
    """(model on the meta device, its name): raises ConfigError if its routing cannot be replayed."""
    check_vllm: Callable[[VllmConfig], None]
    """Raises ConfigError for vLLM keys that do not work with `rollout.router_replay`."""
    vllm_receiver: str
    """Import path of the vLLM worker extension that records experts."""
    watch: Callable[[Any], Any]
    """model -> recorder: `watching()` records the choices of a pass, `experts()` returns them. Raises ModelError if dense."""
    trained: Callable[[Any, Any], Any]
    """(model, ranks that share tokens) -> replayer with the context `passing(micro)` and `take_load()`; None if dense."""
    load_metrics: Callable[[npt.NDArray[Any]], dict[str, float]]
    """counts [routers, experts] -> metrics of the balance between experts."""


ROUTERS: Registry[Callable[[], RouterCode]] = Registry("rollout.router_replay", "ROUTERS", "agentrl.data.expert_routing")
TOPK = "topk"
"""Registered name of the implementation for routers with one `torch.topk`."""


def router_code() -> RouterCode:
    """Return the router implementation. Raises ConfigError if agentrl.contrib.moe is missing."""
    if TOPK not in ROUTERS:
        raise ConfigError("rollout.router_replay: agentrl.contrib.moe is missing. Install it, or set the key to false")
    return ROUTERS.entry(TOPK).make()
