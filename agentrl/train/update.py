"""The policy update: minibatches -> micro-batches -> losses with global denominators -> optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.algorithm import (
    POLICY_LOSSES,
    Denominators,
    LossInput,
    LossOutput,
    aggregate,
    correction,
    kl_estimate,
    policy_loss,
)
from agentrl.algorithm.correction import CORRECTIONS
from agentrl.batch.rows import jagged, offsets_of
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.train.engine import BaseEngine
from agentrl.train.kl import check_kl, kl_kind
from agentrl.train.micro import Meter, Pack, has, split
from agentrl.train.plan import norm_length
from agentrl.train.steps import Steps


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

    Needs the columns that `UpdateShard` leaves in a batch: token_ids, sampled, logprobs (of the policy that sampled),
    advantages, minibatch, episode_tokens, where they are asked for old_logprobs (of the proximal policy), weights, picked and
    ref_logprobs, and the batch-wide counts. A minibatch of which no row is left still takes its optimizer step, with
    a gradient of zero. Returns metrics, the same on every rank. Raises NonFiniteError where the weights are not finite
    afterwards.
    """
    loss = policy_loss(algorithm.loss.name, algorithm.loss.args)
    parts, counts = minibatches(batch), counts_of(batch)
    micros = split(engine, batch, parts, settings.micro_tokens)
    meter, steps = Meter(), Steps(engine, batch, f"update {settings.step}")
    for epoch in range(algorithm.epochs):
        for number in visit_order(len(parts), epoch, settings):
            job = _Job(engine, batch, algorithm, loss, counts[number], settings, meter, first=not steps.norms)
            steps.take(number, micros[number], job.loss)
    steps.check()
    return _metrics(engine, meter, steps, counts)


def minibatches(batch: TensorDict) -> list[np.ndarray]:
    """This rank's rows of each minibatch."""
    number = np.asarray(batch.get("minibatch"))
    return [np.flatnonzero(number == index) for index in range(len(counts_of(batch)))]


def counts_of(batch: TensorDict) -> tuple[Denominators, ...]:
    """The denominators of each minibatch, over all ranks and all rows, those that were left out included."""
    found: tuple[Denominators, ...] = batch["counts"]
    return found


def visit_order(count: int, epoch: int, settings: UpdateSettings) -> list[int]:
    """Minibatches in the order in which an epoch takes them; the first epoch takes them as they are."""
    if epoch == 0:
        return list(range(count))
    order = np.random.default_rng([settings.seed, settings.step, epoch]).permutation(count)
    return [int(number) for number in order]


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
    """The losses of one optimizer step's micro-batches."""

    engine: BaseEngine
    batch: TensorDict
    algorithm: AlgorithmConfig
    policy: Callable[[LossInput], LossOutput]
    counts: Denominators
    settings: UpdateSettings
    meter: Meter
    first: bool

    def loss(self, rows: list[int]) -> torch.Tensor:
        """This micro-batch's share of the step's loss."""
        piece = Pack(self.batch, rows, self.engine.device)
        logprobs, entropy = self.engine.logprobs(piece.micro, self.settings.temperature, True)
        weights = piece.column("weights") if has(self.batch, "weights") else torch.ones_like(logprobs)
        given = LossInput(
            logprobs,
            piece.column("old_logprobs" if has(self.batch, "old_logprobs") else "logprobs"),
            piece.column("logprobs"),
            piece.column("advantages"),
            weights.detach() > 0,
            piece.compact.to(self.engine.device),
            piece.column("picked") if has(self.batch, "picked") else None,
        )
        out = self.policy(given)
        tokens = out.loss * weights.detach()
        if self.algorithm.entropy_bonus:
            tokens = tokens - self.algorithm.entropy_bonus * entropy
        tokens = tokens + self._kl(piece, given)
        total = aggregate(tokens, given.mask, given.offsets, self.algorithm.aggregate, self.counts, piece.row("episode_tokens"))
        self._measure(piece, given, out, entropy, total)
        return total

    def _kl(self, piece: Pack, given: LossInput) -> torch.Tensor:
        """The KL term of each token, coefficient included; also measured wherever a reference is there."""
        if not has(self.batch, "ref_logprobs"):
            return torch.zeros_like(given.logprobs)
        kl = self.algorithm.kl
        value = kl_estimate(kl_kind(kl), given.logprobs, piece.column("ref_logprobs"), kl.straight_through)
        self.meter.add("kl_reference", value[given.mask])
        return self.settings.kl_coef * value if kl.where == "loss" else torch.zeros_like(value)

    def _measure(self, piece: Pack, given: LossInput, out: LossOutput, entropy: torch.Tensor, total: torch.Tensor) -> None:
        mask, now = given.mask, given.logprobs.detach()
        self.meter.add("loss", total)
        for name, count in (
            ("plain_tokens", piece.tokens),
            ("computed_tokens", piece.computed),
            (TRAINED, int(mask.sum())),
            (SAMPLED, len(mask)),
        ):
            self.meter.add(name, torch.tensor(float(count)))
        self.meter.add("entropy", entropy[mask])
        self.meter.add("kl_behaviour", given.behaviour_logprobs - now)
        for name, values in out.metrics.items():
            self.meter.add(name, values[mask])
        if self.first:  # no step was taken yet: what differs here is trainer against engine, or staleness
            self.meter.add(FIRST, torch.tensor(float(len(mask))))
            self.meter.add("mismatch_kl", kl_estimate("k3", now, given.behaviour_logprobs))
            self.meter.top("mismatch_max", (now - given.behaviour_logprobs).abs())


def mismatch(batch: TensorDict) -> dict[str, float]:
    """`mismatch_kl` (k3, mean over all sampled tokens) and `mismatch_max` of the proximal policy against the engine's
    logprobs: where the proximal policy was recomputed, the batch says them itself, rows included that a correction rejects."""
    new, old = (batch.get(name).values()[batch.get("sampled").values()] for name in ("old_logprobs", "logprobs"))
    if not len(new):
        return {}
    return {"mismatch_kl": float(kl_estimate("k3", new, old).mean()), "mismatch_max": float((new - old).abs().max())}


TRAINED, SAMPLED, FIRST = "tokens_computed", "sampled_computed", "sampled_first"
OVER = {"kl_behaviour": SAMPLED, "mismatch_kl": FIRST}
"""What a metric is the mean over, where that is not the computed tokens that are trained."""


def _metrics(engine: BaseEngine, meter: Meter, steps: Steps, counts: tuple[Denominators, ...]) -> dict[str, float]:
    """`loss` and `grad_norm` are means over the optimizer steps. Means over tokens are over those that were computed (in
    every epoch), so not over rows that were left out as they teach nothing; `tokens_trained` and `episodes_trained` are
    the denominators, which count those too."""
    if not steps.norms:
        return {"tokens_trained": 0.0, "minibatches": 0.0}
    sums, tops = meter.totals(engine)
    plain, computed = sums.pop("plain_tokens"), sums.pop("computed_tokens")
    over = {name: sums.pop(name) for name in (TRAINED, SAMPLED, FIRST)}
    loss = sums.pop("loss") / len(steps.norms)
    means = {name: value / max(over[OVER.get(name, TRAINED)], 1.0) for name, value in sums.items()}
    return {
        **means,
        **tops,
        **steps.metrics(),
        "loss": loss,
        "tokens_trained": sum(part.tokens for part in counts),
        "tokens_computed": over[TRAINED],
        "episodes_trained": sum(part.episodes for part in counts),
        "minibatches": float(len(counts)),
        "prefix_ratio": plain / max(computed, 1.0),
    }


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for a combination that cannot mean what it says."""
    policy_loss(algorithm.loss.name, algorithm.loss.args)
    loss = POLICY_LOSSES.entry(algorithm.loss.name)
    if algorithm.proximal != "recompute":
        if "proximal" in loss.needs:
            raise ConfigError(f'algorithm.loss "{loss.name}" needs algorithm.proximal = "recompute"')
        if algorithm.correction is not None:
            raise ConfigError('algorithm.correction needs algorithm.proximal = "recompute"')
    if algorithm.correction is not None:
        correction(algorithm.correction.name, algorithm.correction.args)
        weighs = CORRECTIONS.entry(algorithm.correction.name)
        if "weighs_behaviour" in loss.traits & weighs.traits:
            others = CORRECTIONS.that_are("weighs_behaviour", False)
            raise ConfigError(
                f'algorithm.correction "{weighs.name}" and algorithm.loss "{loss.name}" both weigh tokens by '
                f"proximal / behaviour, so it would count twice; use {others}, or another loss"
            )
    check_kl(algorithm.kl)
    norm_length(algorithm)
