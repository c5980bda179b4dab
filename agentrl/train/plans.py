"""Tensor and expert parallelism by a model's own transformers plans, before FSDP2 shards what is left.

A plan names the modules of a family and how each is split: `base_model_tp_plan` of its config for matrices, `base_model_ep_plan`
for experts. transformers' styles turn parameters into DTensors of the tensor- or expert-parallel mesh (on the meta device: the
loader fills their shards) and exchange activations around a module's forward pass. Two things are done otherwise here:

- Norms between split matrices ("replicated_with_grad_allreduce"): transformers' hook adds the gradient that has come so far over
  the ranks after each backward pass, which counts it again with every further micro-batch. Here each rank's gradient is
  marked as a part of a sum, and FSDP2 adds the parts once.
- The output embedding is split as the plan says, but never runs as a module: see `divided` in train/ulysses.py.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from agentrl.config.schema import ModelConfig
from agentrl.errors import DependencyError

Plan = dict[str, str]
SUMMED = "replicated_with_grad_allreduce"
EXPERTS = "ep_dispatch_experts"
"""The style of experts that stay whole, and get the tokens that chose them."""


def split(model: Any, tp: DeviceMesh | None, ep: DeviceMesh | None) -> list[nn.Module]:
    """Split a transformers model on the meta device by its plans over these meshes; adapters are injected already.
    Returns the modules of experts that each rank has others of. That it fits has been checked (train/plan_checks.py)."""
    tensor, experts = plans_of(model, tp is not None, ep is not None)
    apply_tensor, apply_experts = transformers_split()
    if tp is not None:
        plan = _around_adapters(model, tensor)
        apply_tensor(model, tp, {name: style for name, style in plan.items() if style != SUMMED})
        for module in modules_of(model, [name for name, style in plan.items() if style == SUMMED]):
            _sum_gradients(module, tp)
    if ep is not None:
        apply_experts(model, ep, tp, experts)
    model.tie_weights()  # each name has got a parameter of its own
    dispatched = modules_of(model, [name for name, style in experts.items() if style == EXPERTS])
    for module in dispatched:
        _copy_result(module)
    # One line a process for each kind of exchange that two axes of a mesh make one after the other, as they must here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return dispatched


def plans_of(model: Any, tensor: bool, experts: bool) -> tuple[Plan, Plan]:
    """The tensor-parallel and the expert-parallel plan of a model, by module name with `*` for a layer's number. Experts that the
    second names are not in the first."""
    ep = dict(model.ep_plan) if experts else {}
    tp = dict(model.tp_plan) if tensor else {}
    return {name: style for name, style in tp.items() if not any(name == e or name.startswith(f"{e}.") for e in ep)}, ep


def transformers_split() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from transformers.distributed import tensor_parallel as styles

        return styles.apply_tensor_parallelism, styles.apply_expert_parallelism
    except (ImportError, AttributeError) as error:
        raise DependencyError(
            "model.tensor_parallel and model.expert_parallel need transformers 5.19: pip install 'transformers>=5.19'"
        ) from error


def _generic(name: str) -> str:
    """A module's name with `*` for the number of its layer, as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def modules_of(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if _generic(name) in patterns]


def _around_adapters(model: nn.Module, plan: Plan) -> Plan:
    """The plan of a model with adapters: a layer W x + B A x is split as W is, so B by rows (columns of the output) or A by
    columns; the other matrix is small, and whole on each rank."""
    wrapped = {_generic(name) for name, module in model.named_modules() if hasattr(module, "base_layer")}
    made: Plan = {}
    for name, style in plan.items():
        if name not in wrapped:
            made[name] = style
            continue
        made[f"{name}.base_layer"] = style
        if style == "colwise":
            made[f"{name}.lora_B.default"] = style
        if style == "rowwise":
            made[f"{name}.lora_A.default"] = style
    return made


def _copy_result(module: nn.Module) -> None:
    """Gathered results are views, and a model that adds to one in place would lose the hook by which FSDP2 gathers the weights
    again for the backward pass."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs).clone()


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's parameters whole on each rank, with gradients that are the sum over the mesh: each rank's module sees
    other activations (a norm of each head, for the heads of this rank)."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    forward = module.forward

    def with_local(*args: Any, **kwargs: Any) -> Any:
        held = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        # The dictionary itself, since a Parameter may not be replaced by a Tensor with a history otherwise.
        slots: dict[str, Any] = module._parameters
        slots.update({name: p.to_local(grad_placements=[Partial()]) for name, p in held.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            slots.update(held)

    module.forward = with_local


def dimension_of(plan: Plan, name: str, parameter: Tensor, model: nn.Module) -> int | None:
    """The dimension along which a parameter is split."""
    owner, _, leaf = name.rpartition(".")
    style = plan.get(_generic(owner), "")
    first = isinstance(model.get_submodule(owner), nn.Embedding) != style.startswith("colwise")
    if style in ("", SUMMED) or (leaf == "bias" and style.startswith("rowwise")):
        return None
    return 0 if first or parameter.ndim == 1 else 1


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of a parameter: `shape` after tensor and expert parallelism, of which FSDP2 shards dimension `along`
    over `shards` ranks."""

    shape: tuple[int, ...]
    along: int
    shards: int

    @property
    def whole(self) -> int:
        """Numbers of it while FSDP2 has gathered it."""
        return math.prod(self.shape)

    @property
    def held(self) -> int:
        """Numbers on the rank that holds the most: equal pieces, the last ones shorter."""
        length = self.shape[self.along] if self.shape else 1
        return math.ceil(length / self.shards) * (self.whole // max(length, 1))


def shares(model: Any, cfg: ModelConfig, ranks: int) -> dict[str, Share]:
    """What each rank holds of each parameter of a model on the meta device, adapters included."""
    tensor, experts = plans_of(model, cfg.tensor_parallel > 1, cfg.expert_parallel > 1)
    tensor, size = _around_adapters(model, tensor), cfg.tensor_parallel
    found = {}
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if _generic(name) in experts:
            shape[0] //= cfg.expert_parallel
            shards = ranks // cfg.expert_parallel
            found[name] = Share(tuple(shape), expert_dimension(parameter.shape, cfg.expert_parallel, shards) or 0, shards)
            continue
        dimension = dimension_of(tensor, name, parameter, model)
        if dimension is not None:
            shape[dimension] //= size
        found[name] = Share(tuple(shape), 0, ranks // cfg.replicas // size)
    return found


def expert_dimension(shape: tuple[int, ...], ep: int, shards: int) -> int | None:
    """The dimension along which FSDP2 shards experts over `shards` ranks, each of which has 1 / ep of them. The first if it
    divides, since FSDP2 copies least then; None if no dimension divides."""
    sizes = (shape[0] // ep, *shape[1:])
    return next((place for place, length in enumerate(sizes) if length % shards == 0), None)
