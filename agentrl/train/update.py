"""The policy update: minibatches -> micro-batches -> losses with global denominators -> optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.algorithm import (
    Denominators,
    LossInput,
    LossOutput,
    aggregate,
    correction,
    kl_estimate,
    policy_loss,
)
from agentrl.algorithm.loss.covariance import picks_of
from agentrl.algorithm.ragged import row_sum
from agentrl.batch.rows import jagged, offsets_of
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.train.engine import BaseEngine
from agentrl.train.micro import Meter, Pack, has, split
from agentrl.train.picks import with_picks


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What an update needs beside batch and algorithm: temperature of the rollout, token cap, seed, step,
    and the coefficient of the KL term in the loss."""

    temperature: float
    micro_tokens: int
    seed: int
    step: int
    kl_coef: float = 0.0


def update_policy(
    engine: BaseEngine, batch: TensorDict, algorithm: AlgorithmConfig, settings: UpdateSettings
) -> dict[str, float]:
    """All optimizer steps of one training step; every rank calls it with its own rows.

    Needs the columns token_ids, sampled, logprobs (of the policy that sampled), advantages, minibatch and
    the batch-wide minibatches. Returns metrics, the same on every rank.
    """
    loss = policy_loss(algorithm.loss.name, algorithm.loss.args)
    batch = with_weights(with_proximal(engine, batch, algorithm, settings), algorithm)
    parts = minibatches(batch)
    picks = picks_of(algorithm.loss.name, algorithm.loss.args)
    if picks is not None:
        batch = with_picks(engine, batch, parts, picks, settings.seed + settings.step)
    micros = split(engine, batch, parts, settings.micro_tokens)
    counts = denominators(engine, batch, parts)
    meter = Meter()
    norms: list[float] = []
    for epoch in range(algorithm.epochs):
        for number in visit_order(len(parts), epoch, settings):
            job = _Job(engine, batch, algorithm, loss, counts[number], settings, meter, first=not norms)
            job.run(micros[number])
            norms.append(engine.step())
    return _metrics(engine, meter, norms, counts, algorithm.epochs)


def minibatches(batch: TensorDict) -> list[np.ndarray]:
    """This rank's rows of each minibatch."""
    number = np.asarray(batch.get("minibatch"))
    return [np.flatnonzero(number == index) for index in range(batch["minibatches"])]


def visit_order(count: int, epoch: int, settings: UpdateSettings) -> list[int]:
    """Minibatches in the order in which an epoch takes them; the first epoch takes them as they are."""
    if epoch == 0:
        return list(range(count))
    order = np.random.default_rng([settings.seed, settings.step, epoch]).permutation(count)
    return [int(number) for number in order]


def denominators(engine: BaseEngine, batch: TensorDict, parts: list[np.ndarray]) -> list[Denominators]:
    """Trained tokens, and rows that hold any, of each minibatch over all ranks: the sampled tokens, less
    those that an off-policy correction rejects (column `weights`, where there is one)."""
    column = batch.get("sampled")
    trained = column.values()
    if has(batch, "weights"):
        trained = trained & (batch.get("weights").values() > 0)
    per_row = row_sum(trained.to(torch.float64), offsets_of(column))
    table = torch.zeros(len(parts), 2, dtype=torch.float64)
    for number, rows in enumerate(parts):
        mine = per_row[torch.from_numpy(rows)]
        table[number, 0], table[number, 1] = mine.sum(), (mine > 0).sum()
    return [Denominators(max(t, 1.0), max(s, 1.0)) for t, s in engine.reduce(table, "sum").tolist()]


def with_proximal(
    engine: BaseEngine, batch: TensorDict, algorithm: AlgorithmConfig, settings: UpdateSettings
) -> TensorDict:
    """The batch with `old_logprobs`: of the policy that sampled, or of the weights before the first step."""
    out: TensorDict = batch.copy()
    if algorithm.proximal == "behaviour":
        return out.update({"old_logprobs": batch.get("logprobs")})
    fresh = compute_logprobs(engine, batch, settings.temperature, settings.micro_tokens)
    return out.update({"old_logprobs": fresh["logprobs"]})


def with_weights(batch: TensorDict, algorithm: AlgorithmConfig) -> TensorDict:
    """The batch with `weights` of the off-policy correction, where there is one."""
    if algorithm.correction is None:
        return batch
    rule = correction(algorithm.correction.name, algorithm.correction.args)
    column = batch.get("sampled")
    offsets = offsets_of(column)
    proximal, behaviour = batch.get("old_logprobs").values(), batch.get("logprobs").values()
    return batch.update({"weights": jagged(rule(proximal, behaviour, column.values(), offsets), offsets)})


@torch.no_grad()
def compute_logprobs(engine: BaseEngine, batch: TensorDict, temperature: float, cap: int) -> TensorDict:
    """`logprobs` and `entropy` of the sampled tokens as ragged float32 columns, 0 elsewhere."""
    column = batch.get("token_ids")
    found = {name: torch.zeros(len(column.values())) for name in ("logprobs", "entropy")}
    [micros] = split(engine, batch, [np.arange(len(batch))], cap)
    offsets = offsets_of(column)
    for rows in micros:
        piece = Pack(batch, rows, engine.device)
        results = engine.logprobs(piece.micro, temperature, True)
        for name, values in zip(found, results, strict=True):
            spread_rows(found[name], piece.spread(values), rows, offsets)
    return TensorDict({n: jagged(values, offsets) for n, values in found.items()}, batch_size=[len(batch)])


def spread_rows(into: torch.Tensor, values: torch.Tensor, rows: list[int], offsets: torch.Tensor) -> None:
    """Write the packed values [T] of `rows` where those rows lie in a flat column."""
    at = 0
    for row in rows:
        start, stop = int(offsets[row]), int(offsets[row + 1])
        into[start:stop] = values[at : at + stop - start]
        at += stop - start


@dataclass(slots=True)
class _Job:
    """One optimizer step's forward and backward passes."""

    engine: BaseEngine
    batch: TensorDict
    algorithm: AlgorithmConfig
    loss: Callable[[LossInput], LossOutput]
    counts: Denominators
    settings: UpdateSettings
    meter: Meter
    first: bool

    def run(self, micros: list[list[int]]) -> None:
        for number, rows in enumerate(micros):
            piece = Pack(self.batch, rows, self.engine.device)
            self.meter.add("plain_tokens", torch.tensor(float(piece.tokens)))
            self.meter.add("computed_tokens", torch.tensor(float(piece.computed)))
            self.engine.backward(self._loss(piece), last=number == len(micros) - 1)

    def _loss(self, piece: Pack) -> torch.Tensor:
        logprobs, entropy = self.engine.logprobs(piece.micro, self.settings.temperature, True)
        weights = piece.column("weights") if has(self.batch, "weights") else torch.ones_like(logprobs)
        given = LossInput(
            logprobs,
            piece.column("old_logprobs"),
            piece.column("logprobs"),
            piece.column("advantages"),
            weights.detach() > 0,
            piece.compact.to(self.engine.device),
            piece.column("picked") if has(self.batch, "picked") else None,
        )
        out = self.loss(given)
        tokens = out.loss * weights.detach()
        if self.algorithm.entropy_bonus:
            tokens = tokens - self.algorithm.entropy_bonus * entropy
        tokens = tokens + self._kl(piece, given)
        total = aggregate(tokens, given.mask, given.offsets, self.algorithm.aggregate, self.counts)
        self._measure(given, out, entropy, total)
        return total

    def _kl(self, piece: Pack, given: LossInput) -> torch.Tensor:
        """The KL term of each token, coefficient included; also measured wherever a reference is there."""
        if not has(self.batch, "ref_logprobs"):
            return torch.zeros_like(given.logprobs)
        kl = self.algorithm.kl
        reference = piece.column("ref_logprobs")
        value = kl_estimate(kl.kind, given.logprobs, reference, kl.straight_through)
        self.meter.add("kl_reference", value[given.mask])
        return self.settings.kl_coef * value if kl.where == "loss" else torch.zeros_like(value)

    def _measure(self, given: LossInput, out: LossOutput, entropy: torch.Tensor, total: torch.Tensor) -> None:
        mask, now = given.mask, given.logprobs.detach()
        distance = kl_estimate("k3", now, given.behaviour_logprobs)[mask]
        self.meter.add("loss", total)
        self.meter.add("entropy", entropy[mask])
        self.meter.add("kl_behaviour", (given.behaviour_logprobs - now)[mask])
        for name, values in out.metrics.items():
            self.meter.add(name, values[mask])
        if self.first:  # no step was taken yet: what differs here is trainer against engine, or staleness
            gap = (now - given.behaviour_logprobs).abs()
            self.meter.add("mismatch_kl", distance)
            self.meter.top("mismatch_max", gap)


def _metrics(
    engine: BaseEngine, meter: Meter, norms: list[float], counts: list[Denominators], epochs: int
) -> dict[str, float]:
    if not norms:
        return {"tokens_trained": 0.0, "minibatches": 0.0}
    sums, tops = meter.totals(engine)
    plain, computed = sums.pop("plain_tokens"), sums.pop("computed_tokens")
    tokens = sum(part.tokens for part in counts)
    first = {"mismatch_kl": counts[0].tokens, "loss": float(len(norms))}
    means = {name: value / first.get(name, tokens * epochs) for name, value in sums.items()}
    return {
        **means,
        **tops,
        "grad_norm": sum(norms) / len(norms),
        "tokens_trained": tokens,
        "rows_trained": sum(part.sequences for part in counts),
        "minibatches": float(len(counts)),
        "prefix_ratio": plain / max(computed, 1.0),
    }


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for a combination that cannot mean what it says."""
    policy_loss(algorithm.loss.name, algorithm.loss.args)
    if algorithm.proximal != "recompute":
        if algorithm.loss.name == "decoupled_ppo":
            raise ConfigError('algorithm.loss "decoupled_ppo" needs algorithm.proximal = "recompute"')
        if algorithm.correction is not None:
            raise ConfigError('algorithm.correction needs algorithm.proximal = "recompute"')
    if algorithm.correction is not None:
        correction(algorithm.correction.name, algorithm.correction.args)
