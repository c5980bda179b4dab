"""The training engine: the interface between roles and a model that is sharded over ranks.

Interface and registry, checks of the choice, GPU usage metrics, and the layout of ranks and roles."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.config.schema import AlgorithmConfig, ClusterConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.data.rows import Ragged, row_counts
from agentrl.data.schedule import trees_of
from agentrl.engines.weights.parameters import Saving
from agentrl.trainer.language_model import Micro, PolicyModule, Role
from agentrl.trainer.memory import RoleMemory
from agentrl.trainer.optim import OPTIMIZERS, Named, Optimizers
from agentrl.trainer.parallel import Ulysses
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Registry

# The interface


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a forward pass per token, per pair of tokens (attention), per predicted token.

    `token`: matrices; `head`: output embedding; `passes`: cost of forward and backward together, in forward passes."""

    token: float
    pair: float
    head: float
    passes: int

    def of(self, lengths: Sequence[int], predicted: float) -> float:
        """Return the FLOPs of forward and backward over rows of these lengths. `predicted`: number of predicted tokens."""
        attention = self.pair * sum(float(n) * float(n) for n in lengths)
        return self.passes * (self.token * float(sum(lengths)) + attention + self.head * predicted)


class BaseEngine(ABC):
    """One rank's shards of a causal language model, with its optimizer.

    `cfg`: its config. `device`: where callers put micro-batches. `optimizers`: None until `use_optimizer`.
    """

    cfg: ModelConfig
    device: torch.device
    optimizers: Optimizers | None = None

    @abstractmethod
    def __init__(
        self, path: str, cfg: ModelConfig, max_grad_norm: float, role: Role = "policy", device: torch.device | None = None
    ) -> None:
        """Load this rank's shards from a folder or hub name. `role`: the model's head (logprobs, values or scores).

        A process group is open already, except for a single process with the trait "alone".

        Raises ModelError if the model cannot be loaded or is not supported, ConfigError if the ranks cannot be divided as the
        config says.
        """

    @classmethod
    def check(cls, cfg: ModelConfig, ranks: int) -> None:
        """Check a config on the driver, before a start. `ranks`: number of ranks of a role.

        Raises ConfigError if the engine does not support it although its traits allow each key, DependencyError for a missing
        package."""
        return None

    @classmethod
    def memory(cls, module: nn.Module, cfg: ModelConfig, ranks: int, tokens: int, optims: Sequence[OptimConfig]) -> RoleMemory:
        """Estimate the bytes of a role on one of its ranks, for `--dry-run`.

        `module`: from `shell` (trainer/memory.py), on the meta device; `tokens`: per micro-batch; `optims`: the role's optimizers
        (used in turn) or none. Raises ConfigError if the engine has no estimate, ModelError if the model cannot be counted."""
        raise ConfigError(f'model.engine = "{cfg.engine}" does not count its memory, so --dry-run cannot')

    @property
    def packs(self) -> bool:
        """True if a micro-batch may hold several rows (`model.packing`)."""
        return self.cfg.packing in ("auto", "packed")

    # -- forward and backward --------------------------------------------------------------------------------------

    @abstractmethod
    def logprobs(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return log pi and entropy of the tokens `micro.targets`: float32 [M] each.

        They have a gradient if grad mode is on. Ranks that share rows (model.sequence_parallel, tensor_parallel) get the whole
        micro-batch and return all M values."""

    def values(self, micro: Micro) -> Tensor:
        """Return the value before each of the tokens `micro.targets`, float32 [M]; only with role "value"."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" computes no values')

    def scores(self, micro: Micro) -> Tensor:
        """Return the score of each row, float32 [N]; only with role "score"."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" computes no scores')

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of `loss`, *summed* over data-parallel ranks at the `last` micro-batch or before.

        Ranks that share rows have the same loss, which counts once."""

    # -- parameters and steps --------------------------------------------------------------------------------------

    @abstractmethod
    def named_weights(self) -> Named:
        """Return the trained parameters of this rank by Hugging Face name, for an optimizer.

        After the last `backward` their `grad` is the summed gradient. A tied output embedding appears once, as the input's."""

    def use_optimizer(self, cfg: OptimConfig) -> None:
        """Create the optimizer `cfg.name` over the weights and drop an earlier one; `cfg.lr` must be set (trainer/optim.py)."""
        self.optimizers = None  # free the old one's memory first
        self.optimizers = OPTIMIZERS[cfg.name](self.named_weights(), cfg)

    def freeze(self) -> None:
        """Turn off the gradients of all parameters, for a model that is only evaluated."""
        for _, parameter in self.named_weights():
            parameter.requires_grad_(False)

    def drop(self) -> None:
        """Drop the gradients without a step, also those of micro-batches without a `last` one."""
        assert self.optimizers is not None
        self.optimizers.drop()

    @abstractmethod
    def step(self, sound: bool = True) -> float:
        """Clip by the global norm, step, drop the gradients; returns the norm before clipping, equal on all ranks.

        `sound`: False, on all ranks, if a loss was not finite. Then, or if the norm is 0 or not finite, no rank steps: weights
        and optimizer stay as they are. (Without a gradient, momentum and decay alone would move the policy.)
        """

    def set_rate(self, factor: float) -> None:
        """Set every learning rate to `factor` times its base."""
        assert self.optimizers is not None
        self.optimizers.set_rate(factor)

    def approach(self, other: BaseEngine, weight: float) -> None:
        """Move the parameters towards those of `other`: theta <- theta + weight (theta_other - theta), in float32.

        `other`: an engine of this class with the same model on the same ranks; each rank moves its shards."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" follows no other engine')

    @abstractmethod
    def finite(self) -> bool:
        """Return True, on all ranks, if all trained parameters of all ranks are finite."""

    @abstractmethod
    def reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """Reduce element-wise over the data-parallel ranks, to the host; ranks that share rows count once."""

    def expert_load(self) -> Tensor | None:
        """Return and reset the routing counts of experts: float64 [layers, experts] on the host.

        They count passes with gradient. Summed over ranks that share rows; None for a dense model, or if the engine does not
        count."""
        return None

    def flops(self) -> Flops | None:
        """Return the FLOPs of the model, for `gpu/mfu`; None if the engine does not count them."""
        return None

    # -- weights for others ----------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by Hugging Face name, adapters merged, in the compute dtype; each is valid until the next.

        All ranks must iterate together, or close the iterator. A tied output embedding is left out.
        """

    def resident(self) -> list[Tensor]:
        """Return the tensors of `tensors` at fixed addresses in the model's memory, readable in place; default: none."""
        return []

    @abstractmethod
    def largest(self) -> int:
        """Return the bytes of the largest tensor of `tensors`."""

    @abstractmethod
    def saving(self) -> Saving:
        """Return the conversion of `tensors` to the tensors of a checkpoint."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the model to a folder that plain transformers loads."""

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter's full tensors, float32 on the host, as in `Adapter.tensors` (engines/weights/base.py)."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" trains no adapters')

    def frozen_base(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes without its adapter, for passes without gradient."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" trains no adapters')

    # -- memory and state ------------------------------------------------------------------------------------------

    @abstractmethod
    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, pinned for a GPU.

        The device memory is freed. Call it between optimizer steps, without gradients. Until `onload`, only `state` and `tensors`
        may be called; `tensors` moves them back."""

    @abstractmethod
    def onload(self) -> None:
        """Undo `offload`; idempotent."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return model and optimizer state by name, as DTensors; on the host while offloaded.

        The model's are "model.NAME" by Hugging Face name. A load writes into these tensors; any number of ranks can load a saved
        state."""


TRAIN_ENGINES: Registry[type[BaseEngine]] = Registry(
    "model.engine",
    "TRAIN_ENGINES",
    "agentrl.trainer",
    given=5,
    traits={
        "alone": "runs in one process without a process group",
        "lora": "trains adapters: `adapter`, `frozen_base`",
        "critic": 'has the role "value": `values`',
        "reward_model": 'has the role "score": `scores`',
        "sft": "trains supervised warm starts",
        "moving_reference": 'algorithm.kl.reference = "moving": `approach`',
        "prefix_sharing": "computes shared prefixes of rows once (PackedSequences.spans)",
        "router_replay": "rollout.router_replay: replays the experts of a micro-batch (Micro.experts)",
        "replicas": "model.replicas > 1",
        "sequence_parallel": "model.sequence_parallel > 1",
        "tensor_parallel": "model.tensor_parallel > 1",
        "expert_parallel": "model.expert_parallel > 1",
        "cpu_offload": 'model.offload = "always"',
        "offload": 'model.offload = "idle"',
        "compile": "model.compile",
        "families": "computes transformers' own models, so the findings of trainer/families.py hold for it",
        "shard_gradients": "model.shard_gradients = true",
        "activation_checkpointing": "model.activation_checkpointing = true",
        "vision": "trains a model that takes images (Micro.images)",
    },
)


def compute_dtype(cfg: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the compute dtype on a device: `model.dtype`, by default bfloat16 on a GPU and float32 on a CPU."""
    return torch.float32 if cfg.computes_in(device.type == "cuda") == "float32" else torch.bfloat16


# Checks of the chosen engine


def check_train_engine(config: TrainConfig) -> None:
    """Raise ConfigError for an unknown engine or unsupported settings, DependencyError for a missing package."""
    entry, model = TRAIN_ENGINES.entry(config.model.engine), config.model
    # By trait: the setting that needs it, and whether the config has this setting. ("alone" is missing: without this trait a
    # run gets a process group; see trainer/roles.py.)
    asked = {
        "lora": ("[model.lora]", model.lora is not None),
        "critic": ("[critic]", config.critic is not None),
        "reward_model": ("[reward_model]", config.reward_model is not None),
        "sft": ("[sft]", config.sft is not None),
        "moving_reference": ('algorithm.kl.reference = "moving"', config.algorithm.kl.reference == "moving"),
        "prefix_sharing": ('optim.prefix_sharing = "on"', config.optim.prefix_sharing == "on"),
        "router_replay": ("rollout.router_replay", config.rollout.router_replay),
        "replicas": ("model.replicas > 1", model.replicas > 1),
        "sequence_parallel": ("model.sequence_parallel > 1", model.sequence_parallel > 1),
        "tensor_parallel": ("model.tensor_parallel > 1", model.tensor_parallel > 1),
        "expert_parallel": ("model.expert_parallel > 1", model.expert_parallel > 1),
        "cpu_offload": ('model.offload = "always"', model.offload == "always"),
        "offload": ('model.offload = "idle"', model.offload == "idle"),
        "compile": ("model.compile", model.compile),
        "families": ('model.packing = "one_row"', model.packing.startswith("one_row")),
        "shard_gradients": ("model.shard_gradients = true", model.shard_gradients is True),
        "activation_checkpointing": ("model.activation_checkpointing = true", model.activation_checkpointing is True),
    }
    for trait, (words, asks) in asked.items():
        if trait not in entry.traits and asks:
            able = TRAIN_ENGINES.that_are(trait)
            raise ConfigError(f'{words}: model.engine = "{entry.name}" does not support it; engines that do: {able}')
    entry.make.check(config.model, config.cluster.actors)
    for key, path in config.other_models().items():
        try:
            entry.make.check(config.model.model_copy(update={"path": path, "init": None}), config.cluster.actors)
        except ConfigError as problem:
            raise ConfigError(f"{key} = {path}, which [model] configures as it does the policy: {problem}") from problem


def check_on_host(cfg: ModelConfig) -> None:
    """Raise ConfigError for keys that free GPU memory, if a role has no GPU."""
    if cfg.offload != "never":
        raise ConfigError(f'model.offload = "{cfg.offload}": there is no GPU, so everything is in host memory already; unset it')


# FLOPs and GPU usage

TERA, GIB = 1e12, 2**30
PEAKS = {
    "A10": 125, "A10G": 70, "A100": 312, "A800": 312, "L4": 121, "L40": 181, "L40S": 362, "H20": 148, "H100": 989.5,
    "H100 NVL": 835, "H100 PCIe": 756, "H200": 989.5, "H800": 989.5, "B200": 2250, "RTX 3090": 71, "RTX 4090": 165.2,
    "RTX 5090": 209.5, "MI300X": 1307,
}  # fmt: skip
"""Peak TFLOP/s of dense bfloat16 products (vendors' data sheets), by a part of the card's name."""
_OUTSIDE = re.compile(r"embed|lm_head|visual|output\.weight")


def flops_of(module: nn.Module, config: Any) -> Flops | None:
    """Compute the FLOPs of a model from its matrices and config; None if the config has no heads or layers."""
    text = config.get_text_config()
    heads, layers = (getattr(text, key, None) for key in ("num_attention_heads", "num_hidden_layers"))
    if not heads or not layers:
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    matrices, trained = 0.0, True
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2 and not _OUTSIDE.search(name):
            matrices += parameter.numel() * (chosen / parameter.shape[0] if parameter.ndim == 3 else 1)
            trained = trained and parameter.requires_grad
    head = 2.0 * text.hidden_size * text.vocab_size if isinstance(module, PolicyModule) else 0.0
    # A frozen matrix needs no gradient, so one of the two products of the backward pass is left.
    return Flops(2.0 * matrices, 2.0 * heads * width * layers, head, 3 if trained else 2)


def peak_of(card: str) -> float | None:
    """Return the peak FLOP/s of a card for dense bfloat16 products; None for an unknown name."""
    names = [name for name in PEAKS if name in card]
    return PEAKS[max(names, key=len)] * TERA if names else None


@dataclass(frozen=True, slots=True)
class Card:
    """A rank's GPU: its name, and the peak bytes of tensors since the last `card_of`."""

    name: str
    peak: int


def card_of(device: torch.device) -> Card | None:
    """Synchronize a device, read its `Card`, and reset its peak memory; None without CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    found = Card(torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return found


class CardUsage:
    """GPU usage of a role's steps, from construction to `metrics`; only for ranks with a GPU."""

    def __init__(self, engine: BaseEngine, view: Ragged) -> None:
        self._engine, self._view, self._model = engine, view, engine.flops()
        self._began, self._tokens, self._flops = time.monotonic(), 0.0, 0.0
        self._lengths = view.lengths
        self._predicted = row_counts(view.tokens("sampled"), view.offsets).numpy()

    def add(self, micros: list[list[int]]) -> None:
        """Count a forward and a backward pass of these rows."""
        for rows in micros:
            lengths, predicted = self._lengths[rows], self._predicted[rows]
            self._tokens += float(lengths.sum())
            if self._model is not None:
                self._flops += self._model.of(lengths.tolist(), float(predicted.sum()))
            if trees_of(self._view, rows):  # shared prefixes: fewer tokens are computed, so the FLOPs are unknown
                self._model = None

    def metrics(self) -> dict[str, float]:
        """Return `gpu/memory_gib` (maximum over GPUs), and per GPU `gpu/tokens_per_s` and, if known, `gpu/mfu`."""
        card = card_of(self._engine.device)
        assert card is not None
        seconds, peak, unknown = self._engine.reduce(
            torch.tensor([time.monotonic() - self._began, card.peak, float(self._model is None)], dtype=torch.float64), "max"
        ).tolist()
        tokens, flops = self._engine.reduce(torch.tensor([self._tokens, self._flops], dtype=torch.float64), "sum").tolist()
        each = seconds * (dist.get_world_size() if dist.is_initialized() else 1)
        found = {"gpu/memory_gib": peak / GIB, "gpu/tokens_per_s": tokens / each}
        most = peak_of(card.name)
        if unknown or most is None or self._engine.cfg.computes_in(True) != "bfloat16":
            return found
        return {**found, "gpu/mfu": flops / each / most}


# Layout of ranks


@dataclass(frozen=True, slots=True)
class Layout:
    """Meshes and groups of the ranks.

    `fsdp`: mesh that shards parameters (last axis; the first of two replicates). `tp`, `experts`: meshes of tensor and expert
    parallelism ("efsdp" x "ep"), or None. `ulysses`: group that shares tokens; `data`: group that sums metrics (None: all)."""

    fsdp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    ulysses: Ulysses | None = None
    data: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, cfg: ModelConfig, device: torch.device, world: int) -> Layout:
        """Create the layout of a config. Raises ConfigError if its keys do not divide the ranks, or need a GPU without one."""
        check_divides(cfg, world)
        if device.type == "cpu":
            check_on_host(cfg)
        if not dist.is_initialized():
            return cls()
        kind, tp, sp = device.type, cfg.tensor_parallel, cfg.sequence_parallel
        # Parameters are also sharded over ranks that share tokens, which have the same weights and compute other tokens.
        axes = {"replicate": cfg.replicas, "shard": world // cfg.replicas // tp, "tp": tp}
        used = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
        dense = init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))
        fsdp = dense["replicate", "shard"] if cfg.replicas > 1 else dense["shard"]
        experts = None
        if cfg.expert_parallel > 1:
            sizes = (world // cfg.expert_parallel, cfg.expert_parallel)
            experts = init_device_mesh(kind, sizes, mesh_dim_names=("efsdp", "ep"))
        mesh_of_tp = dense["tp"] if tp > 1 else None
        if sp * tp == 1:
            return cls(fsdp, mesh_of_tp, experts)
        rows = init_device_mesh(kind, (world // (sp * tp), sp, tp), mesh_dim_names=("dp", "sp", "tp"))
        ulysses = Ulysses(rows.get_group("sp")) if sp > 1 else None
        return cls(fsdp, mesh_of_tp, experts, ulysses, rows.get_group("dp"))


def check_divides(cfg: ModelConfig, ranks: int, name: str = "cluster.actors") -> None:
    """Raise ConfigError if a key of [model] does not divide the number of ranks. `name`: names that number in the message."""
    tp, shared = cfg.tensor_parallel, cfg.sequence_parallel * cfg.tensor_parallel
    parts = {
        f"model.replicas = {cfg.replicas}": cfg.replicas,
        f"model.sequence_parallel = {cfg.sequence_parallel}": cfg.sequence_parallel,
        f"model.tensor_parallel = {tp}": tp,
        f"model.expert_parallel = {cfg.expert_parallel}": cfg.expert_parallel,
        f"model.sequence_parallel x model.tensor_parallel = {shared}": shared,
        f"model.replicas x model.tensor_parallel = {cfg.replicas * tp}": cfg.replicas * tp,
    }
    for words, size in parts.items():
        if ranks % size:
            raise ConfigError(f"{words} does not divide {name} = {ranks}")


# Layout of roles


def mesh_of(model: ModelConfig, cluster: ClusterConfig, ranks: int | None = None) -> dict[str, int]:
    """Return the mesh of a role's ranks: size by axis "dp", "sp" and, with `model.tensor_parallel`, "tp".

    Ranks along "sp" get the same rows and share their tokens, those along "tp" the same tokens. `ranks`: for a role with its own
    pool; default `cluster.actors`. Raises ConfigError if a key of [model] does not divide them.
    """
    name, ranks = ("cluster.actors", cluster.actors) if ranks is None else ("a pool of processes", ranks)
    check_divides(model, ranks, name)
    share, split = model.sequence_parallel, model.tensor_parallel
    mesh = {"dp": ranks // (share * split), "sp": share}
    return mesh | {"tp": split} if split > 1 else mesh


def separate_reference(model: ModelConfig, algorithm: AlgorithmConfig) -> bool:
    """Return True if the KL penalty needs a separate reference model; with adapters it uses the actor's frozen base."""
    return algorithm.kl.coef > 0 and model.lora is None


def offloads_when_idle(config: TrainConfig, role: str) -> bool:
    """Return True if a role is offloaded between its calls: `model.offload` is "idle" and its devices are shared."""
    if config.model.offload != "idle":
        return False
    pools = {str(name): pool for name, pool in config.cluster.roles.items()} if config.cluster.backend == "ray" else {}
    present = {
        "actor": True,
        "rollout": config.rollout.colocate,
        "reference": separate_reference(config.model, config.algorithm),
        "critic": config.critic is not None,
        "reward_model": config.reward_model is not None,
        "teacher": config.algorithm.distillation is not None,
    }
    homes = {name: pools.get(name, pools.get("actor")) for name, used in present.items() if used}
    return any(home == homes[role] for name, home in homes.items() if name != role)
