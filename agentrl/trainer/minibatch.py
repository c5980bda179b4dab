"""Minibatches: the rows of an optimizer step, their denominators, and the columns that the loss reads.

Also per-token results of an update, checks for non-finite numbers, and the KL penalty against the reference policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.cluster.group import Shard, batch_of
from agentrl.cluster.worker import Mesh, Shipment
from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig
from agentrl.data.rows import TRUNCATED, Ragged, is_ragged, row_counts, row_ids, spread
from agentrl.data.schedule import FRESH, ORIGIN, assign_ranks, cut_minibatches, origins
from agentrl.trainer.algorithms.base import Denominators, call_component, check_output
from agentrl.trainer.algorithms.losses import CORRECTIONS, POLICY_LOSSES
from agentrl.utils.errors import ConfigError, DispatchError

if TYPE_CHECKING:
    from tensordict import TensorDict

# Results per token

SOURCE = "source_row"
"""Row column: each row's number in the driver's batch. If a batch has it, the actor records log ratios."""
Visits = list[tuple[Tensor, Tensor, Tensor]]
"""Per micro-batch: row numbers [N], offsets [N + 1] of the rows' sampled tokens, and their log pi - log mu [M]. They stay on the
device until the update has ended, because reading them synchronizes with the GPU."""
LogRatios = dict[int, npt.NDArray[np.float16]]
"""Log ratios by row number. float16 has a relative precision of 1e-3 down to log ratios of 1e-4."""


@dataclass(frozen=True)
class TrainedTokens:
    """Advantages and log ratios of a step's sampled tokens, by row of `collate`.

    `offsets` [N + 1] cut `advantages` float32 [M]. `log_ratios`: by row number, for the rows that were trained."""

    offsets: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]
    log_ratios: Mapping[int, npt.NDArray[np.float16]]

    @classmethod
    def of(cls, view: Ragged, log_ratios: LogRatios | None) -> TrainedTokens:
        """Read a batch with advantages. Without `log_ratios`: log(proximal / behaviour) of every row, from `old_logprobs`."""
        mask = view.tokens("sampled")
        # No array of the batch's length: for hundreds of millions of tokens, a running sum would take gigabytes.
        counts = np.add.reduceat(mask.numpy(), view.offsets[:-1].numpy(), dtype=np.int64)  # no row is empty
        offsets = np.concatenate(([0], np.cumsum(counts)))
        if log_ratios is None:
            values = (view.tokens("old_logprobs") - view.tokens("logprobs"))[mask].float().numpy().astype(np.float16)
            log_ratios = dict(enumerate(np.split(values, offsets[1:-1])))
        return cls(offsets, view.tokens("advantages")[mask].float().numpy(), log_ratios)

    def row(self, number: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float16] | None]:
        """Return the advantages and log ratios (None if not recorded) of a row's sampled tokens."""
        start, stop = self.offsets[number : number + 2].tolist()
        return self.advantages[start:stop], self.log_ratios.get(number)


# Added rows

TERMS = "loss_terms"


@dataclass(frozen=True, slots=True)
class Term:
    """Loss term of added rows: `coef` times the policy loss, or, if `supervised`, times the mean of -log pi over their tokens.

    `name` prefixes its metrics."""

    name: str
    supervised: bool
    coef: float


def supervised_tokens(view: Ragged) -> Tensor:
    """Mask the tokens of rows with a supervised loss term, bool [T]."""
    numbers = [number for number, term in enumerate(view.batch[TERMS], FRESH + 1) if term.supervised]
    return spread(torch.from_numpy(np.isin(origins(view), numbers)), view.offsets, int(view.offsets[-1]))


# Non-finite numbers

COLUMNS = ("reward", "rewards", "baseline", "logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
MAX_NAMED_ROWS = 8


def broken_rows(view: Ragged) -> str:
    """Describe the rows with a non-finite number in a column of `COLUMNS`; "" if all numbers are finite."""
    broken: list[str] = []
    for name in COLUMNS:
        if name not in view:
            continue
        column = view.row(name)
        values = column.values() if is_ragged(column) else column
        if bool(torch.isfinite(values.sum())):
            continue  # the usual case, without a mask of the column's size: one NaN or infinity makes the sum non-finite
        bad = ~torch.isfinite(values)
        rows = np.flatnonzero(row_counts(bad, view.offsets).numpy() > 0 if is_ragged(column) else bad.numpy()).tolist()
        if rows:  # none if only the sum overflowed
            broken.append(f"{name} of {named_rows(view, rows)}")
    return "; ".join(broken)


def named_rows(view: Ragged, rows: Sequence[int]) -> str:
    """Name rows by group, member and ledger, as the run's records number them; at most MAX_NAMED_ROWS."""
    episode, group, member = view.episode, view.numbers("group"), view.numbers("member")
    names = [
        f"(group {group[row]}, member {member[row]}, ledger {int((episode[:row] == episode[row]).sum())})"
        for row in list(rows)[:MAX_NAMED_ROWS]
    ]
    more = len(rows) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


# The plan of optimizer steps: their rows, their denominators, and the rows that are computed at all.
#
# On the driver, `cut_update` prepares a training step over the whole batch; the worker group only ships it. The order matters:
#
# with_policies        the proximal policy, and the weights of an off-policy correction, which reject tokens
# cut_minibatches      episodes -> optimizer steps                                     (data/schedule.py)
# with_counts          denominators of each, from every row: rejected tokens do not count, idle rows do
# with_selection       tokens that a loss treats differently, over all rows of a minibatch
# without_idle_rows    drops rows that cannot have a gradient, which saves time and changes no step
# assign_ranks         remaining rows -> ranks                                         (data/schedule.py)
#
# Workers read the plan from the columns `minibatch` (see `plan_micro_batches`), `episode_tokens` and `counts`: the denominators
# of each minibatch, over all ranks and all rows, including the dropped ones.

DRIVER_ONLY = ("rewards", "turns", "versions")
"""Token columns that only the driver reads, for advantages; they are not sent to the roles."""


def cut_update(
    batch: TensorDict,
    algorithm: AlgorithmConfig,
    ranks: int,
    *,
    step: int = 0,
    seed: int = 0,
    policy: bool = True,
    part: int | None = None,
) -> TensorDict:
    """Cut a batch into minibatches of episodes, each balanced over `ranks` data-parallel ranks; the input of `update`.

    `policy`: prepare the policy's update: proximal policy, off-policy correction, picked tokens, and no rows that cannot have a
    gradient. Without it (critic) every row counts and is computed. With `part` only that minibatch is sent.
    """
    view = Ragged.of(batch)
    if policy:  # before counting: tokens that a correction rejects are in no denominator
        view = with_policies(view, algorithm)
    parts = cut_minibatches(view, algorithm, seed, step)
    view = with_counts(view, parts, algorithm.length_norm)
    if policy:
        if "picked" in POLICY_LOSSES.entry(algorithm.loss.name).needs:
            view = with_selection(view, parts, algorithm.loss, seed + step)
        parts = without_idle_rows(view, parts, algorithm)
    if part is not None:  # the others are not computed in this call
        parts = [rows if number == part else rows[:0] for number, rows in enumerate(parts)]
    return assign_ranks(view, parts, ranks, kept=algorithm.groups == "kept").batch


def cut_steps(batch: TensorDict, count: int, ranks: int) -> TensorDict:
    """Cut a batch, in order, into `count` supervised steps, each balanced over `ranks`.

    Steps have nearly equal numbers of rows. Raises DispatchError if a step would have no row.
    """
    if not 1 <= count <= len(batch):
        raise DispatchError(f"a batch of {len(batch)} rows cannot be split into {count} steps. Give each step a row")
    parts = np.array_split(np.arange(len(batch)), count)
    return assign_ranks(with_counts(Ragged.of(batch), parts), parts, ranks).batch


MINIBATCHES = Shard(collect="metrics", balance="column", stays=DRIVER_ONLY)
"""Strategy of the methods that train on a batch from `cut_update` or `cut_steps`."""


@dataclass(frozen=True)
class RowsShard(Shard):
    """Dispatch of one forward pass over all rows: balanced by tokens, shared tokens counted once."""

    stays: tuple[str, ...] = DRIVER_ONLY

    def scatter(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> Shipment:
        batch = batch_of(label, args)
        view = assign_ranks(Ragged.of(batch), [np.arange(len(batch))], mesh.size("dp"))
        return Shard(balance="column", stays=self.stays).scatter(label, (view.batch, *args[1:]), kwargs, mesh)


def proximal_of(view: Ragged) -> Tensor:
    """Return the logprobs of the proximal policy [T]: recomputed `old_logprobs`, else those of the engine."""
    return view.tokens("old_logprobs" if "old_logprobs" in view else "logprobs")


def with_policies(view: Ragged, algorithm: AlgorithmConfig) -> Ragged:
    """Make `old_logprobs` and `weights` of a batch match the algorithm.

    `old_logprobs` are dropped if the proximal policy is the behaviour policy. `weights` [T] come from an off-policy correction;
    masked truncated episodes have weight 0. Raises ConfigError if the column `old_logprobs` or `truncated` is needed and missing,
    or a correction returns negative or non-finite weights.
    """
    if algorithm.proximal == "behaviour" and "old_logprobs" in view:
        # Else `proximal_of` would take it for the proximal policy.
        view = Ragged(view.batch.exclude("old_logprobs"), view.offsets, view.lengths)
    if algorithm.proximal == "recompute" and "old_logprobs" not in view:
        raise ConfigError('algorithm.proximal = "recompute": the batch has no column old_logprobs (Actor.compute_logprob)')
    weights = None
    if algorithm.correction is not None:
        rule = CORRECTIONS.bind(algorithm.correction.name, algorithm.correction.args)
        sampled = view.tokens("sampled")
        label = f"algorithm.correction {algorithm.correction.name!r}"
        weights = call_component(label, rule, proximal_of(view), view.tokens("logprobs"), sampled, view.offsets)
        check_output(label, weights, Tensor, "", sampled)
        if not bool((weights[sampled] >= 0).all() and weights[sampled].isfinite().all()):  # a NaN would drop its token silently
            raise ConfigError(f"{label} returned weights that are negative or not finite; expected numbers of 0 and above")
    if algorithm.truncated == "mask":
        if TRUNCATED not in view:
            raise ConfigError('algorithm.truncated = "mask": the batch has no column truncated (agentrl.data.rows makes it)')
        cut = spread(view.batch[TRUNCATED], view.offsets)
        weights = torch.where(cut, 0.0, torch.ones(len(cut)) if weights is None else weights)
    if weights is None:
        return view
    if ORIGIN in view:  # a supervised term has no ratio that could be corrected
        weights = torch.where(supervised_tokens(view), torch.ones_like(weights), weights)
    return view.with_tokens(weights=weights)


def trained_tokens(view: Ragged) -> Tensor:
    """Mask the trained tokens, bool [T]: sampled, not rejected by a correction, not in a masked truncated episode."""
    sampled = view.tokens("sampled")
    return sampled & (view.tokens("weights") > 0) if "weights" in view else sampled


def with_counts(view: Ragged, parts: list[np.ndarray], length: int | None = None) -> Ragged:
    """Add the denominators of each minibatch to a batch.

    Row column `episode_tokens` int64 [N]: trained tokens of the row's episode, over all of its rows. Batch-wide `counts`:
    denominators per minibatch, of the rows played for this update; `added`: those of added rows, by origin, if there are any.
    `length`: `Denominators.length`."""
    per_row = row_counts(trained_tokens(view), view.offsets).numpy()
    per_episode = np.bincount(view.episode, weights=per_row).astype(np.int64)
    origin, counts, added = origins(view), list[Denominators](), list[dict[int, Denominators]]()
    for rows in parts:
        by_origin = {}
        for kind in (FRESH, *np.unique(origin[origin != FRESH]).tolist()):
            own = rows[origin[rows] == kind]
            # An episode without trained tokens does not count: it would only shrink the share of the others.
            alive = int((per_episode[np.unique(view.episode[own])] > 0).sum())
            by_origin[kind] = Denominators(float(per_row[own].sum()), float(alive), float(length or 1))
        counts.append(by_origin.pop(FRESH))
        added.append(by_origin)
    counted = view.with_rows(episode_tokens=torch.from_numpy(per_episode[view.episode]), counts=tuple(counts))
    return counted.with_rows(added=tuple(added)) if ORIGIN in view else counted


def without_idle_rows(view: Ragged, parts: list[np.ndarray], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """Drop the rows that cannot have a gradient from each minibatch, which may become empty.

    A row has one if a term of the loss is not zero on one of its trained tokens. Every policy loss is zero on a row whose
    advantages are zero, except one with the trait "moves_picked" on its picked tokens; an entropy bonus, a KL term in the loss,
    and a supervised term have a gradient on all tokens.

    The first minibatch keeps at least one row of this update, its shortest with a sampled token, to compare trainer and engine.
    """
    alive = trained_tokens(view)
    if not (algorithm.entropy_bonus > 0 or (algorithm.kl.coef > 0 and algorithm.kl.where == "loss")):
        moved = view.tokens("advantages") != 0
        if "moves_picked" in POLICY_LOSSES.entry(algorithm.loss.name).traits and "picked" in view:
            moved = moved | view.tokens("picked")
        if ORIGIN in view:
            moved = moved | supervised_tokens(view)
        alive = alive & moved
    keep = row_counts(alive, view.offsets).numpy() > 0
    first = parts[0][origins(view)[parts[0]] == FRESH] if parts else np.zeros(0, dtype=np.int64)
    if len(first) and not keep[first].any():
        sampled = row_counts(view.tokens("sampled"), view.offsets).numpy()[first]
        # lexsort sorts by its last key first: rows with a sampled token, and among these the shortest.
        keep[first[np.lexsort((view.lengths[first], sampled == 0))[0]]] = True
    return [rows[keep[rows]] for rows in parts]


def with_selection(view: Ragged, parts: list[np.ndarray], loss: Choice, seed: int) -> Ragged:
    """Add the ragged bool column `picked`: the tokens that a loss picks by covariance.

    Picks the fraction `share` of a minibatch's trained tokens: at random among those with a covariance in (low, high), or, for a
    loss without these arguments, those of the largest covariance. A token's covariance is (log pi - mean)(A - mean), with means
    over the trained tokens of its minibatch, including those with advantage 0; log pi is the proximal policy's. Added rows are
    in no mean and are never picked.
    """
    args = POLICY_LOSSES.arguments(loss.name, loss.args)
    trained = trained_tokens(view)
    # float64: the choice depends on small differences, which in float32 depend on the order of summation.
    logprobs, advantages = proximal_of(view).double(), view.tokens("advantages").double()
    # Pseudo-random numbers hashed from the token and its row: those of a generator would depend on the order of the rows.
    rows_of = row_ids(view.offsets)
    place = torch.arange(len(rows_of)) - view.offsets[:-1][rows_of]
    mix = view.tokens("token_ids").to(torch.int64) * 2654435761 + place * 40503 + seed % (1 << 32) * 7919
    mix = mix + view.row("group")[rows_of] * 104729 + view.row("member")[rows_of] * 1299709
    for shift in (16, 13, 16):
        mix = (mix ^ (mix >> shift)) * 73244475 % (1 << 31)
    noise = mix.to(torch.float64)
    picked = torch.zeros(len(trained), dtype=torch.bool)
    for rows in parts:
        every = view.positions(rows[origins(view)[rows] == FRESH])
        indices = every[trained[every]]
        if not len(indices):
            continue
        covariance = (logprobs[indices] - logprobs[indices].mean()) * (advantages[indices] - advantages[indices].mean())
        # Rounded down but at least one, as in the authors' code.
        wanted, order = max(int(args["share"] * len(indices)), 1), noise[indices]
        if args.get("low") is None:
            chosen = torch.from_numpy(np.lexsort((order.numpy(), -covariance.numpy()))[:wanted])
        else:
            inside = ((covariance > args["low"]) & (covariance < args["high"])).nonzero().squeeze(1)
            chosen = inside[order[inside].argsort(stable=True)[:wanted]]
        picked[indices[chosen]] = True
    return view.with_tokens(picked=picked)


# The KL penalty


def kl_kind(cfg: KlConfig) -> str:
    """Return the configured KL estimator; default: k1 in the reward, k3 in the loss.

    The expectation of k1 under the policy is the KL; PPO uses it in the reward (Ziegler et al. 2019, arXiv:1909.08593; Ouyang et
    al. 2022, arXiv:2203.02155). GRPO uses k3 in the loss (Shao et al. 2024, arXiv:2402.03300)."""
    return cfg.kind or ("k1" if cfg.where == "reward" else "k3")


def adapted_kl_coef(coef: float, measured: float, episodes: int, cfg: KlConfig) -> float:
    """Return the next KL coefficient: coef (1 + clip(KL / target - 1, +-0.2) episodes / horizon).

    Source: Ziegler et al. 2019, arXiv:1909.08593. Departures: KL and `target` are means over tokens, not sums over an episode;
    the default horizon is the episodes of 20 updates.
    """
    if cfg.target is None:
        return coef
    error = min(max(measured / cfg.target - 1, -0.2), 0.2)
    return coef * (1 + error * episodes / (cfg.horizon or 20 * episodes))
