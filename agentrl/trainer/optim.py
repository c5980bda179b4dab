"""Optimizers, learning rate schedules and defaults, and offloading of tensors to host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config.schema import CriticConfig, ModelConfig, OptimConfig, SftConfig, TrainConfig
from agentrl.utils.errors import ConfigError

Named = list[tuple[str, nn.Parameter]]
Schedule = Literal["constant", "linear", "cosine"]


def rate(step: int, warmup: int, schedule: Schedule, total: int | None, floor: float = 0.0) -> float:
    """Return the learning rate at `step` (from 0) as a fraction of the base rate.

    Linear warm-up over `warmup` steps, then constant, or decay to the fraction `floor` at step `total`, constant from there.
    Raises ConfigError if a decaying schedule has no `total`.
    """
    if step < warmup:
        # From 1 / warmup, not 0, at which the first step would change nothing.
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
        self._base = [[float(group["lr"]) for group in part.param_groups] for part in self.parts]

    def set_rate(self, factor: float) -> None:
        for part, base in zip(self.parts, self._base, strict=True):
            for group, lr in zip(part.param_groups, base, strict=True):
                group["lr"] = lr * factor

    def step(self) -> None:
        for part in self.parts:
            part.step()
        self.drop()

    def drop(self) -> None:
        """Drop the gradients without a step."""
        for part in self.parts:
            # They become None, not zeros: a parameter without a gradient is skipped, with zeros it would still decay.
            part.zero_grad(set_to_none=True)

    def tensors(self) -> list[Tensor]:
        """Return the existing state tensors, without step counts."""
        states = [held for part in self.parts for held in part.state.values()]
        return [value for held in states for value in held.values() if isinstance(value, Tensor) and value.ndim]

    def state(self) -> dict[str, Tensor]:
        """Return state tensors by `<parameter>.<entry>`; missing entries are created as zeros."""
        tensors: dict[str, Tensor] = {}
        for part in self.parts:
            adam = not isinstance(part, torch.optim.SGD | torch.optim.Muon)
            moments = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if part.defaults["momentum"] else ()
            for group in part.param_groups:
                for parameter in group["params"]:
                    held = part.state[parameter]
                    if not held:  # torch creates them at the first step, but an earlier load needs tensors to write into
                        held.update({"step": torch.zeros((), device=parameter.device)} if adam else {})
                        held.update({name: torch.zeros_like(parameter) for name in moments})
                    name = self._names[id(parameter)]
                    tensors.update({f"{name}.{key}": value for key, value in held.items() if isinstance(value, Tensor)})
        return tensors


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by their device mesh, because an operation takes tensors of one mesh only."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def adamw(named: Named, cfg: OptimConfig) -> Optimizers:
    """AdamW over all parameters, without weight decay for vectors (norms, biases)."""
    # fused: one pass over the memory, without temporary tensors as large as the weights.
    return Optimizers([torch.optim.AdamW(_decay_groups(named, cfg), lr=_lr(cfg), betas=cfg.betas, fused=True)], named)


def sgd(named: Named, cfg: OptimConfig) -> Optimizers:
    """Stochastic gradient descent with momentum, without weight decay for vectors."""
    return Optimizers([torch.optim.SGD(_decay_groups(named, cfg), lr=_lr(cfg), momentum=cfg.betas[0])], named)


def muon(named: Named, cfg: OptimConfig) -> Optimizers:
    """Muon (Jordan 2024) on matrices inside of layers; AdamW without weight decay on embeddings, heads and vectors."""
    inner = [p for n, p in named if moves_by_muon(n, p)]
    chosen = {id(p) for p in inner}
    groups = [{"params": part} for part in by_mesh(p for _, p in named if id(p) not in chosen)]
    parts: list[torch.optim.Optimizer] = []
    if groups:
        parts.append(torch.optim.AdamW(groups, lr=_lr(cfg), betas=cfg.betas, weight_decay=0.0, fused=True))
    if inner:
        lr, scale = (_lr(cfg), "match_rms_adamw") if cfg.matrix_lr is None else (cfg.matrix_lr, "original")
        parts.append(torch.optim.Muon(inner, lr=lr, weight_decay=cfg.weight_decay, adjust_lr_fn=scale))
    return Optimizers(parts, named)


OPTIMIZERS: dict[str, Callable[[Named, OptimConfig], Optimizers]] = {"adamw": adamw, "muon": muon, "sgd": sgd}


def state_bytes(name: str, parameter: Tensor, cfg: OptimConfig) -> float:
    """Return the bytes of optimizer state per element of a parameter."""
    if cfg.name == "sgd":
        return 4.0 if cfg.betas[0] else 0.0
    if cfg.name == "muon" and moves_by_muon(name, parameter):
        return 4.0
    return 8.0


def moves_by_muon(name: str, parameter: Tensor) -> bool:
    """Return True if Muon updates the parameter: a matrix that is neither an embedding nor a head."""
    return parameter.ndim == 2 and min(parameter.shape) > 1 and "embed" not in name and "lm_head" not in name


def _decay_groups(named: Named, cfg: OptimConfig) -> list[dict[str, Any]]:
    matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]
    decays = ((matrices, cfg.weight_decay), (vectors, 0.0))
    return [{"params": part, "weight_decay": decay} for held, decay in decays for part in by_mesh(held)]


def _lr(cfg: OptimConfig) -> float:
    if cfg.lr is None:
        raise ConfigError("optim.lr: no learning rate. Set one, or take that of trainer/optim.py")
    return cfg.lr


_make_dtensor: Callable[..., Tensor] = partial(DTensor, requires_grad=False)
"""Not `from_local`, which would copy a tensor to the mesh's device."""


# Learning rates

Task = Literal["rl", "critic", "sft", "dpo", "reward"]

RATES: dict[Task, tuple[float, float, float]] = {
    "rl": (1e-6, 1e-5, 1e-3),
    "critic": (1e-5, 1e-4, 1e-3),
    "sft": (1e-5, 1e-4, 3e-3),
    "dpo": (1e-6, 1e-5, 1e-3),
    "reward": (1e-5, 1e-4, 1e-3),
}
"""AdamW learning rates by task: for all weights, for an adapter, for a randomly initialized model."""
MATRIX = 10.0
"""Muon's learning rate as a multiple of AdamW's, in Jordan's scaling, for an equal step: 0.2 sqrt(width) at widths near 2,500."""
SFT_BETAS, SFT_DECAY = (0.9, 0.95), 0.1
"""Betas of a warm start, and its weight decay with Muon (0 with others)."""


def usual_rate(task: Task, model: ModelConfig) -> float:
    """Return AdamW's default learning rate of a task, by how the model is trained."""
    full, adapter, scratch = RATES[task]
    return scratch if model.init is not None else adapter if model.lora is not None else full


def optim_of(optim: OptimConfig, model: ModelConfig, task: Task = "rl", key: str = "optim.lr") -> OptimConfig:
    """Return [optim] with a learning rate set. Raises ConfigError if the optimizer has no default."""
    if optim.lr is not None:
        return optim
    if optim.name == "sgd":
        raise ConfigError(f'{key}: "sgd" has no usual learning rate. Set one.')
    return optim.model_copy(update={"lr": usual_rate(task, model)})


def critic_optim(optim: OptimConfig, critic: CriticConfig, model: ModelConfig) -> OptimConfig:
    """Return the optimizer config of a critic: [optim] with one learning rate for all weights."""
    return optim_of(optim.model_copy(update={"lr": critic.lr, "matrix_lr": None}), model, "critic", "critic.lr")


def sft_optim(optim: OptimConfig, sft: SftConfig, model: ModelConfig) -> OptimConfig:
    """Return the optimizer config of a warm start: [sft], other settings from [optim]."""
    name = sft.optimizer or ("muon" if sft.matrix_lr is not None else optim.name)
    own = {"name": name, "lr": sft.lr, "matrix_lr": sft.matrix_lr, "betas": SFT_BETAS}
    decay = SFT_DECAY if name == "muon" else 0.0
    return optim_of(optim.model_copy(update={**own, "weight_decay": decay}), model, "sft", "sft.lr")


def optims_of(config: TrainConfig) -> dict[str, OptimConfig]:
    """Return the optimizer configs of a run by section: "optim", "critic", "sft". Raises as `optim_of`."""
    found = {"optim": optim_of(config.optim, config.model, "rl" if config.data is None else config.data.loss)}
    if config.critic is not None:
        found["critic"] = critic_optim(config.optim, config.critic, config.model)
    if config.sft is not None:
        found["sft"] = sft_optim(config.optim, config.sft, config.model)
    return found


# Offloading


class Offloaded:
    """Host copies of tensors for offloading. The host memory is kept for the next time."""

    def __init__(self) -> None:
        # A storage and its bytes on the host: uint8, pinned if they came from a GPU.
        self._held: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self.active = False

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to the host and free their memory; skip those that are offloaded already."""
        storages = {storage._cdata: storage for tensor in tensors if (storage := local(tensor).untyped_storage()).nbytes()}
        fresh: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        for key, storage in storages.items():
            pinned = storage.device.type == "cuda"  # asynchronous copies need pinned memory
            if (known := self._held.get(key)) is None:
                known = storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            fresh[key] = known
            known[1].untyped_storage().copy_(storage, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _ in fresh.values():
            storage.resize_(0)
        # Keep earlier copies only if they are still offloaded, else the copy of a deleted tensor would stay forever.
        self._held = {**self._held, **fresh} if self.active else fresh
        self.active = True
        free_cached()

    def restore(self) -> None:
        """Allocate the device memory again and copy the bytes back."""
        for storage, host in self._held.values():
            storage.resize_(host.numel())
            storage.copy_(host.untyped_storage(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.active = False

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor or, while it is offloaded, a view of its host copy, from which `restore` restores it."""
        part = local(tensor)
        held = self._held.get(part.untyped_storage()._cdata) if self.active else None
        if held is None:
            return tensor
        typed = held[1].view(part.dtype)
        view = typed.as_strided(part.size(), part.stride(), part.storage_offset())
        return _make_dtensor(view, tensor._spec) if isinstance(tensor, DTensor) else view


def free_cached() -> None:
    """Return unused memory of this process's caching allocator to the GPU, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
