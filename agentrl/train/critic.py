"""The critic: a value function over the states in which the policy chose its tokens."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from tensordict import TensorDict

from agentrl.algorithm import aggregate, value_loss
from agentrl.batch.device import on_device
from agentrl.batch.rows import Ragged
from agentrl.batch.schedule import plan_micro_batches
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.config.schema import AlgorithmConfig, CriticConfig, ModelConfig, OptimConfig
from agentrl.train.engine import BaseEngine
from agentrl.train.forward import compute_values
from agentrl.train.meter import Meter
from agentrl.train.minibatch import RowsShard, UpdateShard, counts_of, minibatches
from agentrl.train.optim import rate
from agentrl.train.rates import critic_optim
from agentrl.train.role import TrainedRole, open_engine
from agentrl.train.update import Pack, Steps, UpdateSettings, visit_order


class Critic(TrainedRole):
    """One rank of the critic. All ranks run every method together."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "compute_values": RowsShard(),
        "update": UpdateShard(collect="metrics", balance="column", policy=False),
    }

    def init_model(
        self, path: str, model: ModelConfig, optim: OptimConfig, critic: CriticConfig, total_steps: int | None = None
    ) -> None:
        """Load the backbone from a folder or hub name; the value head starts at zero. `total_steps`: length of the run
        (for the schedule).

        Raises ModelError for a model that cannot be loaded, ConfigError for a schedule without a length.
        """
        rate(optim.warmup, optim.warmup, optim.schedule, total_steps)
        self._optim, self._total_steps = critic_optim(optim, critic, model), total_steps
        engine = open_engine(self, path, model, optim.max_grad_norm, "value")
        engine.use_optimizer(self._optim)
        self._engine, self._critic, self._cap = engine, critic, optim.micro_tokens

    def compute_values(self, batch: TensorDict) -> TensorDict:
        """Ragged `values` at the sampled tokens, 0 elsewhere."""
        return compute_values(self._ready(), Ragged.of(batch), self._cap)

    def update(self, batch: TensorDict, algorithm: AlgorithmConfig, step: int = 0, seed: int = 0) -> dict[str, float]:
        """One training step on the columns `values` (old) and `returns`; metrics over all ranks.

        The learning rate follows `optim.warmup` and `optim.schedule`, counted in the critic's own updates.
        """
        engine = self._ready()
        factor = self._set_rate()
        settings = UpdateSettings(1.0, self._cap, seed, step)
        metrics = update_critic(engine, Ragged.of(batch), algorithm, self._critic, settings)
        self._updates += 1
        return {**metrics, "critic/lr": factor * self._lr}


def update_critic(
    engine: BaseEngine,
    view: Ragged,
    algorithm: AlgorithmConfig,
    cfg: CriticConfig,
    settings: UpdateSettings,
) -> dict[str, float]:
    """All optimizer steps of one training step; every rank calls it with its own rows.

    Its denominators are those of the policy's update, except that tokens rejected there by an off-policy correction count
    here. Raises NonFiniteError if the weights are not finite afterwards.
    """
    parts, counts = minibatches(view), counts_of(view)
    micros = plan_micro_batches(view, parts, settings.micro_tokens, engine)
    meter, steps = Meter(), Steps(engine, view, f"critic update {settings.step}")

    def loss_of(rows: list[int], number: int) -> torch.Tensor:
        packed = Pack(view, rows, engine.device)
        values = engine.values(packed.micro)
        returns = packed.column("returns")
        loss = value_loss(values, packed.column("values"), returns, cfg.clip)
        # No token is rejected here: an off-policy correction is about the policy's ratio, which a value does not have.
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
        for number in visit_order(len(parts), epoch, settings):
            steps.take(number, micros[number], partial(loss_of, number=number))
    steps.check()
    return _metrics(engine, meter, steps, sum(part.tokens for part in counts) * cfg.epochs)


def _metrics(engine: BaseEngine, meter: Meter, steps: Steps, tokens: float) -> dict[str, float]:
    sums, _ = meter.totals(engine)
    if not steps.norms:
        return {}
    mean = {name: value / max(tokens, 1.0) for name, value in sums.items()}
    # 0 if all returns are equal, and by rounding even less.
    variance = max(mean["square_return"] - mean["return"] ** 2, 1e-12)
    return {
        "critic/loss": sums["loss"] / len(steps.norms),
        "critic/value": mean["value"],
        "critic/explained_variance": 1 - mean["square_error"] / variance,
        **{f"critic/{name}": value for name, value in steps.metrics().items()},
    }
