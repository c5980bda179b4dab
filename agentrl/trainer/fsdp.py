"""The FSDP2 engine: a transformers model, sharded layer by layer over the data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.data.expert_routing import ROUTERS, TOPK, router_code
from agentrl.engines.weights.parameters import Saving
from agentrl.render.modality import Modality, make_modality
from agentrl.trainer.attention import PACKED, keep_rows_apart, register_packed_attention
from agentrl.trainer.language_model import MODULES, Micro, PolicyModule, Role, backbone, layers_of, share_tokens
from agentrl.trainer.layers import adapter_of, compile_layers, compiled_head, inject, merge_adapters
from agentrl.trainer.memory import RoleMemory, by_size, count
from agentrl.trainer.model_folder import Loader, save_model
from agentrl.trainer.optim import Offloaded, by_mesh, local
from agentrl.trainer.parallel import Ulysses, recompute_layout, split_code
from agentrl.trainer.pretrained import empty_model, load_model_config, meta_model
from agentrl.trainer.train_engine import TRAIN_ENGINES, BaseEngine, Flops, Layout, check_divides, compute_dtype, flops_of
from agentrl.utils.errors import AgentrlError, ConfigError, ModelError

# Without a process group (one process) the model stays a plain module. Gradients are summed over ranks, never averaged: losses
# have global denominators, so the result does not depend on the distribution of rows over ranks and micro-batches.

PREFIX = "hf."


@TRAIN_ENGINES.register("fsdp2", traits=TRAIN_ENGINES.words["traits"])  # all traits
class FsdpEngine(BaseEngine):
    """One rank's shards of the model, with FSDP2."""

    routing: Any = None
    modality: Modality | None = None
    classifier: bool = False
    _gathers: bool
    """True if other ranks hold shards of the weights."""
    _left_out: set[str]
    """Names of duplicate tensors of the module: a tied output embedding."""

    def __init__(
        self, path: str, cfg: ModelConfig, max_grad_norm: float, role: Role = "policy", device: torch.device | None = None
    ) -> None:
        """Load the model and shard it. With bfloat16, master weights and the reduction of gradients are float32.

        Raises ModelError if the model cannot be loaded or is not supported, or for bfloat16 without a process group; ConfigError
        if the ranks cannot be divided as configured.
        """
        register_packed_attention()  # also for its process-wide settings
        self.path, self.cfg, self.max_grad_norm, self.classifier = path, cfg, max_grad_norm, role == "score"
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.compute_dtype = compute_dtype(cfg, self.device)
        self.sharded = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if self.sharded else 1
        self._gathers = world > 1
        self.layout = Layout.of(cfg, self.device, world)
        if not self.sharded and self.compute_dtype != torch.float32:
            raise ModelError('model.dtype = "bfloat16" needs a process group: cluster.backend = "ray"')
        self._build(role, world)
        self.module.train()
        self.optimizers, self._offloaded, self.buffers = None, Offloaded(), dict(self.module.named_buffers())
        self.shards_gradients = by_size(cfg.shard_gradients, sum(p.numel() for _, p in self.named_weights()))

    def _build(self, role: Role, world: int) -> None:
        """Load the model into `module`, sharded over `world` ranks. Sets what depends on the model."""
        path, cfg = self.path, self.cfg
        config = load_model_config(path, cfg.trust_remote_code)
        kinds = config.architectures or []
        if self.classifier and not any("SequenceClassification" in kind for kind in kinds):
            raise ModelError(f"{path}: expected a sequence classifier, found {', '.join(kinds) or 'no architecture'}")
        # One row per pass needs no row boundaries, so transformers' own attention is used.
        own = {"attn_implementation": "eager"} if cfg.packing == "one_row_eager" else {}
        attention = {"attn_implementation": PACKED} if self.packs else own
        model = empty_model(path, config, classifier=self.classifier, **attention)
        self.modality = make_modality(path, model.config)
        if self.modality is not None:
            self.modality.freeze(model)
        loader = Loader(path, model)  # before the names change
        self.config = model.config
        text = model.config.get_text_config()
        tied = bool(getattr(text, "tie_word_embeddings", model.config.tie_word_embeddings))
        self._left_out = {f"{PREFIX}lm_head.weight"} if tied else set()
        if cfg.tensor_parallel * cfg.expert_parallel > 1:
            split_code().check(cfg, model, world)
        if not cfg.compile:  # compiled layers include their routers
            self.routing = router_code().trained(model, self.layout.ulysses) if TOPK in ROUTERS else None
        self.checkpoints = by_size(cfg.activation_checkpointing, sum(p.numel() for p in model.parameters()))
        if self.checkpoints:
            # Reentrant checkpointing computes no gradient if no input of a layer needs one, as with adapters on frozen weights.
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_layout})
        if cfg.lora is not None:
            # Before sharding: FSDP2 shards the parameters that a layer has at that time.
            inject(model, cfg.lora)
        if self.packs:
            keep_rows_apart(backbone(model))
        self.module: nn.Module = MODULES[role](model)
        self._experts = []
        if cfg.tensor_parallel * cfg.expert_parallel > 1:
            experts = self.layout.experts
            self._experts = split_code().split(model, self.layout.tp, None if experts is None else experts["ep"])
        if self.layout.tp is not None and isinstance(self.module, PolicyModule):
            self.module.tensor = Ulysses(self.layout.tp.get_group())
        if cfg.compile:
            compile_layers(layers_of(self.module))
            if isinstance(self.module, PolicyModule):
                self.module.kernels = compiled_head()
        if self.sharded:
            self._shard()
        loader.fill(self.module, self.device, torch.device("cpu") if cfg.offload == "always" and self.sharded else None)

    def _shard(self) -> None:
        # Reduced in float32: a bfloat16 sum over many ranks would lose small gradients.
        policy = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        if self.compute_dtype == torch.float32:
            policy = MixedPrecisionPolicy()
        options: dict[str, Any] = {"mp_policy": policy, "mesh": self.layout.fsdp}
        if self.cfg.offload == "always":
            options["offload_policy"] = CPUOffloadPolicy()

        def expert_shards(parameter: nn.Parameter) -> Shard | None:
            assert self.layout.experts is not None
            shards = self.layout.experts["efsdp"].size()
            place = split_code().expert_dimension(parameter.shape, self.cfg.expert_parallel, shards)
            return None if place is None else Shard(place)

        # Layers first; the call for the root shards the rest (embeddings, head, last norm). The root alone would be gathered as
        # a whole.
        for experts in self._experts:
            assert self.layout.experts is not None
            others: dict[str, Any] = {**options, "mesh": self.layout.experts["efsdp"]}
            fully_shard(experts, **others, shard_placement_fn=expert_shards)
        for layer in layers_of(self.module):
            fully_shard(layer, **options)
        fully_shard(self.module, **options)
        for part in self._parts():
            # Sums instead of means need both: gloo does not support a reduce with the divide factor alone.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        return [(self.hf_name(n), p) for n, p in self.module.named_parameters() if p.requires_grad]

    def hf_name(self, name: str) -> str:
        """Return the Hugging Face name of the module's tensor `name`."""
        return name.removeprefix(PREFIX)

    def logprobs(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        if self.modality is not None:
            micro = replace(micro, inputs=self.modality.inputs(micro.input_ids, micro.images))
        if self.routing is None and micro.experts is not None:
            raise ModelError("a model without routers cannot repeat choices of experts; set rollout.router_replay = false")
        with nullcontext() if self.routing is None else self.routing.passing(micro):
            if self.layout.ulysses is not None:
                micro = share_tokens(micro, self.layout.ulysses)
            out: tuple[Tensor, Tensor] = self.module(micro, temperature, entropy)
        return out

    def flops(self) -> Flops | None:
        return flops_of(self.module, self.config)

    def expert_load(self) -> Tensor | None:
        return None if self.routing is None else self.routing.take_load()

    def values(self, micro: Micro) -> Tensor:
        if self.layout.ulysses is not None:
            micro = share_tokens(micro, self.layout.ulysses)
        out: Tensor = self.module(micro)
        return out

    def scores(self, micro: Micro) -> Tensor:
        out: Tensor = self.module(micro)
        return out

    def backward(self, loss: Tensor, last: bool) -> None:
        if isinstance(self.module, FSDPModule):
            # One reduction per optimizer step instead of per micro-batch: unsharded gradients accumulate until the last. Replicas
            # are always summed once, at the last: until then they hold shards.
            self.module.set_requires_gradient_sync(last or self.shards_gradients)
            self.module.set_requires_all_reduce(last)
            self.module.set_is_last_backward(last)
        torch.autograd.backward(loss)

    def drop(self) -> None:
        super().drop()
        # Until a reduction, FSDP2 keeps gradients with the unsharded parameters, for which torch has no public name.
        for group in filter(None, (part._get_fsdp_state()._fsdp_param_group for part in self._parts())):
            group._partial_reduce_output = None
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):  # from the first pass on
                    held._unsharded_param.grad = None

    def step(self, sound: bool = True) -> float:
        assert self.optimizers is not None
        # By mesh, because an operation takes tensors of one mesh only.
        meshes = by_mesh([p for p in self.module.parameters() if p.grad is not None])
        norms = [full_tensor(torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])) for part in meshes]
        # The norm over the shards of all ranks, so that all ranks decide alike below.
        size = math.hypot(*map(float, norms))
        # A non-finite norm spoils the gradients, which are then dropped below.
        for part in meshes:
            torch.nn.utils.clip_grads_with_norm_(part, self.max_grad_norm, torch.tensor(size))
        if sound and 0 < size < math.inf:
            self.optimizers.step()
        else:
            self.optimizers.drop()
        return size

    def approach(self, other: BaseEngine, weight: float) -> None:
        assert isinstance(other, FsdpEngine)
        for part in (*self._parts(), *other._parts()):
            part.reshard()  # a forward pass without backward may have left an unsharded copy, which the shards do not update
        for mine, theirs in zip(self.module.parameters(), other.module.parameters(), strict=True):
            local(mine).detach().lerp_(local(theirs).detach(), weight)

    def finite(self) -> bool:
        # The norm shows any NaN or infinity, without a mask of the size of the weights.
        size = torch.nn.utils.get_total_norm([local(p).detach() for p in self.module.parameters() if p.requires_grad])
        broken = torch.logical_not(torch.isfinite(size)).to(self.device, torch.float32)
        if self.sharded:  # over all ranks, not only the data-parallel ones: each has different shards
            dist.all_reduce(broken, dist.ReduceOp.MAX)
        return not bool(broken)

    def reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        # Over the data axis alone: the equal values of ranks that share tokens would count once per rank.
        if not self.sharded or dist.get_world_size(self.layout.data) == 1:
            return values
        # NCCL only reduces tensors on a GPU; callers keep theirs on the host.
        moved = values.to(self.device)
        dist.all_reduce(moved, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, self.layout.data)
        return moved.cpu()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.onload()
        if self.cfg.lora is not None:
            for name, full in self._weights_with_adapters():
                yield self.hf_name(name), self._cast(name, full)
            return
        # Gathered by part (a layer, or the parameters outside of all layers): at most one part is unsharded.
        seen = set(self._left_out)
        parts: list[tuple[str, Any]] = [(n, part) for n, part in self.module.named_modules() if isinstance(part, FSDPModule)]
        for prefix, part in parts if self._gathers else []:
            part.reshard()  # a forward pass without backward may have left it unsharded, with older weights
            part.unshard()
            try:
                for name, parameter in part.named_parameters(prefix):
                    # A parameter of a nested part is still sharded here, and yielded with that part. After tensor or expert
                    # parallelism alone it is a DTensor too.
                    axes = set(parameter.device_mesh.mesh_dim_names or ("",)) if isinstance(parameter, DTensor) else set()
                    if name not in seen and axes <= {"tp", "ep"}:
                        seen.add(name)
                        yield self.hf_name(name), self._cast(name, full_tensor(parameter))
            finally:
                part.reshard()
        # Buffers, and tensors that no part has yielded: on a single rank, which holds full weights, all of them.
        for name, tensor in self.module.state_dict().items():
            if name not in seen:
                yield self.hf_name(name), self._cast(name, full_tensor(tensor) if self._gathers else local(tensor))

    def resident(self) -> list[Tensor]:
        if self._gathers or self.cfg.lora is not None or self.cfg.offload == "idle":
            return []
        return [local(tensor) for _, tensor in self.named_weights() if tensor.dtype == self.compute_dtype]

    @contextmanager
    def frozen_base(self) -> Iterator[None]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [layer for layer in self.module.modules() if isinstance(layer, BaseTunerLayer)]
        # Not peft's `enable_adapters`, which also switches `requires_grad` of sharded, trained parameters.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    @classmethod
    def check(cls, cfg: ModelConfig, ranks: int) -> None:
        parallel = cfg.tensor_parallel * cfg.expert_parallel > 1
        for key, given in (("compile = true", cfg.compile), ('offload = "always"', cfg.offload == "always")):
            if parallel and given:
                raise ConfigError(f"model.{key} does not work with model.tensor_parallel or model.expert_parallel")
        if cfg.replicas > 1 and cfg.expert_parallel > 1:
            raise ConfigError("model.replicas does not work with model.expert_parallel, which has a mesh of its own for experts")
        if parallel:
            check_divides(cfg, ranks)
            split_code().check(cfg, meta_model(cfg), ranks)

    @classmethod
    def memory(cls, module: nn.Module, cfg: ModelConfig, ranks: int, tokens: int, optims: Sequence[OptimConfig]) -> RoleMemory:
        return count(module, cfg, ranks, tokens, optims)

    def adapter(self) -> dict[str, Tensor]:
        held = {name.removeprefix(PREFIX): tensor for name, tensor in self.module.state_dict().items()}
        return adapter_of(held, lambda name: full_tensor(held[name]).detach().to("cpu", copy=True))

    def largest(self) -> int:
        # The numel of a DTensor is that of the full tensor, which one bucket has to hold.
        counts: list[int] = [tensor.numel() for tensor in self.module.state_dict().values()]
        return max(counts) * self.compute_dtype.itemsize

    def saving(self) -> Saving:
        return Saving(empty_model(self.path, self.config, dtype=self.compute_dtype, attn_implementation="eager"))

    def _weights_with_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with adapters added in float32, one tensor at a time."""
        held = {name: tensor for name, tensor in self.module.state_dict().items() if name not in self._left_out}
        assert self.cfg.lora is not None
        return merge_adapters(held, lambda name: full_tensor(held[name]), self.cfg.lora)

    def offload(self) -> None:
        if any(parameter.grad is not None for parameter in self.module.parameters()):
            raise AgentrlError("offload: gradients wait for an optimizer step. Call optim_step or drop_gradients first")
        for part in self._parts():
            part.reshard()  # a forward pass without backward leaves the outermost part unsharded
        optimizer = [] if self.optimizers is None else self.optimizers.tensors()
        self._offloaded.offload([*self.module.parameters(), *optimizer])

    def onload(self) -> None:
        if self._offloaded.active:
            self._offloaded.restore()

    def state(self) -> dict[str, Tensor]:
        held = self.module.state_dict()
        found = {f"model.{self.hf_name(name)}": held[name] for name in held if name not in self._left_out}
        optimizer = {} if self.optimizers is None else self.optimizers.state()
        if self._offloaded.active:  # `state` may just have created tensors on the device
            self._offloaded.offload(optimizer.values())
        found |= {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
        return {name: self._offloaded.view_of(tensor) for name, tensor in found.items()}

    def export(self, folder: Path) -> None:
        # Like `tensors`, but gathered one by one: slower, with at most one tensor unsharded.
        self.onload()
        held = self.module.state_dict()
        found = ((name, full_tensor(self._cast(name, held[name]))) for name in held if name not in self._left_out)
        weights = found if self.cfg.lora is None else self._weights_with_adapters()
        tensors = ((self.hf_name(name), self._cast(name, full)) for name, full in weights)
        try:
            if not self.sharded or dist.get_rank() == 0:
                model: dict[str, Any] = {"trust": self.cfg.trust_remote_code, "chat_template": self.cfg.chat_template}
                save_model(self.path, self.config, tensors, self.compute_dtype, folder, classifier=self.classifier, **model)
        finally:
            for _ in tensors:  # all ranks take part in gathering, also rank 0 after an error: else the others would hang
                pass

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """Cast a weight to the compute dtype. Buffers keep theirs: a router's bias in bfloat16 would choose other experts."""
        plain = name in self.buffers or not tensor.is_floating_point()
        return tensor.detach().to(tensor.dtype if plain else self.compute_dtype)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; a collective if it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
