"""What an optimizer step counts: its rows, its denominators, and which rows it computes at all. On the driver.

The strategies here stand in the roles' dispatch tables. `UpdateShard` settles a training step over the whole batch, in
this order, which matters:

    with_policies        the proximal policy, and the weights of an off-policy correction: they reject tokens
    cut_minibatches      episodes -> optimizer steps                                     (batch/schedule.py)
    counted              denominators of each, from every row: rejected tokens do not count, idle rows do
    with_selection           tokens that a loss treats on their own, over all rows of a minibatch
    without_idle_rows    rows that cannot have a gradient go, which saves time and changes no step
    assign_ranks         what is left -> ranks                                           (batch/schedule.py)

Workers find all of it in the columns `minibatch`, `episode_tokens` and `counts` (see `minibatches`, `counts_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from agentrl.algorithm import POLICY_LOSSES, Denominators, correction
from agentrl.algorithm.loss.covariance import Selection, selection_of
from agentrl.algorithm.ragged import row_counts, row_ids
from agentrl.batch.rows import Ragged
from agentrl.batch.schedule import assign_ranks, cut_minibatches
from agentrl.cluster.dispatch import Call, Shard, Shipment
from agentrl.cluster.mesh import Mesh
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError, DispatchError

DRIVER_ONLY = ("rewards", "turns", "versions")
"""Token columns that advantages are formed from, on the driver: no role reads them, so they are not sent."""


@dataclass(frozen=True)
class UpdateShard(Shard):
    """For `update(batch, algorithm, step, seed, ...)`: minibatches of episodes, each balanced over the ranks.

    `policy`: for the policy's update, which has a proximal policy, an off-policy correction and picked tokens, and leaves
    out rows that cannot have a gradient. Else every row counts, and is computed.
    """

    policy: bool = True
    stays: tuple[str, ...] = DRIVER_ONLY

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        view, rest = _taken(call, "algorithm")
        algorithm: AlgorithmConfig = rest.kwargs["algorithm"]
        seed, step = rest.kwargs.get("seed", 0), rest.kwargs.get("step", 0)
        if self.policy:
            view = with_policies(view, algorithm)
        parts = cut_minibatches(view, algorithm, seed, step)
        view = counted(view, parts, norm_length(algorithm))
        if self.policy:
            view = with_selection(view, parts, selection_of(algorithm.loss.name, algorithm.loss.args), seed + step)
            parts = without_idle_rows(view, parts, algorithm)
        view = assign_ranks(view, parts, mesh.size(self.mesh), kept=algorithm.groups == "kept")
        return Shard.scatter(self, Call(call.where, call.names, (view.batch,), rest.kwargs), mesh)


@dataclass(frozen=True)
class RowsShard(Shard):
    """For one forward pass over all rows: balanced by tokens, those that are shared counted once."""

    balance: Literal["tokens", "column"] | None = "tokens"
    stays: tuple[str, ...] = DRIVER_ONLY

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        name = call.names[0]
        batch, rest = call.take(name)
        if not isinstance(batch, TensorDict):  # a future's rows: they lie where they were made
            return Shard.scatter(self, call, mesh)
        view = assign_ranks(Ragged.of(batch), [np.arange(len(batch))], mesh.size(self.mesh))
        by_column = Shard(mesh=self.mesh, collect=self.collect, balance="column", argument=name, stays=self.stays)
        return by_column.scatter(Call(call.where, call.names, (view.batch, *rest.args), rest.kwargs), mesh)


@dataclass(frozen=True)
class StepsShard(Shard):
    """For `sft_steps(batch, count)`: `count` optimizer steps of equal numbers of rows, in the rows' order."""

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        view, rest = _taken(call, "count")
        count: int = rest.kwargs["count"]
        if not 1 <= count <= len(view):
            raise DispatchError(f"{call.where}: {len(view)} rows do not make {count} steps")
        parts = np.array_split(np.arange(len(view)), count)
        view = assign_ranks(counted(view, parts), parts, mesh.size(self.mesh))
        return Shard.scatter(self, Call(call.where, call.names, (view.batch,), rest.kwargs), mesh)


def _taken(call: Call, needed: str) -> tuple[Ragged, Call]:
    """The batch, and the call without it. Raises DispatchError if one argument is missing."""
    name = call.names[0]
    batch, rest = call.take(name)
    if not isinstance(batch, TensorDict):
        raise DispatchError(f"{call.where}: {name!r} must be a TensorDict, it is a {type(batch).__name__}")
    if needed not in rest.kwargs:
        raise DispatchError(f"{call.where}: no argument given for {needed!r}")
    return Ragged.of(batch), rest


def norm_length(algorithm: AlgorithmConfig) -> int | None:
    """The constant of `aggregate = "seq_mean_token_sum_norm"`, None for another. Raises ConfigError where it is missing."""
    if algorithm.aggregate != "seq_mean_token_sum_norm":
        return None
    if algorithm.length_norm is None:
        raise ConfigError('algorithm.aggregate = "seq_mean_token_sum_norm" needs algorithm.length_norm, a number of tokens')
    return algorithm.length_norm


def minibatches(view: Ragged) -> list[np.ndarray]:
    """On a worker: its rows of each minibatch."""
    number = view.numbers("minibatch")
    return [np.flatnonzero(number == index) for index in range(len(counts_of(view)))]


def counts_of(view: Ragged) -> tuple[Denominators, ...]:
    """The denominators of each minibatch, over all ranks and all rows, those that were left out included."""
    found: tuple[Denominators, ...] = view.batch["counts"]
    return found


def proximal_of(view: Ragged) -> Tensor:
    """Logprobs of the proximal policy [T]: `old_logprobs` if they were recomputed, else the engine's."""
    return view.tokens("old_logprobs" if "old_logprobs" in view else "logprobs")


def with_policies(view: Ragged, algorithm: AlgorithmConfig) -> Ragged:
    """The batch with `old_logprobs` only if the proximal policy is to be recomputed, and `weights` if there is an
    off-policy correction.

    Raises ConfigError if the proximal policy is to be recomputed and was not.
    """
    if algorithm.proximal == "behaviour" and "old_logprobs" in view:
        view = view.without("old_logprobs")
    if algorithm.proximal == "recompute" and "old_logprobs" not in view:
        raise ConfigError('algorithm.proximal = "recompute": the batch has no column old_logprobs (Actor.compute_logprob)')
    if algorithm.correction is None:
        return view
    rule = correction(algorithm.correction.name, algorithm.correction.args)
    return view.with_tokens(weights=rule(proximal_of(view), view.tokens("logprobs"), view.tokens("sampled"), view.offsets))


def trained_tokens(view: Ragged) -> Tensor:
    """The tokens that are trained, bool [T]: sampled, less those that an off-policy correction rejects."""
    sampled = view.tokens("sampled")
    return sampled & (view.tokens("weights") > 0) if "weights" in view else sampled


def counted(view: Ragged, parts: list[np.ndarray], length: int | None = None) -> Ragged:
    """The batch with the row column `episode_tokens` int64 [N] (trained tokens of the row's episode, over all of its
    rows), and batch-wide `counts`, the denominators of each minibatch."""
    per_row = row_counts(trained_tokens(view), view.offsets).numpy()
    per_episode = np.bincount(view.episode, weights=per_row).astype(np.int64)
    counts = []
    for rows in parts:
        tokens = int(per_row[rows].sum())
        alive = int((per_episode[np.unique(view.episode[rows])] > 0).sum())
        counts.append(Denominators(float(tokens), float(alive), float(length or 1)))
    return view.with_rows(episode_tokens=torch.from_numpy(per_episode[view.episode])).with_wide(counts=tuple(counts))


def teaches(view: Ragged, algorithm: AlgorithmConfig) -> np.ndarray:
    """Rows that can have a gradient, bool [N]: those with a trained token on which a term of the loss is not zero.

    Every policy loss is zero on a row whose advantages are, but one with the trait "moves_picked" on the tokens picked for
    it; an entropy bonus or a KL term in the loss moves all of them.
    """
    alive = trained_tokens(view)
    if not (algorithm.entropy_bonus > 0 or (algorithm.kl.coef > 0 and algorithm.kl.where == "loss")):
        moved = view.tokens("advantages") != 0
        if "moves_picked" in POLICY_LOSSES.entry(algorithm.loss.name).traits and "picked" in view:
            moved = moved | view.tokens("picked")
        alive = alive & moved
    return row_counts(alive, view.offsets).numpy() > 0


def without_idle_rows(view: Ragged, parts: list[np.ndarray], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """What is left of each minibatch (possibly nothing) without the rows that cannot have a gradient.

    The first minibatch keeps at least one row, its shortest with a sampled token: trainer and engine are compared there.
    The batch itself stays as it is: rows of no minibatch are sent to no rank.
    """
    keep = teaches(view, algorithm)
    if parts and not keep[parts[0]].any():
        sampled = row_counts(view.tokens("sampled"), view.offsets).numpy()[parts[0]]
        keep[parts[0][np.lexsort((view.lengths[parts[0]], sampled == 0))[0]]] = True
    return [rows[keep[rows]] for rows in parts]


def with_selection(view: Ragged, parts: list[np.ndarray], selection: Selection | None, seed: int) -> Ragged:
    """The batch with the ragged bool column `picked`; as it is if nothing is to be picked.

    The covariance of a token is (log pi - mean)(A - mean), means over the trained tokens of its minibatch, those of rows
    without advantage included; log pi is the proximal policy's.
    """
    if selection is None:
        return view
    trained = trained_tokens(view)
    logprobs, advantages = proximal_of(view).double(), view.tokens("advantages").double()
    noise = token_noise(view, seed)
    picked = torch.zeros(len(trained), dtype=torch.bool)
    for rows in parts:
        spans = [torch.arange(int(view.offsets[row]), int(view.offsets[row + 1])) for row in rows.tolist()]
        every = torch.cat(spans)
        mine = every[trained[every]]
        if len(mine):
            covariance = (logprobs[mine] - logprobs[mine].mean()) * (advantages[mine] - advantages[mine].mean())
            picked[mine[chosen(covariance, noise[mine], selection)]] = True
    return view.with_tokens(picked=picked)


def chosen(covariance: Tensor, noise: Tensor, selection: Selection) -> Tensor:
    """The picked of M tokens, int64: `share` of them, at least one and rounded down (as in the authors' code); those with
    the largest covariance, or so many at random (by `noise`) of those that lie within the bounds."""
    wanted = max(int(selection.share * len(covariance)), 1)
    if selection.low is None or selection.high is None:
        return torch.from_numpy(np.lexsort((noise.numpy(), -covariance.numpy()))[:wanted])
    inside = ((covariance > selection.low) & (covariance < selection.high)).nonzero().squeeze(1)
    return inside[noise[inside].argsort(stable=True)[:wanted]]


def token_noise(view: Ragged, seed: int) -> Tensor:
    """A number in [0, 1) for each token, drawn from what the token is, not from where it lies."""
    rows = row_ids(view.offsets)
    place = torch.arange(len(rows)) - view.offsets[:-1][rows]
    mix = view.tokens("token_ids").to(torch.int64) * 2654435761 + place * 40503 + seed * 7919
    mix = mix + view.row("group")[rows] * 104729 + view.row("member")[rows] * 1299709
    for shift in (16, 13, 16):
        mix = (mix ^ (mix >> shift)) * 73244475 % (1 << 31)
    noise: Tensor = mix.to(torch.float64) / (1 << 31)
    return noise
