"""The actor: the role that holds the policy's weights and trains them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import ClassVar

from tensordict import TensorDict

from agentrl.batch.rows import Ragged
from agentrl.cluster.address import reachable_address
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.cluster.worker import WorkerContext
from agentrl.config.schema import AlgorithmConfig, ModelConfig, OptimConfig, SftConfig, WeightsConfig
from agentrl.errors import AgentrlError, ConfigError, NonFiniteError
from agentrl.train.forward import compute_logprobs
from agentrl.train.minibatch import RowsShard, StepsShard, UpdateShard
from agentrl.train.moving import POLICIES
from agentrl.train.optim import rate
from agentrl.train.pairs import Dpo, pair_step, policy_totals
from agentrl.train.rates import optim_of, sft_optim
from agentrl.train.role import TrainedRole, open_engine
from agentrl.train.sft import sft_rate, sft_steps
from agentrl.train.source import WeightSource
from agentrl.train.update import Gradients, UpdateSettings, add_gradients, check_algorithm, update_policy
from agentrl.train.visits import SOURCE, LogRatios, Visits
from agentrl.weights.bucket import Bucket
from agentrl.weights.route import Offer
from agentrl.weights.target import Adapter


class Actor(TrainedRole):
    """One rank of the policy. All ranks run every method together."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "show": Broadcast(),
        "compute_logprob": RowsShard(),
        "compute_reference": RowsShard(),
        "update": UpdateShard(collect="metrics", balance="column"),
        "visited": Broadcast(),
        "forward_backward": UpdateShard(collect="metrics", balance="column"),
        "optim_step": Broadcast(),
        "drop_gradients": Broadcast(),
        "end_update": Broadcast(),
        "begin_sft": Broadcast(),
        "sft_steps": StepsShard(collect="metrics", balance="column"),
        "end_sft": Broadcast(),
        "supervise": StepsShard(collect="metrics", balance="column"),
        "prefer": StepsShard(collect="metrics", balance="column"),
        "open_route": Broadcast(),
        "route_attached": Broadcast(),
        "next_bucket": Broadcast(),
        "close_route": Broadcast(),
        "export_adapter": Broadcast(),
        "export_hf": Broadcast(),
    }

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._source: WeightSource | None = None
        self._sft: SftConfig | None = None
        self._sft_done = 0
        self._waiting: Gradients | None = None
        self._stepped = False
        self._visits: Visits | None = None

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig, total_steps: int | None = None) -> None:
        """Load the policy from a folder or hub name. `total_steps`: length of the run, for the schedule.

        Raises ModelError for a model that cannot be loaded, ConfigError for a schedule without a length.
        """
        rate(optim.warmup, optim.warmup, optim.schedule, total_steps)  # raises now rather than at the end of the warm-up
        self._optim, self._total_steps = optim_of(optim, model), total_steps
        self._engine = open_engine(self, path, model, optim.max_grad_norm)
        self._engine.use_optimizer(self._optim)

    def show(self, name: str) -> None:
        """Let a reference in this process follow the policy, under `name`."""
        POLICIES[name] = self._made()

    def compute_logprob(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """Ragged `logprobs` and `entropy` of the sampled tokens under the current weights."""
        return compute_logprobs(self._ready(), Ragged.of(batch), temperature, self._optim.micro_tokens, replay=True)

    def compute_reference(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """`compute_logprob` of the frozen base, without the adapter. Raises ConfigError without `model.lora`."""
        engine = self._ready()
        if engine.cfg.lora is None:
            raise ConfigError("compute_reference: all weights are trained, so there is no frozen base (model.lora)")
        with engine.frozen_base():
            return compute_logprobs(engine, Ragged.of(batch), temperature, self._optim.micro_tokens)

    def update(
        self,
        batch: TensorDict,
        algorithm: AlgorithmConfig,
        step: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        kl_coef: float | None = None,
    ) -> dict[str, float]:
        """One training step (`epochs` x minibatches optimizer steps); metrics over all ranks.

        Needs the columns of `collate` and `advantages`; `ref_logprobs` if the loss has a KL term, and `old_logprobs`
        (from `compute_logprob` before the update) if the proximal policy is to be recomputed.
        `temperature` is the rollout's; `kl_coef` replaces `algorithm.kl.coef` (an adaptive coefficient).
        """
        engine = self._ready()
        check_algorithm(algorithm)
        factor = self._set_rate()
        coef = algorithm.kl.coef if kl_coef is None else kl_coef
        # Greedy sampling (temperature 0) has no distribution to train: its logprobs are those at temperature 1.
        settings = UpdateSettings(temperature or 1.0, self._optim.micro_tokens, seed, step, coef)
        self._visits = Visits() if SOURCE in batch.keys() else None  # noqa: SIM118 - `in` of a batch asks for an item
        metrics = update_policy(engine, Ragged.of(batch), algorithm, settings, self._visits)
        self._updates += 1
        return {**metrics, "lr": factor * self._lr}

    def visited(self) -> LogRatios:
        """The log ratios that the last update saw of this rank's rows, if its batch had the column `SOURCE`; once."""
        visits, self._visits = self._visits, None
        return {} if visits is None else visits.taken()

    # -- a training step, piece by piece ---------------------------------------------------------------

    def forward_backward(
        self,
        batch: TensorDict,
        algorithm: AlgorithmConfig,
        step: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        kl_coef: float | None = None,
        part: int = 0,
    ) -> dict[str, float]:
        """The gradients of one minibatch (`part`) of those into which `update` with the same arguments cuts the batch, added to
        those that wait for `optim_step` (`add_gradients`). Returns its metrics; nothing is changed yet."""
        engine = self._ready()
        check_algorithm(algorithm)
        coef = algorithm.kl.coef if kl_coef is None else kl_coef
        settings = UpdateSettings(temperature or 1.0, self._optim.micro_tokens, seed, step, coef)
        given = engine, Ragged.of(batch), algorithm, settings, part, self._waiting
        metrics, self._waiting = add_gradients(*given, first=not self._stepped)
        return metrics

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """One optimizer step with the gradients that wait, clipped as those of `update`; at the rate of the run's schedule, or
        `lr`. `optimizer_steps` is 0 if something was not finite: then weights and optimizer stay as they are.

        Raises AgentrlError without gradients, NonFiniteError if the weights are not finite afterwards.
        """
        if self._waiting is None:
            raise AgentrlError("optim_step: no gradients wait; call forward_backward first")
        engine, waiting = self._ready(), self._waiting
        if lr is None:
            lr = self._set_rate() * self._lr
        else:
            engine.set_rate(lr / self._lr)
        norm = engine.step(waiting.sound)
        self._waiting, self._stepped = None, True
        if not engine.finite():
            raise NonFiniteError("optim_step: the weights are no longer finite; they are neither published nor saved")
        taken = waiting.sound and math.isfinite(norm)
        return {"grad_norm": norm, "lr": lr, "optimizer_steps": float(taken)}

    def drop_gradients(self) -> None:
        """Forget the gradients that wait."""
        optimizers = self._ready().optimizers
        assert optimizers is not None
        optimizers.drop()
        self._waiting = None

    def end_update(self) -> None:
        """The optimizer steps since the last call were one training step, for the schedule."""
        self._updates += self._stepped
        self._stepped = False

    def begin_sft(self, cfg: SftConfig) -> None:
        """Start a supervised phase with its own optimizer."""
        engine = self._ready()
        self._sft, self._sft_done = cfg, 0
        engine.use_optimizer(sft_optim(self._optim, cfg, engine.cfg))

    def sft_steps(self, batch: TensorDict, count: int) -> list[dict[str, float]]:
        """`count` supervised optimizer steps over equal parts of the rows, in order: the metrics of each."""
        if self._sft is None:
            raise AgentrlError("sft_steps: call begin_sft first")
        rate_at = partial(sft_rate, cfg=self._sft)
        metrics = sft_steps(self._ready(), Ragged.of(batch), rate_at, self._sft_done, self._optim.micro_tokens)
        self._sft_done += count
        return metrics

    def end_sft(self, folder: str) -> None:
        """Write the model to `folder` and switch to a fresh optimizer for reinforcement learning."""
        engine = self._ready()
        engine.export(Path(folder))
        self._sft = None
        engine.use_optimizer(self._optim)

    # -- data that is there already --------------------------------------------------------------------

    def supervise(self, batch: TensorDict, count: int) -> dict[str, float]:
        """One supervised optimizer step (`count` is 1), with the optimizer and the schedule of [optim]."""
        [metrics] = sft_steps(self._ready(), Ragged.of(batch), self._rate_at, self._updates, self._optim.micro_tokens)
        self._updates += count
        return {**metrics, "lr": metrics["lr_factor"] * self._lr}

    def prefer(self, batch: TensorDict, count: int, pairs: int, loss: Dpo) -> dict[str, float]:
        """One optimizer step (`count` is 1) of `loss` over the rows of `pairs` pairs: episodes 2 i (chosen) and 2 i + 1 by the
        column `trajectory`, with the row column `reference` (train/pairs.py)."""
        engine, view, factor = self._ready(), Ragged.of(batch), self._set_rate()
        metrics = pair_step(engine, view, self._optim.micro_tokens, pairs, policy_totals, loss)
        self._updates += count
        return {**metrics, "lr": factor * self._lr}

    def open_route(self, route: str, cfg: WeightsConfig, receivers: int, saved: bool = False) -> Offer:
        """Create a channel for weights to `receivers` processes; `saved`: as checkpoints name and cut them. Raises ConfigError
        if this machine cannot serve the route."""
        if self._source is None:
            self._source = WeightSource(self._ready(), self.rank)
        # Asked each time, and not taken from the group's rendezvous: the engine's processes may be on other nodes than the
        # group, and on nodes that joined the cluster later.
        return self._source.open(route, cfg, receivers, reachable_address(), saved)

    def route_attached(self) -> None:
        """Called when all receivers have attached to what `open_route` offered."""
        self._sending().attached()

    def next_bucket(self, first: bool) -> Bucket | None:
        """Send the next bucket of weights, or the `first` one of a new publish; None after the last."""
        return self._sending().send(first)

    def close_route(self) -> None:
        """Free the channel; idempotent."""
        if self._source is not None:
            self._source.close()

    def export_adapter(self) -> Adapter:
        """Only the low-rank adapter, on the host. Raises ConfigError without `model.lora`."""
        engine = self._ready()
        if engine.cfg.lora is None:
            raise ConfigError("export_adapter: the model has no adapter (model.lora)")
        return Adapter(engine.cfg.lora.rank, engine.cfg.lora.alpha, tuple(engine.cfg.lora.modules), engine.adapter())

    def export_hf(self, folder: str) -> None:
        """Write a folder that plain transformers and vLLM can load."""
        self._ready().export(Path(folder))

    def _sending(self) -> WeightSource:
        if self._source is None:
            raise ConfigError("no route for weights is open: call open_route first")
        return self._source
