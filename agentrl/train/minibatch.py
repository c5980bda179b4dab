"""Which rows share an optimizer step, by what their losses are divided, and which of them need computing at all.

All of it is settled on the driver, over the whole batch, in this order: minibatches are cut over episodes, their counts
are taken from every row, and only then rows that cannot have a gradient are left out. So leaving them out saves time and
changes no step.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.algorithm import POLICY_LOSSES, Denominators, correction
from agentrl.algorithm.ragged import row_counts
from agentrl.batch.rows import jagged, offsets_of
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.train.micro import has


def episodes_of(batch: TensorDict) -> np.ndarray:
    """The episode of each row, int64 [N], numbered by first appearance: rows with one (group, member) are one episode."""
    keys = np.stack([np.asarray(batch.get("group")), np.asarray(batch.get("member"))], axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[inverse.reshape(-1)], dtype=np.int64)


def cut(batch: TensorDict, algorithm: AlgorithmConfig, seed: int, step: int) -> list[np.ndarray]:
    """The rows of each minibatch: all rows of at most `algorithm.minibatch` episodes, by seed and step."""
    episode = episodes_of(batch)
    count = int(episode.max()) + 1 if len(episode) else 0
    groups = None
    if algorithm.groups == "kept":
        groups = np.zeros(count, dtype=np.int64)
        groups[episode] = np.asarray(batch.get("group"))
    order = np.argsort(episode, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(episode, minlength=count))[:-1]) if count else []
    parts = shuffled(count, algorithm.minibatch, seed, step, groups)
    return [np.concatenate([rows[number] for number in part]) for part in parts]


def shuffled(count: int, size: int, seed: int, step: int, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """`count` episodes in random order, cut into the least number of nearly equal parts of at most `size`.

    With `groups` (a number an episode) whole groups in random order fill parts of at most `size` episodes; only a
    group of more than that is cut.
    """
    if count == 0:
        return []
    rng = np.random.default_rng([seed, step])
    if groups is None:
        return np.array_split(rng.permutation(count), -(-count // size))
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    parts: list[list[int]] = [[]]
    for number in rng.permutation(len(members)):
        for start in range(0, len(members[number]), size):
            piece = members[number][start : start + size].tolist()
            if parts[-1] and len(parts[-1]) + len(piece) > size:
                parts.append([])
            parts[-1] += piece
    return [np.asarray(part, dtype=np.int64) for part in parts]


def proximal_of(batch: TensorDict) -> torch.Tensor:
    """Logprobs of the proximal policy, a ragged column: `old_logprobs` where they were recomputed, else the engine's."""
    column: torch.Tensor = batch.get("old_logprobs" if has(batch, "old_logprobs") else "logprobs")
    return column


def with_policies(batch: TensorDict, algorithm: AlgorithmConfig) -> TensorDict:
    """The batch with `old_logprobs` only where the proximal policy is to be recomputed, and `weights` where there is an
    off-policy correction.

    Raises ConfigError where the proximal policy is to be recomputed and was not.
    """
    out: TensorDict = batch.copy()
    if algorithm.proximal == "behaviour" and has(out, "old_logprobs"):
        del out["old_logprobs"]
    if algorithm.proximal == "recompute" and not has(out, "old_logprobs"):
        raise ConfigError('algorithm.proximal = "recompute": the batch has no column old_logprobs (Actor.compute_logprob)')
    if algorithm.correction is None:
        return out
    rule = correction(algorithm.correction.name, algorithm.correction.args)
    column = out.get("sampled")
    offsets = offsets_of(column)
    proximal, behaviour = proximal_of(out).values(), out.get("logprobs").values()
    return out.update({"weights": jagged(rule(proximal, behaviour, column.values(), offsets), offsets)})


def trained_tokens(batch: TensorDict) -> torch.Tensor:
    """The tokens that are trained, bool [T]: sampled, less those that an off-policy correction rejects."""
    sampled: torch.Tensor = batch.get("sampled").values()
    return sampled & (batch.get("weights").values() > 0) if has(batch, "weights") else sampled


def tokens_of_rows(mask: torch.Tensor, offsets: torch.Tensor) -> np.ndarray:
    """How many tokens of each row are marked, int64 [N], without a number a token in between."""
    return row_counts(mask, offsets).numpy()


def counted(batch: TensorDict, parts: list[np.ndarray], length: int | None = None) -> tuple[TensorDict, tuple[Denominators, ...]]:
    """The batch with the row column `episode_tokens` int64 [N] (trained tokens of the row's episode, over all of its
    rows), and the denominators of each minibatch."""
    per_row = tokens_of_rows(trained_tokens(batch), offsets_of(batch.get("sampled")))
    episode = episodes_of(batch)
    per_episode = np.bincount(episode, weights=per_row).astype(np.int64)
    counts = []
    for rows in parts:
        tokens = int(per_row[rows].sum())
        alive = int((per_episode[np.unique(episode[rows])] > 0).sum())
        counts.append(Denominators(float(tokens), float(alive), float(length or 1)))
    out: TensorDict = batch.copy()
    return out.update({"episode_tokens": torch.from_numpy(per_episode[episode])}), tuple(counts)


def teaches(batch: TensorDict, algorithm: AlgorithmConfig) -> np.ndarray:
    """Rows that can have a gradient, bool [N]: those with a trained token on which a term of the loss is not zero.

    Every policy loss is zero on a row whose advantages are, but one with the trait "moves_picked" on the tokens picked for
    it; an entropy bonus or a KL term in the loss moves all of them.
    """
    alive = trained_tokens(batch)
    if not (algorithm.entropy_bonus > 0 or (algorithm.kl.coef > 0 and algorithm.kl.where == "loss")):
        moved = batch.get("advantages").values() != 0
        if "moves_picked" in POLICY_LOSSES.entry(algorithm.loss.name).traits and has(batch, "picked"):
            moved = moved | batch.get("picked").values()
        alive = alive & moved
    return tokens_of_rows(alive, offsets_of(batch.get("sampled"))) > 0


def without_idle_rows(batch: TensorDict, parts: list[np.ndarray], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """What is left of each minibatch (possibly nothing) without the rows that cannot have a gradient.

    The first minibatch keeps at least one row, its shortest with a sampled token: trainer and engine are compared there.
    The batch itself stays as it is: rows of no minibatch are sent to no rank.
    """
    keep = teaches(batch, algorithm)
    if parts and not keep[parts[0]].any():
        offsets = offsets_of(batch.get("sampled"))
        sampled = tokens_of_rows(batch.get("sampled").values(), offsets)[parts[0]]
        tokens = offsets.diff().numpy()[parts[0]]
        keep[parts[0][np.lexsort((tokens, sampled == 0))[0]]] = True
    return [rows[keep[rows]] for rows in parts]
