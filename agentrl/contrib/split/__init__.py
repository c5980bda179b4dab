"""Split models by tensor and expert parallelism, using the plans of transformers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from agentrl.config.schema import ModelConfig
from agentrl.trainer.parallel import SPLITS, Share, SplitCode
from agentrl.utils.errors import ConfigError, DependencyError

Plan = dict[str, str]
SUMMED = "replicated_with_grad_allreduce"
EXPERTS = "ep_dispatch_experts"
"""Plan style in which experts stay whole and tokens are sent to the experts that they chose."""


def split(model: Any, tp: DeviceMesh | None, ep: DeviceMesh | None) -> list[nn.Module]:
    """Split a transformers model over the meshes by its plans. The model is on the meta device, with adapters injected, and
    `check_plans` has accepted it. Returns the modules whose experts differ between ranks."""
    tensor, experts = plans_of(model, tp is not None, ep is not None)
    apply_tensor, apply_experts = transformers_split()
    if tp is not None:
        plan = _around_adapters(model, tensor)
        apply_tensor(model, tp, {name: style for name, style in plan.items() if style != SUMMED})
        for module in modules_of(model, [name for name, style in plan.items() if style == SUMMED]):
            _sum_gradients(module, tp)
    if ep is not None:
        apply_experts(model, ep, tp, experts)
    model.tie_weights()  # splitting gave each name its own parameter
    dispatched = modules_of(model, [name for name, style in experts.items() if style == EXPERTS])
    for module in dispatched:
        _copy_result(module)
    # Silence a warning per process and kind of redistribution over two mesh axes in sequence, which is needed here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return dispatched


def plans_of(model: Any, tensor: bool, experts: bool) -> tuple[Plan, Plan]:
    """Return a model's tensor-parallel and expert-parallel plans, by module name with `*` for a layer's number. The first
    excludes the experts of the second."""
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
    """Return a module's name with `*` for its layer's number, as in plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def modules_of(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if _generic(name) in patterns]


def _around_adapters(model: nn.Module, plan: Plan) -> Plan:
    """Extend a plan to adapters: a layer W x + B A x is split like W, so B by rows (columns of the output) or A by columns; the
    other matrix is small and replicated on each rank."""
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
    """Make a module return copies. Gathered results are views; an in-place addition to one would drop the hook by which FSDP2
    gathers the weights for the backward pass."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs).clone()


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module's parameters on each rank and sum their gradients over the mesh: each rank's module sees different
    activations (for example, a norm per head sees this rank's heads)."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    forward = module.forward

    def with_local(*args: Any, **kwargs: Any) -> Any:
        held = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        # Write to the dictionary: a module refuses to replace a Parameter by a Tensor with a history.
        slots: dict[str, Any] = module._parameters
        slots.update({name: p.to_local(grad_placements=[Partial()]) for name, p in held.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            slots.update(held)

    module.forward = with_local


def dimension_of(plan: Plan, name: str, parameter: Tensor, model: nn.Module) -> int | None:
    """Return the dimension along which a parameter is split, or None."""
    owner, _, leaf = name.rpartition(".")
    style = plan.get(_generic(owner), "")
    first = isinstance(model.get_submodule(owner), nn.Embedding) != style.startswith("colwise")
    if style in ("", SUMMED) or (leaf == "bias" and style.startswith("rowwise")):
        return None
    return 0 if first or parameter.ndim == 1 else 1


def shares(model: Any, cfg: ModelConfig, ranks: int) -> dict[str, Share]:
    """Return each rank's share of each parameter of a model on the meta device, including adapters."""
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
    """Return the dimension along which FSDP2 shards experts: the first that `shards` divides, or None. `shards`: number of ranks
    with the same 1 / ep of the experts. FSDP2 copies least for dimension 0."""
    sizes = (shape[0] // ep, *shape[1:])
    return next((place for place, length in enumerate(sizes) if length % shards == 0), None)


# Checks of a model's plans

STYLES = {"colwise", "rowwise", SUMMED, "embedding_rowwise", "colwise_gather_output", "rowwise_split_input"}
"""Tested styles of tensor-parallel plans."""
EXPERT_FAMILIES = {
    "cohere2_moe", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "hy_v3", "laguna", "mellum", "minimax_m2",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
}  # fmt: skip
"""Families with tested expert parallelism; the test is that of FAMILIES."""
FAMILIES = EXPERT_FAMILIES | {
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_neox", "granite",
    "helium", "hyperclovax", "jais2", "llama", "ministral", "ministral3", "mistral", "nanochat", "olmo", "olmo2", "olmo3",
    "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2", "vaultgemma",
}  # fmt: skip
"""Families whose tensor-parallel logprobs and gradients a test compares with those of one rank. A plan alone may be wrong: that
of apertus does not sum the gradients of its activation parameters over the ranks."""
EXPERT_STYLES = {"grouped_gemm", "ep_dispatch_experts"}
"""Tested styles of expert-parallel plans: experts stay whole, and tokens are sent to the ranks of their experts."""


def check_plans(cfg: ModelConfig, model: Any, ranks: int) -> None:
    """Check that the config can split the model, which is on the meta device. Raises ConfigError if not, DependencyError if
    transformers is too old."""
    transformers_split()
    tensor, experts = plans_of(model, cfg.tensor_parallel > 1, cfg.expert_parallel > 1)
    if cfg.tensor_parallel > 1:
        key, size = f"model.tensor_parallel = {cfg.tensor_parallel}", cfg.tensor_parallel
        text = model.config.get_text_config()
        family = text.model_type
        if not any("layers" in name for name in tensor):
            raise ConfigError(f"{key}: transformers has no tensor-parallel plan for the family {family!r}; set it to 1")
        others = set(tensor.values()) - STYLES
        if "moe_tp_experts" in others:
            raise ConfigError(
                f"{key}: the experts of the family {family!r} keep two matrices in one, whose parts a checkpoint cannot hold if "
                "their rows are split; give each rank whole experts: set model.expert_parallel to 2 or more"
            )
        _check_family(key, family, others, FAMILIES)
        heads = {"attention heads": text.num_attention_heads}
        heads["key heads"] = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        for what, count in heads.items():
            if count % size:
                raise ConfigError(f"{key} does not divide the model's {count} {what}, which are split over the ranks")
        for name, parameter in model.named_parameters():
            dimension = dimension_of(tensor, name, parameter, model)
            if dimension is not None and parameter.shape[dimension] % size:
                raise ConfigError(f"{key} does not divide {name} of shape {tuple(parameter.shape)} along dimension {dimension}")
    if cfg.expert_parallel > 1:
        key, size = f"model.expert_parallel = {cfg.expert_parallel}", cfg.expert_parallel
        family = model.config.get_text_config().model_type
        if not experts:
            raise ConfigError(f"{key}: transformers has no expert-parallel plan for the family {family!r}; set it to 1")
        _check_family(key, family, set(experts.values()) - EXPERT_STYLES, EXPERT_FAMILIES)
        for module in modules_of(model, [name for name, style in experts.items() if style == EXPERTS]):
            for name, parameter in module.named_parameters(recurse=False):
                if len(parameter) % size:
                    raise ConfigError(f"{key} does not divide the model's {len(parameter)} experts")
                if expert_dimension(parameter.shape, size, ranks // size) is None:
                    raise ConfigError(
                        f"{key}: {name} of shape {tuple(parameter.shape)} cannot be sharded over {ranks // size} ranks"
                    )


def _check_family(key: str, family: str, others: set[str], families: set[str]) -> None:
    """Raise ConfigError for a family that is not tested. `others`: untested styles of its plan."""
    if others or family not in families:
        what = f"its plan has {', '.join(sorted(others))}" if others else "no test has shown it to be right"
        raise ConfigError(f"{key} is not supported for the family {family!r}: {what}; families: {', '.join(sorted(families))}")


@SPLITS.register("plans")
def code() -> SplitCode:
    """Return the functions that split models by their plans."""
    return SplitCode(check_plans, split, shares, expert_dimension)
