"""The training engine: what a role needs from a model that is sharded over ranks.

The contract and its registry, the choice of an engine, the use of cards, and the layout of ranks and roles."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.config.schema import AlgorithmConfig, ClusterConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.data.rows import Ragged, offsets_of
from agentrl.data.schedule import trees_of
from agentrl.engines.weights.parameters import Saving
from agentrl.trainer.language_model import Micro, PolicyModule, Role
from agentrl.trainer.memory import RoleMemory
from agentrl.trainer.optim import OPTIMIZERS, Named, Optimizers
from agentrl.trainer.parallel import Ulysses
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Registry

# The contract


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of a forward pass: of each token with the matrices, of each token with each before it (and itself) in attention,
    and of each predicted token with the head; `passes`: as many as forward and backward are together."""

    token: float
    pair: float
    head: float
    passes: int

    def of(self, lengths: Sequence[int], predicted: float) -> float:
        """Operations of forward and backward passes over rows. `predicted`: number of predicted tokens."""
        attention = self.pair * sum(float(n) * float(n) for n in lengths)
        return self.passes * (self.token * float(sum(lengths)) + attention + self.head * predicted)


class BaseEngine(ABC):
    """One rank's part of a sharded causal language model, with its optimizer.

    `cfg`: the config it was made from. `device`: where the caller puts a micro-batch. `optimizers`: None until `use_optimizer`.
    """

    cfg: ModelConfig
    device: torch.device
    optimizers: Optimizers | None = None

    @abstractmethod
    def __init__(
        self, path: str, cfg: ModelConfig, max_grad_norm: float, role: Role = "policy", device: torch.device | None = None
    ) -> None:
        """Load a folder or hub name, each rank its own shards. The process group is open already; without the trait "alone"
        there always is one. `role`: the model's head (logprobs, values or scores).

        Raises ModelError if the model cannot be loaded or is not supported, ConfigError if the ranks cannot be divided as the
        config says.
        """

    @classmethod
    def check(cls, cfg: ModelConfig, ranks: int) -> None:
        """On the driver, before anything is started: raise ConfigError for a config that the engine cannot follow although its
        traits allow each key, DependencyError if a package is missing. `ranks`: of a role."""
        return None

    @classmethod
    def memory(cls, module: nn.Module, cfg: ModelConfig, ranks: int, tokens: int, optims: Sequence[OptimConfig]) -> RoleMemory:
        """For `--dry-run`: bytes of a role on one of its ranks. `module`: trainer/memory.py's `shell` of it, on the meta device;
        `tokens`: of a micro-batch; `optims`: the optimizers that it has, one after the other; none of a role that does not learn.
        Raises ConfigError if the engine does not say, ModelError if the model cannot be counted."""
        raise ConfigError(f'model.engine = "{cfg.engine}" does not count its memory, so --dry-run cannot')

    @property
    def packs(self) -> bool:
        """True if a micro-batch may hold several rows (`model.packing`)."""
        return self.cfg.packing in ("auto", "packed")

    # -- forward and backward --------------------------------------------------------------------------------------

    @abstractmethod
    def logprobs(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """log pi and entropy of the tokens `micro.targets`, float32 [M]; with gradient if grad mode is on. Ranks that share
        rows (model.sequence_parallel, model.tensor_parallel) all get the whole micro-batch and return all M values."""

    def values(self, micro: Micro) -> Tensor:
        """The value before each of the tokens `micro.targets`, float32 [M]; only for a critic's engine."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" computes no values')

    def scores(self, micro: Micro) -> Tensor:
        """The score of each row, float32 [N]; only for a reward model's engine."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" computes no scores')

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`; gradients of all data-parallel ranks are *summed*, at the latest at the `last`
        micro-batch. Ranks that share rows have the same loss, which counts once."""

    # -- parameters and steps --------------------------------------------------------------------------------------

    @abstractmethod
    def named_weights(self) -> Named:
        """Trained parameters by Hugging Face name, as they are on this rank: what an optimizer takes. After the last
        `backward` their `grad` is the summed gradient. A tied output embedding appears once, under the input's name."""

    def use_optimizer(self, cfg: OptimConfig) -> None:
        """A fresh optimizer `cfg.name` over the weights, in place of one that there was; `cfg.lr` is set (trainer/optim.py)."""
        self.optimizers = None  # its memory goes before another's is taken
        self.optimizers = OPTIMIZERS[cfg.name](self.named_weights(), cfg)

    def freeze(self) -> None:
        """Make it a model that is only asked: no parameter has a gradient from now on."""
        for _, parameter in self.named_weights():
            parameter.requires_grad_(False)

    @abstractmethod
    def step(self, sound: bool = True) -> float:
        """Clip by the global norm, step, zero the gradients; returns the norm before clipping, the same on all ranks.

        No step is taken, on any rank, if that norm is not finite or the caller found a loss that is not (`sound` is then
        False, on all ranks): weights and optimizer stay as they are.
        """

    def set_rate(self, factor: float) -> None:
        """Set every learning rate to `factor` times its base."""
        assert self.optimizers is not None
        self.optimizers.set_rate(factor)

    def approach(self, other: BaseEngine, weight: float) -> None:
        """Move every parameter by `weight` of its distance to the same one of `other`, an engine of this class with the same
        model on the same ranks: theta <- theta + weight (theta_other - theta), in float32, each rank its own shards."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" follows no other engine')

    @abstractmethod
    def finite(self) -> bool:
        """Return True if all trained parameters are finite; the same answer on all ranks."""

    @abstractmethod
    def reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """The element-wise sum or maximum over the data-parallel ranks, on the host: ranks that share rows count once."""

    def expert_load(self) -> Tensor | None:
        """Number of choices of each expert in passes with gradient since the last call, float64 [layers, experts] on the host,
        over the ranks that share rows; None for a dense model, and from an engine that does not count."""
        return None

    def flops(self) -> Flops | None:
        """FLOPs of the model, for `gpu/mfu`; None from an engine that does not count."""
        return None

    # -- weights for others ----------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name, one at a time, adapters merged, in the type of the computation: each is invalid
        once the next is requested.

        All ranks must iterate together, or close the iterator. A tied output embedding is left out.
        """

    def resident(self) -> list[Tensor]:
        """Those of `tensors` that are the model's own memory and not made for the stream, if this memory stays where it is; none
        by default. An engine may then read them in place."""
        return []

    @abstractmethod
    def largest(self) -> int:
        """Bytes of the largest of `tensors`."""

    @abstractmethod
    def saving(self) -> Saving:
        """Recipe that turns `tensors` into those of a checkpoint."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write a folder that plain transformers loads."""

    def adapter(self) -> dict[str, Tensor]:
        """Only the adapter's tensors, gathered, float32 on the host, as `Adapter.tensors` (engines/weights/base.py)."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" trains no adapters')

    def frozen_base(self) -> AbstractContextManager[None]:
        """A context in which the model computes without its adapter; for forward passes without gradient."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" trains no adapters')

    # -- memory and state ------------------------------------------------------------------------------------------

    @abstractmethod
    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, pinned if the device is a GPU, and free the device's: between two
        optimizer steps, as gradients are not kept. Until `onload`, only `state` and
        `tensors`, which brings them back, may be called."""

    @abstractmethod
    def onload(self) -> None:
        """Undo `offload`; idempotent."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Model ("model.NAME", by Hugging Face name) and optimizer state by name, sharded as on the ranks: DTensors, so that
        another number of ranks can load what these saved; a load may write into these tensors.

        While the engine is offloaded they are on the host."""


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
        "sft": "takes the steps of a supervised warm start",
        "moving_reference": 'algorithm.kl.reference = "moving": `approach`',
        "prefix_sharing": "computes a prefix that rows share once (PackedSequences.spans)",
        "router_replay": "rollout.router_replay: sends tokens to the experts that a micro-batch names (Micro.experts)",
        "replicas": "model.replicas > 1",
        "sequence_parallel": "model.sequence_parallel > 1",
        "tensor_parallel": "model.tensor_parallel > 1",
        "expert_parallel": "model.expert_parallel > 1",
        "cpu_offload": 'model.offload = "always"',
        "offload": 'model.offload = "idle"',
        "compile": "model.compile",
        "families": "computes transformers' own models, so all findings of train/families hold for it",
        "shard_gradients": "model.shard_gradients = true",
        "activation_checkpointing": "model.activation_checkpointing = true",
        "vision": "trains a model that takes images (Micro.images)",
    },
)


def compute_dtype(cfg: ModelConfig, device: torch.device) -> torch.dtype:
    """Number type in which a model computes on that device: `model.dtype`, or by default bfloat16 on a GPU and float32 on a
    CPU."""
    return torch.float32 if cfg.computes_in(device.type == "cuda") == "float32" else torch.bfloat16


# The engine of a config


def check_train_engine(config: TrainConfig) -> None:
    """Raise ConfigError for an unknown training engine and for what the chosen one cannot do, DependencyError if a package of
    its is missing.
    """
    entry, model = TRAIN_ENGINES.entry(config.model.engine), config.model
    # By trait: what asks for it, in the words of a config, and whether this one does. (A run without a process group asks for
    # "alone", which is given one instead; see trainer/roles.py.)
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
            raise ConfigError(f"{key} = {path}, which is computed as the policy is ([model]): {problem}") from problem


def check_on_host(cfg: ModelConfig) -> None:
    """Raise ConfigError for keys that free a GPU's memory, of a role that has no GPU."""
    if cfg.offload != "never":
        raise ConfigError(f'model.offload = "{cfg.offload}": there is no GPU, so everything is in host memory already; unset it')


# Memory and speed

TERA, GIB = 1e12, 2**30
PEAKS = {
    "A10": 125, "A10G": 70, "A100": 312, "A800": 312, "L4": 121, "L40": 181, "L40S": 362, "H20": 148, "H100": 989.5,
    "H100 NVL": 835, "H100 PCIe": 756, "H200": 989.5, "H800": 989.5, "B200": 2250, "RTX 3090": 71, "RTX 4090": 165.2,
    "RTX 5090": 209.5, "MI300X": 1307,
}  # fmt: skip
"""TFLOP/s of dense products in bfloat16 by their makers' data sheets, by a part of the card's name."""
_OUTSIDE = re.compile(r"embed|lm_head|visual|output\.weight")


def flops_of(module: nn.Module, config: Any) -> Flops | None:
    """FLOPs per token, from a model's matrices and its config; None if the config does not name its heads."""
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
    # A frozen matrix has no gradient of its own: of the two products of the backward pass one is left.
    return Flops(2.0 * matrices, 2.0 * heads * width * layers, head, 3 if trained else 2)


def peak_of(card: str) -> float | None:
    """FLOP/s of dense products in bfloat16 of a card by its name; None if it is not known."""
    names = [name for name in PEAKS if name in card]
    return PEAKS[max(names, key=len)] * TERA if names else None


@dataclass(frozen=True, slots=True)
class Card:
    """The device of a rank: its name, and the most bytes that tensors held on it since the last question."""

    name: str
    peak: int


def card_of(device: torch.device) -> Card | None:
    """Synchronize a device and read its card; None without CUDA. Resets its peak memory."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    found = Card(torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return found


class CardUsage:
    """Usage of the ranks' cards by one role's steps, from its making to `metrics`; for ranks with a card alone."""

    def __init__(self, engine: BaseEngine, view: Ragged) -> None:
        self._engine, self._view, self._model = engine, view, engine.flops()
        self._began, self._tokens, self._flops = time.monotonic(), 0.0, 0.0
        offsets = offsets_of(view.batch["token_ids"])
        self._lengths = offsets.diff().numpy()
        before = np.concatenate([[0], np.cumsum(view.tokens("sampled").numpy())])
        self._predicted = np.diff(before[offsets.numpy()])

    def add(self, micros: list[list[int]]) -> None:
        """Count a forward and a backward pass of these rows."""
        for rows in micros:
            lengths, predicted = self._lengths[rows], self._predicted[rows]
            self._tokens += float(lengths.sum())
            if self._model is not None:
                self._flops += self._model.of(lengths.tolist(), float(predicted.sum()))
            if trees_of(self._view, rows):  # less is computed than the rows have
                self._model = None

    def metrics(self) -> dict[str, float]:
        """Of the ranks' cards: `gpu/memory_gib` of the fullest, `gpu/tokens_per_s` and `gpu/mfu` of each."""
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


# The layout of ranks


@dataclass(frozen=True, slots=True)
class Layout:
    """`fsdp`: the mesh that parameters are sharded over (its last axis; if there are two, the first replicates). `tp`, `experts`:
    the meshes of tensor and expert parallelism ("efsdp" x "ep"), if there are any. `ulysses`: the group that shares tokens;
    `data`: the group that metrics are summed over (None: all ranks)."""

    fsdp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    ulysses: Ulysses | None = None
    data: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, cfg: ModelConfig, device: torch.device, world: int) -> Layout:
        """The layout for a config. Raises ConfigError if its keys do not divide the ranks, or free a GPU's memory where there
        is no GPU."""
        check_divides(cfg, world)
        if device.type == "cpu":
            check_on_host(cfg)
        if not dist.is_initialized():
            return cls()
        kind, tp, sp = device.type, cfg.tensor_parallel, cfg.sequence_parallel
        # Parameters are sharded over ranks that share tokens too: these have the same weights and only compute other tokens.
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
    """Raise ConfigError if a key that divides the ranks does not. `name`: where their number is set, for the message."""
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


# The layout of roles


def mesh_of(model: ModelConfig, cluster: ClusterConfig, ranks: int | None = None) -> dict[str, int]:
    """The ranks of a role as a mesh: the ranks along "sp" get the same rows and share their tokens, those along "tp" (with
    `model.tensor_parallel`) the same tokens.

    `ranks`: their number, for a role with its own pool; by default `cluster.actors`. Raises ConfigError if a key of [model]
    that divides the ranks does not.
    """
    name, ranks = ("cluster.actors", cluster.actors) if ranks is None else ("a pool of processes", ranks)
    check_divides(model, ranks, name)
    share, split = model.sequence_parallel, model.tensor_parallel
    mesh = {"dp": ranks // (share * split), "sp": share}
    return mesh | {"tp": split} if split > 1 else mesh


def separate_reference(model: ModelConfig, algorithm: AlgorithmConfig) -> bool:
    """Return True if the reference of the KL penalty has a model of its own; with adapters it is the actor's frozen base."""
    return algorithm.kl.coef > 0 and model.lora is None


def rests(config: TrainConfig, role: str) -> bool:
    """Return True if a role gives its memory back between its turns: if the config asks for it, and another role, or a
    colocated engine, uses the same processes' devices."""
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
