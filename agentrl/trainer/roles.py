"""Roles that hold a model: their base classes, the reference, the critic, the reward model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from agentrl.cluster.host import own_device
from agentrl.cluster.worker import Broadcast, Strategy, Worker, WorkerContext
from agentrl.config.load import check_unread
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, CriticConfig, ModelConfig, OptimConfig
from agentrl.data.rows import Ragged, build, on_device, row_ids
from agentrl.data.schedule import plan_micro_batches
from agentrl.trainer.algorithms.base import aggregate
from agentrl.trainer.algorithms.losses import value_loss
from agentrl.trainer.language_model import Role
from agentrl.trainer.minibatch import MINIBATCHES, RowsShard
from agentrl.trainer.optim import critic_optim, free_cached, rate
from agentrl.trainer.train_engine import TRAIN_ENGINES, BaseEngine, compute_dtype
from agentrl.trainer.train_state import BackgroundSave, load_state, save_state
from agentrl.trainer.update import Meter, Pack, Steps, compute_logprobs, forward_columns, visit_order
from agentrl.utils.errors import ConfigError
from agentrl.utils.processor import set_cpu_threads

if TYPE_CHECKING:
    from tensordict import TensorDict

# Base classes


def open_engine(worker: Worker, path: str, model: ModelConfig, max_grad_norm: float = 1.0, role: Role = "policy") -> BaseEngine:
    """Open the engine of one rank, with a process group if needed.

    A single rank in float32 needs none if the engine has the trait "alone". Raises ConfigError for an unknown `model.engine`,
    ModelError for a model that cannot be loaded, ResourceError if torch does not find the GPU that Ray assigned to this rank.
    """
    device = own_device()
    worker.threads = None if model.threads == "auto" else model.threads
    set_cpu_threads(worker.threads)
    entry = TRAIN_ENGINES.entry(model.engine)
    if worker.world_size > 1 or compute_dtype(model, device) != torch.float32 or "alone" not in entry.traits:
        worker.init_process_group()
    return entry.make(path, model, max_grad_norm, role, device)


class ModelRole(Worker):
    """One rank of a role that holds a model. All ranks run every method together.

    A role can be offloaded between its calls; the next call brings its model back first.
    """

    dispatch_table: ClassVar[dict[str, Strategy]] = dict.fromkeys(("offload", "onload", "free_cached"), Broadcast())

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: BaseEngine | None = None

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory until the next call."""
        self._ready(onload=False).offload()

    def onload(self) -> None:
        """Move parameters and optimizer state back to the device ahead of the next call; idempotent."""
        self._ready()

    def free_cached(self) -> None:
        """Return unused memory of this process's caching allocator to the device, for other processes."""
        free_cached()

    def _ready(self, onload: bool = True) -> BaseEngine:
        """Return the engine, loaded on its device unless `onload` is False. Raises ConfigError before init_model."""
        if self._engine is None:
            raise ConfigError("this worker has no model yet: call init_model first")
        if onload:
            self._engine.onload()
        return self._engine


class SavedRole(ModelRole):
    """A role with changing weights: it counts its updates, and can be saved and loaded."""

    dispatch_table: ClassVar[dict[str, Strategy]] = dict.fromkeys(("save", "begin_save", "is_saved", "load"), Broadcast())

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._saving = BackgroundSave()
        self._updates = 0

    def save(self, folder: str) -> None:
        """Write model, optimizer, schedule and RNG to `folder`."""
        save_state(self._ready(onload=False), Path(folder), {"updates": self._updates})

    def begin_save(self, folder: str) -> None:
        """Save in the background: returns once the state is copied. `is_saved` reports the end."""
        self._saving.begin(self._ready(onload=False), Path(folder), {"updates": self._updates})

    def is_saved(self) -> bool:
        """Return True if the save that `begin_save` started is complete. Raises its error if it failed."""
        return self._saving.done()

    def load(self, folder: str) -> None:
        """Load the files of `save`, written by any number of ranks. Raises CheckpointError."""
        self._updates = int(load_state(self._ready(onload=False), Path(folder))["updates"])


class TrainedRole(SavedRole):
    """A role that trains, with a learning rate schedule over its training steps."""

    def _open_engine(
        self, path: str, model: ModelConfig, optim: OptimConfig, total_steps: int | None, role: Role = "policy"
    ) -> None:
        """Load the model and create its optimizer. `total_steps`: training steps of the run, for the schedule.

        Raises ModelError for a model that cannot be loaded, ConfigError for a schedule without a length.
        """
        rate(optim.warmup, optim.warmup, optim.schedule, total_steps)  # raises now rather than at the end of the warm-up
        self._optim, self._total_steps = optim, total_steps
        self._engine = open_engine(self, path, model, optim.max_grad_norm, role)
        self._engine.use_optimizer(optim)

    def _set_rate(self, lr: float | None = None) -> float:
        """Set the learning rate of the next training step, by default the schedule's; returns it."""
        assert self._optim.lr is not None  # trainer/optim.py sets it
        peak = self._optim.lr
        share = rate(self._updates, self._optim.warmup, self._optim.schedule, self._total_steps) if lr is None else lr / peak
        self._ready().set_rate(share)
        return share * peak if lr is None else lr


# The moving reference

POLICIES: WeakValueDictionary[str, BaseEngine] = WeakValueDictionary()
"""Policies of this process that a moving reference can follow, by name."""


def check_moving(algorithm: AlgorithmConfig, model: ModelConfig, cluster: ClusterConfig) -> None:
    """Raise ConfigError for a moving reference without KL penalty, with LoRA, offload, or other processes."""
    if algorithm.kl.reference != "moving":
        check_unread("algorithm.kl", algorithm.kl, ("decay",), 'algorithm.kl.reference = "moving"')
        return
    key = 'algorithm.kl.reference = "moving"'
    if algorithm.kl.coef == 0:
        raise ConfigError(f"{key}: with algorithm.kl.coef = 0 there is no reference; set it above 0, or unset the reference")
    if model.lora is not None:
        raise ConfigError(
            f"{key}: with [model.lora] the reference is the actor's own model without its adapter, which does not move; remove "
            'one, or set algorithm.kl.reference = "start"'
        )
    if model.offload != "never":
        raise ConfigError(
            f"{key}: both models must be in their device's memory after an update, and model.offload = "
            f'"{model.offload}" takes them out; unset one'
        )
    pools = {str(role): pool for role, pool in cluster.roles.items()} if cluster.backend == "ray" else {}
    actor, own = pools.get("actor"), pools.get("reference", pools.get("actor"))
    if actor != own:
        raise ConfigError(
            f"{key}: it follows the policy within the actors' processes, and cluster.roles.reference = {own!r} puts it "
            f"elsewhere (cluster.roles.actor = {actor!r}); remove cluster.roles.reference"
        )


# The reference


class Reference(SavedRole):
    """One rank of a policy without gradients: it is frozen, or follows the policy of the same process."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "compute_logprob": RowsShard(),
        "follow": Broadcast(),
    }

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig) -> None:
        """Load the model from a folder or hub name. Raises ModelError."""
        self._engine = open_engine(self, path, model)
        self._engine.freeze()
        self._cap = optim.micro_tokens

    def compute_logprob(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """Compute ragged `logprobs` and `entropy` of the sampled tokens."""
        return compute_logprobs(self._ready(), Ragged.of(batch), temperature, self._cap)

    def follow(self, policy: str, decay: float) -> None:
        """Update the weights: theta_ref <- decay theta_ref + (1 - decay) theta, theta of the actor named `policy` (`Actor.show`).

        Raises ConfigError if that actor is not in this process."""
        engine = POLICIES.get(policy)
        if engine is None:
            raise ConfigError('algorithm.kl.reference = "moving": the policy that it follows is not in the process of this rank')
        self._ready().approach(engine, 1.0 - decay)
        self._updates += 1


# The critic


class Critic(TrainedRole):
    """One rank of the critic. All ranks run every method together."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "compute_values": RowsShard(),
        "update": MINIBATCHES,
    }

    def init_model(
        self, path: str, model: ModelConfig, optim: OptimConfig, critic: CriticConfig, total_steps: int | None = None
    ) -> None:
        """Load the backbone from a folder or hub name; the value head starts at zero. Raises as `_open_engine`."""
        self._open_engine(path, model, critic_optim(optim, critic, model), total_steps, "value")
        self._critic, self._cap = critic, optim.micro_tokens

    def compute_values(self, batch: TensorDict) -> TensorDict:
        """Compute ragged `values` at the sampled tokens, 0 elsewhere."""
        engine = self._ready()
        return forward_columns(engine, Ragged.of(batch), self._cap, ("values",), lambda micro: (engine.values(micro),))

    def update(self, batch: TensorDict, algorithm: AlgorithmConfig, step: int = 0, seed: int = 0) -> dict[str, float]:
        """Run one training step on a batch from `cut_update` with old `values` and `returns`; returns metrics over all ranks.

        The learning rate follows `optim.warmup` and `optim.schedule`, counted in updates of the critic. Denominators are those of
        the policy's update, but tokens that an off-policy correction rejects count too. Raises BrokenWeightsError if the weights
        are not finite afterwards.
        """
        engine, cfg, view = self._ready(), self._critic, Ragged.of(batch)
        lr = self._set_rate()
        micros, counts = plan_micro_batches(view, self._cap, engine), view.batch["counts"]
        meter, steps = Meter(), Steps(engine, view, f"critic update {step}")

        def loss_of(rows: list[int], number: int) -> torch.Tensor:
            packed = Pack(view, rows, engine.device)
            values, returns = engine.values(packed.micro), packed.column("returns")
            loss = value_loss(values, packed.column("values"), returns, cfg.clip)
            # No token is rejected: an off-policy correction is for the ratio of policies, which a value does not have.
            mask = torch.ones(len(values), dtype=torch.bool, device=engine.device)
            offsets, weight = on_device(packed.compact, engine.device), packed.row("episode_tokens")
            total = aggregate(loss, mask, offsets, algorithm.aggregate, counts[number], weight)
            meter.add("loss", total)
            meter.add("value", values)
            meter.add("square_error", (values - returns).square())
            meter.add("square_return", returns.square())
            meter.add("return", returns)
            return total

        for epoch in range(cfg.epochs):
            for number in visit_order(len(micros), epoch, seed, step):
                steps.take(number, micros[number], partial(loss_of, number=number))
        taken = steps.finish()
        self._updates += 1
        if not steps.norms:
            return {"critic/lr": lr}
        sums, _ = meter.totals(engine)
        tokens = max(sum(part.tokens for part in counts) * cfg.epochs, 1.0)
        mean = {name: value / tokens for name, value in sums.items()}
        # The difference is 0 for equal returns, and rounding can make it negative.
        variance = max(mean["square_return"] - mean["return"] ** 2, 1e-12)
        return {
            "critic/loss": sums["loss"] / len(steps.norms),
            "critic/value": mean["value"],
            "critic/explained_variance": 1 - mean["square_error"] / variance,
            **{f"critic/{name}": value for name, value in {**taken, "lr": lr}.items()},
        }


# The reward model


class RewardModel(ModelRole):
    """One rank of a frozen sequence classifier with one label."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"init_model": Broadcast(), "compute_scores": RowsShard()}

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig) -> None:
        """Load the classifier from a folder or hub name. Raises ModelError if it is not a classifier."""
        # Frozen, so without an adapter. Scores at the rows' last tokens are not implemented for tokens split over ranks.
        plain = model.model_copy(update={"lora": None, "sequence_parallel": 1})
        self._engine = open_engine(self, path, plain, role="score")
        self._engine.freeze()
        self._cap = optim.micro_tokens

    @torch.no_grad()
    def compute_scores(self, batch: TensorDict) -> TensorDict:
        """Compute the row column `score` float32 [N], read at each row's last token."""
        engine, view = self._ready(), Ragged.of(batch)
        out = torch.zeros(len(view))
        [micros] = plan_micro_batches(view, self._cap, engine, [np.arange(len(view))])
        for rows in micros:
            scores = engine.scores(Pack(view, rows, engine.device).micro)
            if rows:
                out[torch.tensor(rows)] = scores.cpu()
        return build({"score": out}, len(view))


def with_scores(view: Ragged, scores: torch.Tensor, weight: float) -> tuple[Ragged, float]:
    """Add `weight` times an episode's score to its reward, and to its last sampled token's.

    `scores` [N] are per row; an episode of several rows has the score of that with its last turn. An episode without sampled
    tokens gets no token reward. Returns the batch and the mean score over episodes.
    """
    episode = torch.from_numpy(view.episode)
    count, turns = int(episode.max()) + 1 if len(episode) else 0, view.tokens("turns").long()
    time = turns[view.offsets[1:] - 1] * len(view) + torch.arange(len(view))
    last = torch.zeros(count, dtype=torch.int64).scatter_reduce(0, episode, time, "amax", include_self=False) % len(view)
    added = weight * scores[last].to(torch.float32)
    indices = view.tokens("sampled").nonzero().squeeze(1)
    time = turns[indices] * len(turns) + indices
    spot = torch.full((count,), -1).scatter_reduce(0, episode[row_ids(view.offsets)][indices], time, "amax")
    tokens = view.tokens("rewards").index_add(0, spot[spot >= 0] % len(turns), added[spot >= 0])
    return view.with_rows(reward=view.row("reward") + added[episode]).with_tokens(rewards=tokens), float(scores[last].mean())
