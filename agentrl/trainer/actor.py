"""The actor: the role that holds and trains the policy's weights; supervised steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor

from agentrl.cluster.machine import reachable_address
from agentrl.cluster.worker import Broadcast, Strategy, WorkerContext
from agentrl.config.schema import AlgorithmConfig, ModelConfig, OptimConfig, SftConfig, WeightsConfig
from agentrl.data.rows import Ragged
from agentrl.data.schedule import plan_micro_batches
from agentrl.engines.weights.base import Adapter, Bucket, Offer, Sender, make_sender
from agentrl.engines.weights.parameters import Saving
from agentrl.trainer.algorithms import policy_loss
from agentrl.trainer.algorithms.base import Denominators
from agentrl.trainer.minibatch import MINIBATCHES, SOURCE, LogRatios, RowsShard, Visits
from agentrl.trainer.optim import optim_of, rate, sft_optim
from agentrl.trainer.roles import POLICIES, TrainedRole
from agentrl.trainer.train_engine import BaseEngine
from agentrl.trainer.update import Meter, MicroLoss, Pack, Steps, compute_logprobs, measured_means, visit_order
from agentrl.utils.errors import AgentrlError, BrokenWeightsError, ConfigError
from agentrl.utils.processor import set_cpu_threads

if TYPE_CHECKING:
    from tensordict import TensorDict

# Supervised steps

FLOOR = 0.1
"""Final fraction of the learning rate: the cosine schedule reaches it at step `sft.min_steps` and keeps it."""


def sft_steps(engine: BaseEngine, view: Ragged, rate_at: Callable[[int], float], first: int, cap: int) -> list[dict[str, float]]:
    """Take one supervised optimizer step per minibatch, on the rows of this rank. Returns the metrics of each step.

    Steps are numbered from `first`; `rate_at(number)` is the factor on the learning rates. The loss of a step is the mean of
    -log pi over its assistant tokens (column `sampled`) on all ranks. `cap`: tokens per micro-batch. Raises BrokenWeightsError if
    the weights are not finite after a step.
    """
    micros = plan_micro_batches(view, cap, engine)
    counts, found = view.batch["counts"], list[dict[str, float]]()
    for number, bins in enumerate(micros):
        meter, step = Meter(), Steps(engine, view, f"supervised steps from {first}")
        engine.set_rate(rate_at(first + number))

        def loss(rows: list[int], tokens: float = max(counts[number].tokens, 1.0), meter: Meter = meter) -> Tensor:
            logprobs, _ = engine.logprobs(Pack(view, rows, engine.device).micro, 1.0, False)
            share = -logprobs.sum() / tokens
            meter.add("loss", share)
            return share

        step.take(number, bins, loss)
        taken = step.finish()
        sums, _ = meter.totals(engine)
        own = {"loss": sums["loss"], "tokens_trained": counts[number].tokens, "lr_factor": rate_at(first + number)}
        found.append(taken | own)
    return found


# The role


@dataclass(frozen=True, slots=True)
class Gradients:
    """Accumulated gradients before their optimizer step: their denominators, and `sound` if all losses were finite."""

    counts: Denominators
    sound: bool


class Actor(TrainedRole):
    """One rank of the policy. All ranks run every method together."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        **dict.fromkeys(("compute_logprob", "compute_reference"), RowsShard()),
        **dict.fromkeys(("update", "forward_backward", "sft_steps"), MINIBATCHES),
        **dict.fromkeys(("init_model", "show", "take_visits", "optim_step", "drop_gradients", "end_update"), Broadcast()),
        **dict.fromkeys(("begin_sft", "end_sft", "open_route", "route_attached", "next_bucket", "close_route"), Broadcast()),
        **dict.fromkeys(("export_adapter", "export_hf"), Broadcast()),
    }

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._sender: Sender | None = None
        self._buckets: Iterator[Bucket | None] = iter(())
        self._recipe: Saving | None = None
        self._sft: SftConfig | None = None
        self._sft_done = 0
        self._pending: Gradients | None = None
        self._stepped = False
        self._visits: Visits | None = None

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig, total_steps: int | None = None) -> None:
        """Load the policy from a folder or hub name. `total_steps`, errors: as for `_open_engine`."""
        self._open_engine(path, model, optim_of(optim, model), total_steps)

    def show(self, name: str) -> None:
        """Register the policy as `name`, for a moving reference in this process."""
        POLICIES[name] = self._ready(onload=False)

    def compute_logprob(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """Compute ragged `logprobs` and `entropy` of the sampled tokens under the current weights."""
        return compute_logprobs(self._ready(), Ragged.of(batch), temperature, self._optim.micro_tokens, replay=True)

    def compute_reference(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """Run `compute_logprob` with the frozen base, without the adapter. Raises ConfigError without `model.lora`."""
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
        """Run one training step: `epochs` x minibatches optimizer steps on this rank's rows of a batch from `cut_update`.

        Returns metrics over all ranks, equal on each. `algorithm`, `step`, `seed`: those of `cut_update`. The batch needs the
        columns of `collate` and `advantages`; `ref_logprobs` for a KL term in the loss; `old_logprobs` (`compute_logprob` before
        the update) for a recomputed proximal policy.
        `temperature`: that of the rollout. `kl_coef` (adaptive) replaces `algorithm.kl.coef`. Raises BrokenWeightsError if the
        weights are not finite afterwards.
        """
        engine, view, lr = self._ready(), Ragged.of(batch), self._set_rate()
        policy, coef = policy_loss(algorithm.loss.name, algorithm.loss.args), algorithm.kl.coef if kl_coef is None else kl_coef
        micros, counts = plan_micro_batches(view, self._optim.micro_tokens, engine), view.batch["counts"]
        meter, steps = Meter(), Steps(engine, view, f"update {step}")
        added = view.batch["added"] if "added" in view else [None] * len(micros)
        job = partial(MicroLoss, engine, view, algorithm, policy, temperature, coef, meter)
        self._visits = [] if SOURCE in view else None
        engine.expert_load()  # resets the counts of earlier passes
        for epoch in range(algorithm.epochs):
            seen = self._visits if epoch == 0 else None
            for at in visit_order(len(micros), epoch, seed, step):
                steps.take(at, micros[at], job(counts[at], not steps.norms, added[at], seen).loss)
        taken = steps.finish()
        self._updates += 1
        if not steps.norms:
            return {"tokens_trained": 0.0, "minibatches": 0.0, "lr": lr}
        found = measured_means(engine, meter, counts)
        # `loss` and `grad_norm` are means over the optimizer steps.
        means = {"loss": found["loss"] / len(steps.norms), "minibatches": float(len(counts)), "lr": lr}
        return {**found, **taken, **means}

    def take_visits(self) -> LogRatios:
        """Return the log ratios of this rank's rows in the last update, and forget them; needs the column SOURCE."""
        visits, self._visits = self._visits or [], None
        out: LogRatios = {}
        for rows, offsets, values in visits:
            by_row = np.split(values.float().cpu().numpy().astype(np.float16), offsets.cpu().numpy()[1:-1])
            out |= dict(zip(rows.cpu().tolist(), by_row, strict=True))
        return out

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
        """Accumulate the gradients of minibatch `part` of a batch from `cut_update`, for `optim_step`. Returns its metrics.

        Several calls accumulate the gradient of their joined batch: means over n1 and over n2 tokens (or episodes) become one
        over n1 + n2. Earlier gradients are scaled by n1 / (n1 + n2), and the new loss is divided by n1 + n2.
        """
        engine, view = self._ready(), Ragged.of(batch)
        policy, coef = policy_loss(algorithm.loss.name, algorithm.loss.args), algorithm.kl.coef if kl_coef is None else kl_coef
        micros = plan_micro_batches(view, self._optim.micro_tokens, engine)[part]
        meter, steps = Meter(), Steps(engine, view, f"update {step}")
        engine.expert_load()  # resets the counts of earlier passes
        own, pending, share = view.batch["counts"][part], self._pending, 1.0
        counts = own
        if pending is not None:
            before = pending.counts
            counts = Denominators(before.tokens + own.tokens, before.episodes + own.episodes, own.length)
            by_token = algorithm.aggregate == "token_mean"
            old, new, whole = (max(c.tokens if by_token else c.episodes, 1.0) for c in (before, own, counts))
            for _, parameter in engine.named_weights():
                if parameter.grad is not None:
                    parameter.grad.mul_(old / whole)
            share = new / whole
        job = MicroLoss(engine, view, algorithm, policy, temperature, coef, meter, counts, not self._stepped)
        sound = steps.backward(part, micros, job.loss)
        self._pending = Gradients(counts, sound and (pending is None or pending.sound))
        metrics = measured_means(engine, meter, (own,))
        # The loss of these rows alone, without earlier calls.
        return {**metrics, "loss": metrics["loss"] / share}

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Take one optimizer step with the accumulated gradients, clipped as in `update`.

        `lr`: learning rate, default: the schedule's. `optimizer_steps` is 0 if the gradient is 0 or not finite; then weights and
        optimizer stay as they are. Raises AgentrlError without gradients, BrokenWeightsError if the weights become infinite.
        """
        if self._pending is None:
            raise AgentrlError("optim_step: no gradients wait; call forward_backward first")
        engine, pending = self._ready(), self._pending
        lr = self._set_rate(lr)
        norm = engine.step(pending.sound)
        self._pending, self._stepped = None, True
        if not engine.finite():
            raise BrokenWeightsError("optim_step: the weights are no longer finite; they are neither published nor saved")
        return {"grad_norm": norm, "lr": lr, "optimizer_steps": float(pending.sound and 0 < norm < math.inf)}

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self._ready(onload=False).drop()
        self._pending = None

    def end_update(self) -> None:
        """Count the optimizer steps since the last call as one training step; drop the gradients."""
        self.drop_gradients()
        self._updates, self._stepped = self._updates + self._stepped, False

    def begin_sft(self, cfg: SftConfig, threads: int | None = None) -> None:
        """Start a supervised phase with its own optimizer and CPU threads."""
        engine = self._ready()
        self._rl_threads, self.threads = self.threads, threads or self.threads
        set_cpu_threads(self.threads)
        self._sft, self._sft_done = cfg, 0
        engine.use_optimizer(sft_optim(self._optim, cfg, engine.cfg))

    def sft_steps(self, batch: TensorDict) -> list[dict[str, float]]:
        """Take the supervised optimizer steps of a batch from `cut_steps`, in order. Returns the metrics of each."""
        if self._sft is None:
            raise AgentrlError("sft_steps: call begin_sft first")
        rate_at = partial(rate, warmup=self._sft.warmup, schedule="cosine", total=self._sft.min_steps, floor=FLOOR)
        metrics = sft_steps(self._ready(), Ragged.of(batch), rate_at, self._sft_done, self._optim.micro_tokens)
        self._sft_done += len(metrics)
        return metrics

    def end_sft(self, folder: str) -> None:
        """Write the model to `folder` and switch to a fresh optimizer for reinforcement learning."""
        engine = self._ready()
        engine.export(Path(folder))
        self._sft, self.threads = None, self._rl_threads
        set_cpu_threads(self.threads)
        engine.use_optimizer(self._optim)

    # -- weights for others ---------------------------------------------------------------------------

    def open_route(self, route: str, cfg: WeightsConfig, receivers: int, saved: bool = False) -> Offer:
        """Open a channel for weights to `receivers` processes and close the earlier one.

        `saved`: send tensors in the format of checkpoints, not of the model's modules. Raises ConfigError if this machine cannot
        serve the route."""
        self.close_route()
        engine = self._ready()
        self._recipe = engine.saving() if saved else None
        largest = engine.largest() if self._recipe is None else self._recipe.largest()
        # Not the address of the group's rendezvous: the engine's processes may be on other nodes, which may have joined later.
        self._sender = sender = make_sender(route, cfg, largest, receivers, reachable_address())
        if self.rank != 0 and not sender.every_rank:
            # The sender's slot size may differ from the requested one, and all ranks must cut the stream alike.
            return Offer(route, sender.slot_bytes, receivers, ())
        sender.lend(engine.resident())
        return sender.open()

    def route_attached(self) -> None:
        """Tell the sender that all receivers have attached to the offer of `open_route`."""
        assert self._sender is not None, "call open_route first"
        if self._sender.slots:  # else it was not opened on this rank
            self._sender.attached()

    def next_bucket(self, first: bool) -> Bucket | None:
        """Send the next bucket of weights; returns None after the last. All ranks call it together.

        `first`: start a new stream, even if the previous one did not end."""
        assert self._sender is not None, "call open_route first"
        if first:
            self._buckets = iter(())  # dropping the old generator reshards its current layer
            held = self._ready(onload=False).tensors()
            self._buckets = self._sender.buckets(held if self._recipe is None else self._recipe.tensors(held))
        # Ranks without buckets reach the end one call before rank 0; further calls return None.
        return next(self._buckets, None)

    def close_route(self) -> None:
        """Close the channel and free its memory; idempotent."""
        self._buckets = iter(())
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def export_adapter(self) -> Adapter:
        """Return the low-rank adapter alone, on the host. Raises ConfigError without `model.lora`."""
        engine = self._ready()
        if engine.cfg.lora is None:
            raise ConfigError("export_adapter: the model has no adapter (model.lora)")
        return Adapter(engine.cfg.lora.rank, engine.cfg.lora.alpha, engine.adapter())

    def export_hf(self, folder: str) -> None:
        """Write the model to a folder that plain transformers and vLLM can load."""
        self._ready().export(Path(folder))
