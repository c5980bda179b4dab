"""The update on a worker: micro-batch losses with global denominators, optimizer steps, metrics.

`Actor.update` drives it. The critic and supervised steps also use `Pack` (a micro-batch), `Steps` (optimizer steps, skipped if a
number is not finite) and `Meter` (sums of per-token metrics)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from agentrl.config.schema import AlgorithmConfig
from agentrl.data.expert_routing import free, router_code
from agentrl.data.rows import Ragged, build, nested_tensor, on_device, pack, sampled_offsets, spread
from agentrl.data.schedule import FRESH, ORIGIN, plan_micro_batches, share, trees_of
from agentrl.trainer.algorithms import policy_loss
from agentrl.trainer.algorithms.base import Denominators, LossInput, LossOutput, aggregate, call_loss
from agentrl.trainer.algorithms.losses import CORRECTIONS, KL, POLICY_LOSSES, k3, kl_estimate
from agentrl.trainer.attention import packed_rows
from agentrl.trainer.language_model import Micro
from agentrl.trainer.minibatch import SOURCE, TERMS, Term, Visits, kl_kind, named_rows
from agentrl.trainer.train_engine import BaseEngine, CardUsage, card_of
from agentrl.utils.errors import BrokenWeightsError, ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict

# Metrics

TRAINED, SAMPLED, FIRST = "tokens_computed", "sampled_computed", "sampled_first"
ADDED = "/added_computed"
MEAN_OVER = {"kl_behaviour": SAMPLED, "mismatch_kl": FIRST}
"""Denominator of a metric's mean, by metric; default: TRAINED, the computed trained tokens of this update's own rows. Metrics of
added rows (`TERM/name`) are means over `TERM` + ADDED."""
RESERVED_METRICS = {
    "step", "phase", "reward", "success", "loss", "entropy", "grad_norm", "lr", "kl_behaviour", "kl_reference", "mismatch_kl",
}  # fmt: skip
"""Metric names of the run, which a policy loss must not use."""
How = Literal["sum", "max"]


class Meter:
    """Sums and maxima of per-token metrics over micro-batches and ranks.

    They stay on the device until `totals`, because reading a number would synchronize host and GPU."""

    def __init__(self) -> None:
        self._held: dict[How, dict[str, Tensor]] = {"sum": {}, "max": {}}

    def add(self, name: str, values: Tensor, mask: Tensor | None = None, how: How = "sum") -> None:
        """Add the sum of `values`, or update the maximum (0 if empty); values outside of `mask` count as 0."""
        # float64: a float32 sum over millions of tokens loses the digits of a small mean, such as a KL.
        numbers, held = values.detach().double(), self._held[how]
        numbers = numbers if mask is None else torch.where(mask, numbers, 0.0)
        if how == "sum":
            held[name] = held.get(name, 0.0) + numbers.sum()
        else:
            largest = numbers.max() if values.numel() else numbers.sum()
            held[name] = torch.maximum(held.get(name, largest), largest)

    def totals(self, engine: BaseEngine) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums and maxima over all ranks, by name. Every rank must have added the same names."""
        found: list[dict[str, float]] = []
        for how, held in self._held.items():
            names = sorted(held)  # one tensor for all names, so the ranks must have them in the same order
            joined = engine.reduce(torch.stack([held[name].cpu() for name in names]), how).tolist() if names else []
            found.append(dict(zip(names, joined, strict=True)))
        return found[0], found[1]


def measured_means(engine: BaseEngine, meter: Meter, counts: tuple[Denominators, ...]) -> dict[str, float]:
    """Return the metrics of an update from its meter and the denominators of its minibatches.

    Token means are over the computed tokens of all epochs, without the rows dropped for a zero gradient; `tokens_trained` and
    `episodes_trained` are the denominators, which include those rows. `loss` is a sum."""
    sums, maxima = meter.totals(engine)
    plain, computed = sums.pop("plain_tokens", 0.0), sums.pop("computed_tokens", 0.0)
    counted = {TRAINED, SAMPLED, FIRST, *(name for name in sums if name.endswith(ADDED))}
    over = {name: sums.pop(name, 0.0) for name in counted}
    loss = sums.pop("loss", 0.0)
    # A mean over no token is unknown, not 0, and is left out.
    by = {name: name.split("/")[0] + ADDED for name in sums} | MEAN_OVER
    means = {name: value / count for name, value in sums.items() if (count := over.get(by[name], over[TRAINED]))}
    experts = engine.expert_load()  # over all ranks and passes of the update
    return {
        **means,
        **maxima,
        "loss": loss,
        "tokens_trained": sum(part.tokens for part in counts),
        "tokens_computed": over[TRAINED],
        "episodes_trained": sum(part.episodes for part in counts),
        "prefix_ratio": plain / max(computed, 1.0),
        **({} if experts is None else router_code().load_metrics(engine.reduce(experts, "sum").numpy())),
    }


# The loss of the policy

log = logging.getLogger(__name__)


def visit_order(count: int, epoch: int, seed: int, step: int) -> list[int]:
    """Return the order of the minibatches in an epoch; the first keeps theirs, which is already shuffled."""
    if epoch == 0:
        return list(range(count))
    # Only the order changes: the driver has fixed the rows of each minibatch, to which its denominators belong.
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    return [int(number) for number in order]


@dataclass(slots=True)
class MicroLoss:
    """The losses of one optimizer step's micro-batches.

    `counts`: denominators of the rows played for this update; `added`: those of rows that hooks added, by origin. `first`: no
    optimizer step was taken since the last publish. `visits`: a list that collects log ratios, or None. At `temperature` 0
    (greedy sampling, which has no distribution to train) the logprobs are those at temperature 1."""

    engine: BaseEngine
    view: Ragged
    algorithm: AlgorithmConfig
    policy: Callable[[LossInput], LossOutput]
    temperature: float
    kl_coef: float
    meter: Meter
    counts: Denominators
    first: bool
    added: Mapping[int, Denominators] | None = None
    visits: Visits | None = None

    def loss(self, rows: list[int]) -> Tensor:
        """Return this micro-batch's share of the step's loss, a scalar; record its metrics."""
        piece, meter = Pack(self.view, rows, self.engine.device, replay=True), self.meter
        logprobs, entropy = self.engine.logprobs(piece.micro, self.temperature or 1.0, True)
        weights = piece.column("weights") if "weights" in self.view else torch.ones_like(logprobs)
        given = LossInput(
            logprobs,
            piece.column("old_logprobs" if "old_logprobs" in self.view else "logprobs"),
            piece.column("logprobs"),
            piece.column("advantages"),
            weights.detach() > 0,  # the mask: weight 0 rejects a token
            on_device(piece.compact, self.engine.device),
            piece.column("picked") if "picked" in self.view else None,
        )
        label = f"algorithm.loss {self.algorithm.loss.name!r}"
        out = call_loss(label, self.policy, given)
        # Without `detach` the gradient of the weights would teach the policy to lower the weights of its tokens.
        policy = tokens = out.loss * weights.detach()
        if self.algorithm.entropy_bonus:
            tokens = tokens - self.algorithm.entropy_bonus * entropy
        kinds = None if self.added is None else spread(piece.row(ORIGIN), given.offsets, len(given.mask))
        fresh = torch.ones_like(given.mask) if kinds is None else kinds == FRESH  # played for this update
        mask, lengths = given.mask & fresh, piece.row("episode_tokens")
        if "ref_logprobs" in self.view:  # the KL is measured whenever there is a reference
            kl = self.algorithm.kl
            kl_tokens = kl_estimate(kl_kind(kl), logprobs, piece.column("ref_logprobs"))
            meter.add("kl_reference", kl_tokens, mask)
            if kl.where == "loss":
                tokens = tokens + self.kl_coef * kl_tokens
        total = aggregate(tokens, mask, given.offsets, self.algorithm.aggregate, self.counts, lengths)
        if kinds is not None:
            total = total + self._added_loss(kinds, given, out, policy, lengths)
        # Metrics.
        now, behaviour = logprobs.detach(), given.behaviour_logprobs
        meter.add("loss", total)
        meter.add("plain_tokens", torch.tensor(float(piece.tokens)))
        meter.add("computed_tokens", torch.tensor(float(piece.computed)))
        meter.add(SAMPLED, fresh)
        meter.add(TRAINED, mask)
        meter.add("entropy", entropy, mask)
        meter.add("kl_behaviour", behaviour - now, fresh)
        if taken := sorted(RESERVED_METRICS & out.metrics.keys()):
            raise ConfigError(f"{label}: its metric {taken[0]!r} has the name of a metric of the run. Rename it")
        for name, values in out.metrics.items():
            meter.add(name, values, mask)
        if self.first:  # no optimizer step yet: a difference comes from trainer vs. engine, or from staleness
            meter.add(FIRST, fresh)
            meter.add("mismatch_kl", k3(now, behaviour), fresh)
            meter.add("mismatch_max", (now - behaviour).abs(), fresh, "max")
        if self.visits is not None and rows:
            self.visits.append((piece.row(SOURCE), piece.compact, now - behaviour))
        return total

    def _added_loss(self, kinds: Tensor, given: LossInput, out: LossOutput, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of the added rows, a scalar, each origin by its term; all ranks record metrics of the same names.

        `kinds` [M]: the origin of each token's row; `tokens` [M]: weighted policy loss per token; `lengths` [N]: trained tokens
        of each row's episode."""
        total, now = given.logprobs.new_zeros(()), given.logprobs.detach()
        for origin, counts in (self.added or {}).items():
            term: Term = self.view.batch[TERMS][origin - 1]
            mine = kinds == origin
            counted = mine if term.supervised else given.mask & mine
            self.meter.add(term.name + ADDED, counted)
            if term.supervised:
                unlikely = torch.where(mine, -given.logprobs, torch.zeros_like(given.logprobs))
                share = unlikely.sum() / max(counts.tokens, 1.0)
                self.meter.add(f"{term.name}/nll", -now, mine)
            else:
                # If a correction rejects all tokens of the update's own rows, their counts are 0; then use those of the added.
                denominators = self.counts if self.counts.tokens else counts
                share = aggregate(tokens, counted, given.offsets, self.algorithm.aggregate, denominators, lengths)
                log_ratios = torch.where(mine, now - given.behaviour_logprobs, torch.zeros_like(now))
                self.meter.add(f"{term.name}/log_ratio_max", log_ratios.abs(), how="max")
                for name, values in {"kl_behaviour": -log_ratios, **out.metrics}.items():
                    self.meter.add(f"{term.name}/{name}", values, counted)
            total = total + term.coef * share
        return total


def mismatch(view: Ragged) -> dict[str, float]:
    """Return `mismatch_kl` (k3, mean over sampled tokens) and `mismatch_max` of recomputed against engine logprobs.

    Rows that a correction rejects count too. Needs the column `old_logprobs`."""
    new, old = (view.tokens(name)[view.tokens("sampled")] for name in ("old_logprobs", "logprobs"))
    if not len(new):
        return {}
    return {"mismatch_kl": float(k3(new, old).mean()), "mismatch_max": float((new - old).abs().max())}


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError if settings of the algorithm contradict each other or have no effect."""
    policy_loss(algorithm.loss.name, algorithm.loss.args)
    loss = POLICY_LOSSES.entry(algorithm.loss.name)
    if algorithm.proximal != "recompute":
        if "proximal" in loss.needs:
            raise ConfigError(f'algorithm.loss "{loss.name}" needs algorithm.proximal = "recompute"')
        if algorithm.correction is not None:
            raise ConfigError('algorithm.correction needs algorithm.proximal = "recompute"')
    if algorithm.correction is not None:
        CORRECTIONS.bind(algorithm.correction.name, algorithm.correction.args)
        weighs = CORRECTIONS.entry(algorithm.correction.name)
        if "importance_weighted" in loss.traits & weighs.traits:
            others = CORRECTIONS.that_are("importance_weighted", False)
            raise ConfigError(
                f'algorithm.correction "{weighs.name}" and algorithm.loss "{loss.name}" both weight tokens by '
                f"proximal / behavior, so this weight would be applied twice; use {others}, or another loss"
            )
    if algorithm.aggregate == "seq_mean_token_sum_norm" and algorithm.length_norm is None:
        raise ConfigError('algorithm.aggregate = "seq_mean_token_sum_norm" needs algorithm.length_norm, a number of tokens')
    penalty, kind = algorithm.kl, kl_kind(algorithm.kl)
    if penalty.target is not None and penalty.coef == 0:
        raise ConfigError("algorithm.kl.target adapts algorithm.kl.coef, which must be above 0 at the start")
    if penalty.where == "reward" and kind.endswith("+"):
        raise ConfigError(
            f'algorithm.kl.kind = "{kind}" changes a gradient, and where = "reward" has none; use "{kind[:-1]}", or '
            'where = "loss"'
        )
    idle = not kind.endswith("+") and "idle_gradient" in KL.entry(kind).traits
    if penalty.coef > 0 and penalty.where == "loss" and idle:
        raise ConfigError(
            f'algorithm.kl.kind = "{kind}" in the loss has a gradient of mean 0 (that of log pi), so it does not '
            f'restrain the policy; use {KL.that_are("idle_gradient", False)}, "{kind}+", or where = "reward"'
        )


def stale_problem(algorithm: AlgorithmConfig) -> str | None:
    """Return why tokens of older weights would be trained as if the current ones had sampled them, with fixes; else None."""
    loss = POLICY_LOSSES.entry(algorithm.loss.name)
    if algorithm.correction is None and "own_samples" in loss.traits:
        return (
            f'algorithm.loss "{loss.name}" has no ratio to the policy that sampled; set a loss with one, as "ppo_clip", or '
            'algorithm.proximal = "recompute" with an algorithm.correction'
        )
    if algorithm.proximal == "recompute" and algorithm.correction is None and "importance_weighted" not in loss.traits:
        return (
            'algorithm.proximal = "recompute" takes ratios to the weights of the update; nothing corrects for old ones; '
            'set an algorithm.correction, the loss "decoupled_ppo", or proximal = "behaviour"'
        )
    return None


# Micro-batches and optimizer steps


class Pack:
    """Packed rows of a batch: a micro-batch of M sampled tokens on the engine's device.

    `micro`: the model's input; `compact` [N + 1]: offsets of the sampled tokens by row. `tokens`: tokens of the rows; `computed`:
    tokens that the model computes, fewer if rows share a prefix. `replay`: routers repeat the column `experts`, if the batch has
    it; a shared prefix goes to the experts of the first of its rows. Raises ValueError if a row begins with a sampled token."""

    def __init__(self, view: Ragged, rows: list[int], device: torch.device, replay: bool = False) -> None:
        self.flat = pack(view, rows)
        self.device = device
        offsets = self.flat["cu_seqlens"].to(torch.int64)
        self.mask = self.flat["sampled"]
        if bool(self.mask[offsets[:-1]].any()):
            raise ValueError("a row begins with a sampled token, which no token before it predicts. Begin it with context")
        self.compact = sampled_offsets(self.mask, offsets)
        ids, positions = self.flat["token_ids"], self.flat["position_ids"]
        indices, last = self.mask.nonzero().squeeze(1), offsets[1:] - 1
        before, targets = indices - 1, ids[indices]  # the token before predicts it
        layout = offsets
        experts = self.flat["experts"] if replay and "experts" in view else None
        if experts is not None and not rows:
            experts = free(experts, len(experts))
        trees, row_counts = trees_of(view, rows), None
        if trees:
            # Shared tokens are computed once: map positions in the plain rows to positions among the computed tokens.
            made = share(view, rows, trees)
            ids, positions = made.token_ids, made.position_ids
            before, last = made.at[before], made.at[last]
            row_counts = on_device(torch.bincount(made.at, minlength=len(ids)), device)
            if experts is not None:
                experts = experts[torch.from_numpy(np.unique(made.at.numpy(), return_index=True)[1])]
            layout = made.spans
        self.tokens, self.computed = len(self.mask) if rows else 0, len(ids) if rows else 0
        ends, held = self.flat["cu_seqlens"].tolist(), [view.images(row) for row in rows] or [()]
        images = tuple(zip(ends[:-1], ends[1:], held, strict=True))
        # int32 in the batch; gather needs int64.
        ids, positions, before, targets, last = (on_device(t.long(), device) for t in (ids, positions, before, targets, last))
        experts = None if experts is None else on_device(experts, device)
        packed = packed_rows(layout, device)
        self.micro = Micro(ids, positions, packed, before, targets, last, experts, row_counts, images)

    def column(self, name: str) -> Tensor:
        """Return a token column at the sampled tokens, [M]."""
        values: Tensor = self.flat[name]
        return on_device(values[self.mask], self.device)

    def row(self, name: str) -> Tensor:
        """Return a row column, [N]."""
        values: Tensor = self.flat[name]
        return on_device(values, self.device)


class Steps:
    """The optimizer steps of one update.

    `norms`: the gradient norm of each before clipping. `skipped`: number of steps with a non-finite loss or gradient norm; all
    ranks skip them, drop the gradients, and leave weights and optimizer as they are.
    """

    def __init__(self, engine: BaseEngine, view: Ragged, where: str) -> None:
        self._engine, self._view, self._where = engine, view, where
        self.norms: list[float] = []
        self._finite: list[float] = []
        self._usage = None if card_of(engine.device) is None else CardUsage(engine, view)
        self.skipped = 0

    def take(self, number: int, micros: list[list[int]], loss: Callable[[list[int]], Tensor]) -> None:
        """Run the backward passes of minibatch `number`, then its optimizer step. `micros`: row numbers."""
        self._engine.drop()  # gradients of a call that failed half-way
        sound = self.backward(number, micros, loss)
        norm = self._engine.step(sound)
        self.norms.append(norm)
        if sound and math.isfinite(norm):
            self._finite.append(norm)
            return
        self.skipped += 1
        if sound:
            self._log_skipped(number, f"the gradient norm is {norm}", micros)

    def backward(self, number: int, micros: list[list[int]], loss: Callable[[list[int]], Tensor]) -> bool:
        """Accumulate the gradients of minibatch `number`. Returns True if the losses of all ranks were finite.

        Reduced over ranks: a rank that stepped alone would diverge from the others."""
        finite: list[Tensor] = []
        for index, rows in enumerate(micros):
            share = loss(rows)
            finite.append(torch.isfinite(share.detach()))
            # Also for a non-finite loss: without this rank's backward pass, the collectives of the others would hang.
            self._engine.backward(share, last=index == len(micros) - 1)
        if self._usage is not None:
            self._usage.add(micros)
        if broken := [rows for rows, fine in zip(micros, finite, strict=True) if not fine]:
            self._log_skipped(number, "the loss is not finite in a micro-batch", broken)
        return not float(self._engine.reduce(torch.tensor([float(len(broken))]), "max"))

    def _log_skipped(self, number: int, what: str, micros: list[list[int]]) -> None:
        rows = named_rows(self._view, [row for micro in micros for row in micro])
        log.error("%s: optimizer step %d is skipped: %s; its rows: %s", self._where, number, what, rows)

    def finish(self) -> dict[str, float]:
        """Return `grad_norm` (mean of the steps taken), `skipped_optimizer_steps`, `optimizer_steps` (taken), and GPU usage.

        Raises BrokenWeightsError, on all ranks, if the weights are no longer finite."""
        if not self._engine.finite():
            raise BrokenWeightsError(f"{self._where}: the weights are no longer finite; they are neither published nor saved")
        taken = [norm for norm in self._finite if norm > 0]
        return {
            **({"grad_norm": sum(taken) / max(len(taken), 1)} if self._finite else {}),
            "skipped_optimizer_steps": float(self.skipped),
            "optimizer_steps": float(len(taken)),
            **({} if self._usage is None else self._usage.metrics()),
        }


# A forward pass over all rows


@torch.no_grad()
def forward_columns(
    engine: BaseEngine,
    view: Ragged,
    cap: int,
    names: tuple[str, ...],
    forward: Callable[[Micro], tuple[Tensor, ...]],
    replay: bool = False,
) -> TensorDict:
    """Compute ragged float32 columns by a forward pass over all rows: values at sampled tokens, 0 elsewhere.

    `forward`: micro-batch -> one [M] tensor per name of `names`. `replay`: as in `Pack`. `cap`: tokens per micro-batch."""
    out = {name: torch.zeros(int(view.offsets[-1])) for name in names}
    [micros] = plan_micro_batches(view, cap, engine, [np.arange(len(view))])
    for rows in micros:
        # Also for a dummy without rows: its pass takes part in the collectives of the other ranks and writes nothing.
        packed = Pack(view, rows, engine.device, replay)
        found = zip(names, forward(packed.micro), strict=True)
        for name, values in found if rows else ():
            out[name][view.positions(rows)[packed.mask]] = values.float().cpu()
    return build({name: nested_tensor(values, view.offsets) for name, values in out.items()}, len(view))


def compute_logprobs(engine: BaseEngine, view: Ragged, temperature: float, cap: int, replay: bool = False) -> TensorDict:
    """Return `logprobs` and `entropy` as `forward_columns` does; temperature 0 means 1, as in `MicroLoss`."""
    names, scale = ("logprobs", "entropy"), temperature or 1.0
    return forward_columns(engine, view, cap, names, lambda micro: engine.logprobs(micro, scale, True), replay)
