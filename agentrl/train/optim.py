"""Optimizers, their learning-rate schedules, and their state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config.schema import OptimConfig, SftConfig
from agentrl.errors import ConfigError

Named = list[tuple[str, nn.Parameter]]
Schedule = Literal["constant", "linear", "cosine"]


def rate(step: int, warmup: int, schedule: Schedule, total: int | None, floor: float = 0.0) -> float:
    """The learning rate at `step` (from 0) as a fraction of the base: linear warm-up over `warmup` steps, then
    constant, or decaying to `floor` of the base at step `total`, where it stays.

    Raises ConfigError if a decaying schedule has no `total`.
    """
    if step < warmup:
        # From 1 / warmup, not 0: the first step would be computed and change nothing.
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    if total is None:
        raise ConfigError(f'optim.schedule = "{schedule}" needs the number of steps of the run')
    done = min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)
    shape = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return floor + (1 - floor) * shape


class Optimizers:
    """One or more torch optimizers that step together, each parameter in exactly one of them."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer], names: Named) -> None:
        self.parts = list(parts)
        self._names = {id(parameter): name for name, parameter in names}
        self._base = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def set_rate(self, factor: float) -> None:
        for part, base in zip(self.parts, self._base, strict=True):
            for group, lr in zip(part.param_groups, base, strict=True):
                group["lr"] = lr * factor

    def step(self) -> None:
        for part in self.parts:
            # Gradients become None, not zeros: a parameter without one is left alone, while zeros would still decay it.
            part.step()
            part.zero_grad(set_to_none=True)

    def drop(self) -> None:
        """Drop the gradients without a step."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> list[Tensor]:
        """The state that exists so far, without the counts of steps."""
        states = [held for part in self.parts for held in part.state.values()]
        return [value for held in states for value in held.values() if isinstance(value, Tensor) and value.ndim]

    def state(self) -> dict[str, Tensor]:
        """State tensors as `<parameter>.<entry>`; entries that do not exist yet are created as zeros."""
        tensors: dict[str, Tensor] = {}
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    held = part.state[parameter]
                    if not held:  # torch creates them at the first step, but a load before it needs tensors to write into
                        held.update(_fresh(part, parameter))
                    name = self._names[id(parameter)]
                    tensors.update({f"{name}.{key}": value for key, value in held.items()})
        return tensors


def _fresh(part: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if not isinstance(part, torch.optim.AdamW):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters grouped by the mesh of ranks that they are sharded over: one operation takes tensors of one mesh only."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def adamw(named: Named, cfg: OptimConfig) -> Optimizers:
    """AdamW over all parameters, without weight decay for vectors (norms, biases)."""
    matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]
    decays = ((matrices, cfg.weight_decay), (vectors, 0.0))
    chosen = [{"params": part, "weight_decay": decay} for held, decay in decays for part in by_mesh(held)]
    # fused: one pass over the memory; single operations would make temporary tensors as large as the weights.
    return Optimizers([torch.optim.AdamW(chosen, lr=cfg.lr, betas=cfg.betas, fused=True)], named)


def muon(named: Named, cfg: SftConfig) -> Optimizers:
    """Muon (Jordan 2024) on the matrices inside the layers, AdamW on embeddings and vectors."""
    inner = [(n, p) for n, p in named if p.ndim == 2 and not _is_embedding(n)]
    chosen = {id(p) for _, p in inner}
    rest = [p for _, p in named if id(p) not in chosen]
    groups = [{"params": part} for part in by_mesh(rest)]
    parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    if inner:
        parts.append(torch.optim.Muon([p for _, p in inner], lr=cfg.matrix_lr, weight_decay=0.1))
    return Optimizers(parts, named)


def _is_embedding(name: str) -> bool:
    return "embed" in name or "lm_head" in name
