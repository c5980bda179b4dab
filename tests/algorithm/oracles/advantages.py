"""Advantage estimators in plain loops over rows, written from their papers. Shares no code with agentrl.

An oracle takes the rows of a batch and its arguments, and gives one array a row: advantages, value targets (or None), and
where the advantage must be 0 without any rounding.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.algorithm.oracles.batches import Array, Row

Key = tuple[int, int]
Place = tuple[int, int]

GAMMAS = [0.0, 0.5, 0.9, 1.0]
ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "gae": {"gamma": GAMMAS, "lam": GAMMAS, "whitened": [True, False]},
    "gae_turns": {"gamma": GAMMAS, "lam": GAMMAS, "whitened": [True, False]},
    "gigpo": {"gamma": GAMMAS, "weight": [0.0, 0.5, 2.0], "divide": [True, False]},
    "gpg": {"f_norm": [0.5, 2.0]},
    "grpo": {"eps": [1e-6, 1e-3, 1.0]},
    "max_variance": {"k": [2, 3, 5]},
    "multi_reward": {"eps": [1e-6, 1e-3, 1.0], "whitened": [True, False]},
    "pass_at_k": {"k": [1, 2, 3, 5], "eps": [1e-6, 1e-3, 1.0]},
    "reinforce_pp": {"gamma": GAMMAS},
    "turn_returns": {"gamma": GAMMAS, "divide": [True, False]},
}
"""Estimator -> values that its arguments are drawn from; one that is not drawn stays at its default."""


@dataclass
class Out:
    advantages: list[Array]
    exact: list[Array]
    returns: list[Array] | None = None


def empty(rows: list[Row]) -> list[Array]:
    return [np.zeros(len(row.mask)) for row in rows]


def never(rows: list[Row]) -> list[Array]:
    return [np.zeros(len(row.mask), dtype=bool) for row in rows]


def scored(rows: list[Row]) -> dict[int, dict[Key, list[int]]]:
    """group -> episode -> its rows in order; scored episodes only."""
    found: dict[int, dict[Key, list[int]]] = {}
    for number, row in enumerate(rows):
        if not math.isnan(row.reward):
            found.setdefault(row.group, {}).setdefault((row.group, row.member), []).append(number)
    return found


def flat_same(values: Sequence[float]) -> bool:
    return max(values) == min(values)


def std(values: Sequence[float]) -> float:
    return float(np.std(np.array(values), ddof=1)) if len(values) > 1 else 0.0


# ---- one number an episode


def by_episode(rows: list[Row], rule: Callable[[list[float], list[int]], list[float]]) -> Out:
    """`rule`: rewards and sampled lengths of a group's scored episodes -> an advantage each."""
    out, exact = empty(rows), never(rows)
    for members in scored(rows).values():
        members = dict(sorted(members.items()))
        rewards = [rows[numbers[0]].reward for numbers in members.values()]
        lengths = [sum(int(rows[n].mask.sum()) for n in numbers) for numbers in members.values()]
        for numbers, value in zip(members.values(), rule(rewards, lengths), strict=True):
            for n in numbers:
                out[n][rows[n].mask] = value
                exact[n][:] = flat_same(rewards)
    return Out(out, exact)


def grpo(rows: list[Row], eps: float = 1e-6) -> Out:
    return by_episode(rows, lambda r, _: [(x - np.mean(r)) / (std(r) + eps) for x in r])


def dr_grpo(rows: list[Row]) -> Out:
    return by_episode(rows, lambda r, _: [x - float(np.mean(r)) for x in r])


def rloo(rows: list[Row]) -> Out:
    def rule(r: list[float], _: list[int]) -> list[float]:
        return [x - float(np.mean(r[:i] + r[i + 1 :])) if len(r) > 1 else 0.0 for i, x in enumerate(r)]

    return by_episode(rows, rule)


def opo(rows: list[Row]) -> Out:
    def rule(r: list[float], lengths: list[int]) -> list[float]:
        baseline = sum(n * x for n, x in zip(lengths, r, strict=True)) / max(sum(lengths), 1)
        return [x - baseline for x in r]

    return by_episode(rows, rule)


def gpg(rows: list[Row], f_norm: float = 1.0) -> Out:
    groups = [[rows[n[0]].reward for n in members.values()] for members in scored(rows).values()]
    total = sum(len(r) for r in groups)
    silent = sum(len(r) for r in groups if flat_same(r))
    alpha = total / (total - silent) if total > silent else 1.0
    return by_episode(rows, lambda r, _: [alpha * (x - float(np.mean(r))) / f_norm for x in r])


def maxrl(rows: list[Row]) -> Out:
    return by_episode(rows, lambda r, _: [(x - float(np.mean(r))) / (float(np.mean(np.abs(r))) or 1.0) for x in r])


def max_variance(rows: list[Row], k: int = 4) -> Out:
    """By listing every subset."""

    def rule(r: list[float], _: list[int]) -> list[float]:
        subsets = list(itertools.combinations(range(len(r)), min(k, len(r))))
        spread = max(float(np.var([r[i] for i in one])) for one in subsets)
        best = [one for one in subsets if np.var([r[i] for i in one]) >= (1 - 1e-9) * spread]
        ranked = sorted(range(len(r)), key=lambda i: (r[i], i))
        for low in range(len(best[0]) + 1):
            ends = set(ranked[:low] + ranked[len(r) - len(best[0]) + low :])
            if any(set(one) == ends for one in best):
                break
        mine = [r[i] for i in sorted(ends)]
        scale = len(r) / len(mine) / (std(mine) + 1e-6)
        return [scale * (x - float(np.mean(mine))) if i in ends else 0.0 for i, x in enumerate(r)]

    return by_episode(rows, rule)


def remax(rows: list[Row]) -> Out:
    out = empty(rows)
    for members in scored(rows).values():
        for n in itertools.chain(*members.values()):
            out[n][rows[n].mask] = rows[n].reward - rows[n].baseline
    return Out(out, never(rows))


def pass_at_k(rows: list[Row], k: int = 4, eps: float = 1e-6) -> Out:
    """By listing every k-subset."""

    def rule(r: list[float], _: list[int]) -> list[float]:
        subsets = list(itertools.combinations(range(len(r)), min(k, len(r))))
        best = [max(r[i] for i in subset) for subset in subsets]
        mean, deviation = float(np.mean(best)), float(np.std(best))
        return [
            (float(np.mean([b for b, s in zip(best, subsets, strict=True) if i in s])) - mean) / (deviation + eps)
            for i in range(len(r))
        ]

    return by_episode(rows, rule)


def multi_reward(rows: list[Row], weights: list[float], eps: float = 1e-6, whitened: bool = True) -> Out:
    out, exact = empty(rows), never(rows)
    sums: dict[Key, float] = {}
    silent: dict[Key, bool] = {}
    for members in scored(rows).values():
        columns = np.array([rows[n[0]].terms for n in members.values()])
        total = np.zeros(len(members))
        differs = False
        for column, weight in zip(columns.T, weights, strict=True):
            known = column[~np.isnan(column)]
            if len(known) and not flat_same(known.tolist()):
                differs = True
                total += np.where(np.isnan(column), 0.0, weight * (column - known.mean()) / (std(known.tolist()) + eps))
        for key, value in zip(members, total, strict=True):
            sums[key], silent[key] = float(value), not differs
    if whitened and sums:
        all_of = list(sums.values())
        mean, deviation = float(np.mean(all_of)), std(all_of)
        sums = {key: (value - mean) / (deviation + eps) for key, value in sums.items()}
    for n, row in enumerate(rows):
        if (row.group, row.member) in sums:
            out[n][row.mask] = sums[row.group, row.member]
            exact[n][:] = silent[row.group, row.member]
    return Out(out, exact)


# ---- recursions over an episode


def steps(rows: list[Row], numbers: list[int]) -> list[tuple[Place, float]]:
    """The sampled tokens of an episode over its ledgers, in the order of its turns, each with what it earned."""
    positions = sorted(((n, t) for n in numbers for t in range(len(rows[n].mask))), key=lambda at: rows[at[0]].turns[at[1]])
    sampled = [place for place in positions if rows[place[0]].mask[place[1]]]
    earned = dict.fromkeys(sampled, 0.0)
    latest = sampled[0] if sampled else None
    for n, t in positions:
        if rows[n].mask[t]:
            latest = (n, t)
        if latest is not None:
            earned[latest] += float(rows[n].token_rewards[t])
    return list(earned.items())


def all_episodes(rows: list[Row]) -> list[list[int]]:
    return [numbers for members in scored(rows).values() for numbers in members.values()]


def whiten_rows(rows: list[Row], column: list[Array], eps: float = 1e-8) -> list[Array]:
    """Over the sampled tokens of scored episodes."""
    taken = [row.mask & (not math.isnan(row.reward)) for row in rows]
    kept = np.concatenate([values[mask] for values, mask in zip(column, taken, strict=True)])
    if len(kept) < 2:
        return empty(rows)
    mean, variance = kept.mean(), kept.var(ddof=1)
    return [np.where(mask, (v - mean) / math.sqrt(variance + eps), 0.0) for v, mask in zip(column, taken, strict=True)]


def gae(rows: list[Row], gamma: float = 1.0, lam: float = 1.0, whitened: bool = True) -> Out:
    out = empty(rows)
    returns = [row.mask * row.values for row in rows]
    for numbers in all_episodes(rows):
        value_after = advantage_after = 0.0
        for (n, t), reward in reversed(steps(rows, numbers)):
            value = float(rows[n].values[t])
            advantage = reward + gamma * value_after - value + gamma * lam * advantage_after
            out[n][t], returns[n][t] = advantage, advantage + value
            value_after, advantage_after = value, advantage
    return Out(whiten_rows(rows, out) if whitened else out, never(rows), returns)


def reinforce_pp(rows: list[Row], gamma: float = 1.0) -> Out:
    out = empty(rows)
    for numbers in all_episodes(rows):
        after = 0.0
        for (n, t), reward in reversed(steps(rows, numbers)):
            after = out[n][t] = reward + gamma * after
    return Out(whiten_rows(rows, out), never(rows), out)


def reinforce_pp_baseline(rows: list[Row]) -> Out:
    return Out(whiten_rows(rows, dr_grpo(rows).advantages), never(rows))


# ---- turns


@dataclass
class Turn:
    group: int
    number: int
    anchor: int
    positions: list[Place]
    reward: float
    to_go: float = 0.0
    last: bool = False


def turns(rows: list[Row], gamma: float) -> list[Turn]:
    found: list[Turn] = []
    for numbers in all_episodes(rows):
        mine: list[Turn] = []
        for (n, t), reward in steps(rows, numbers):
            row = rows[n]
            if not mine or mine[-1].number != row.turns[t]:
                mine.append(Turn(row.group, int(row.turns[t]), int(row.anchors[t]), [], 0.0))
            mine[-1].positions.append((n, t))
            mine[-1].reward += reward
        after = 0.0
        for turn in reversed(mine):
            after = turn.to_go = turn.reward + gamma * after
        if mine:
            mine[-1].last = True
        found += mine
    return found


def compared(rows: list[Row], found: list[Turn], key: Callable[[Turn], int], divide: bool) -> Out:
    out, exact, returns = empty(rows), never(rows), empty(rows)
    for turn in found:
        others = [other.to_go for other in found if (other.group, key(other)) == (turn.group, key(turn))]
        value = turn.to_go - float(np.mean(others))
        value = value / (std(others) + 1e-6) if divide else value
        for n, t in turn.positions:
            out[n][t], exact[n][t], returns[n][t] = value, flat_same(others), turn.to_go
    return Out(out, exact, returns)


def gae_turns(rows: list[Row], gamma: float = 1.0, lam: float = 1.0, whitened: bool = True) -> Out:
    out = empty(rows)
    returns = [row.mask * row.values for row in rows]
    value_after = advantage_after = 0.0
    for turn in reversed(turns(rows, 0.0)):
        first = turn.positions[0]
        value = float(rows[first[0]].values[first[1]])
        if turn.last:
            value_after = advantage_after = 0.0
        advantage = turn.reward + gamma * value_after - value + gamma * lam * advantage_after
        for n, t in turn.positions:
            out[n][t], returns[n][t] = advantage, advantage + value
        value_after, advantage_after = value, advantage
    return Out(whiten_rows(rows, out) if whitened else out, never(rows), returns)


def turn_returns(rows: list[Row], gamma: float = 1.0, divide: bool = True) -> Out:
    return compared(rows, turns(rows, gamma), lambda turn: turn.number, divide)


def gigpo(rows: list[Row], gamma: float = 0.95, weight: float = 1.0, divide: bool = True) -> Out:
    whole = grpo(rows) if divide else dr_grpo(rows)
    step = compared(rows, turns(rows, gamma), lambda turn: turn.anchor, divide)
    return Out(
        [a + weight * b for a, b in zip(whole.advantages, step.advantages, strict=True)],
        [a & b for a, b in zip(whole.exact, step.exact, strict=True)],
    )
