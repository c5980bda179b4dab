"""Random ragged batches out of one integer: what `agentrl.trainer.algorithms` reads, as rows of small numpy arrays.

Drawn whole with numpy, because ten thousand of them are wanted. A batch has 1 to 6 groups of 1 to 6 members of 1 to 3 ledgers, of
0 to 7 tokens, some sampled; unscored members; groups without a difference; rewards that are not exact in
binary; rewards on tokens that were not sampled; rows of an episode that are not neighbours; members that branched off others.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.trainer.algorithms.base import AdvantageInput, LossInput

Array = np.ndarray


@dataclass
class Row:
    """One ledger. Arrays are [L]; `terms` [K]. `parent`: the member that this one branched off, before turn `branch_turn`."""

    group: int
    member: int
    reward: float
    baseline: float
    terms: Array
    mask: Array
    token_rewards: Array
    values: Array
    turns: Array
    anchors: Array
    parent: int = -1
    branch_turn: int = 0


KINDS = ("tenths", "thirds", "equal", "binary", "normal")


def some_reward(rng: np.random.Generator, kind: str, same: float) -> float:
    """A reward of one kind; `same` is that of a group without a difference."""
    if kind == "equal":
        return same
    if kind == "tenths":
        return int(rng.integers(-10, 11)) * 0.1
    if kind == "thirds":
        return int(rng.integers(0, 4)) / 3
    return float(rng.integers(0, 2)) if kind == "binary" else float(rng.normal()) * 3


def episode_rows(rng: np.random.Generator, group: int, member: int, reward: float, baseline: float, terms: Array) -> list[Row]:
    """The ledgers of one episode: turn numbers rise, also within a ledger's context, and mostly go on in the next one."""
    rows: list[Row] = []
    turn, dense = 0, rng.random() < 0.3
    ledgers, scored = int(rng.integers(1, 4)), not math.isnan(reward)
    for _ in range(ledgers):
        length = int(rng.choice([0, 1, 2, 3, 4, 5, 6, 7], p=[0.08, 0.12, 0.15, 0.15, 0.15, 0.15, 0.1, 0.1]))
        mask = rng.random(length) < (0.9 if dense else 0.5)
        steps = rng.random(length) < 0.3
        turns = turn + np.cumsum(steps)
        turn = int(turns[-1]) if length else turn
        if rng.random() < 0.03:
            turn = 0  # an agent's next conversation goes on beside the ones before
        pieces = np.where(rng.random(length) < 0.3, rng.integers(-5, 6, length) * 0.1, 0.0)
        if not scored:
            pieces = np.where(rng.random(length) < 0.5, np.nan, pieces)
        rows.append(
            Row(group, member, reward, baseline, terms, mask, pieces, rng.normal(size=length), turns, rng.integers(0, 3, length))
        )
    if scored and rng.random() < 0.7:  # the episode's reward, on any token of its last ledger
        last = rows[-1].token_rewards
        if len(last):
            last[int(rng.integers(0, len(last)))] += reward
    return rows


def drawn_rows(seed: int) -> list[Row]:
    """A batch."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    names = rng.permutation(20)
    width = int(rng.integers(1, 4))
    for g in range(int(rng.integers(1, 7))):
        kind, term_kind = rng.choice(KINDS), rng.choice(KINDS)
        same = float(rng.choice([0.1, 0.7, 1 / 3, -0.3, 1.0]))
        baseline = some_reward(rng, "tenths", same)
        for member in rng.permutation(9)[: int(rng.integers(1, 7))]:
            reward = math.nan if rng.random() < 0.12 else some_reward(rng, kind, same)
            terms = np.array([math.nan if rng.random() < 0.1 else some_reward(rng, term_kind, same) for _ in range(width)])
            rows += episode_rows(rng, int(names[g]), int(member), reward, baseline, terms)
    branched(np.random.default_rng([seed, 3]), rows)
    return apart(rng, rows) if rng.random() < 0.3 else rows


def branched(rng: np.random.Generator, rows: list[Row]) -> None:
    """In half of the groups some members branch off earlier ones, before a turn that is not their first: its number is then the
    first of the branch, and may be beyond the last of the member that it left."""
    for group in {row.group for row in rows}:
        begins: dict[int, int] = {}
        often = float(rng.choice([0.0, 0.7]))
        for member in dict.fromkeys(row.member for row in rows if row.group == group):
            parent = int(rng.choice(list(begins))) if begins and rng.random() < often else -1
            begins[member] = 0 if parent < 0 else begins[parent] + int(rng.integers(1, 4))
            for row in rows:
                if (row.group, row.member) == (group, member):
                    row.parent, row.branch_turn, row.turns = parent, begins[member], row.turns + begins[member]


def apart(rng: np.random.Generator, rows: list[Row]) -> list[Row]:
    """The same rows in another order, in which the ledgers of each episode still follow one another."""
    waiting: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        waiting.setdefault((row.group, row.member), []).append(row)
    order = [(row.group, row.member) for row in rows]
    return [waiting[order[i]].pop(0) for i in rng.permutation(len(order))]


def offsets_of(rows: list[Row]) -> torch.Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum([len(row.mask) for row in rows])]), dtype=torch.int64)


def advantage_input(rows: list[Row], dtype: torch.dtype) -> AdvantageInput:
    """The batch as tensors; reals in `dtype`."""

    def flat(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(row, name) for row in rows])).to(kind)

    def column(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=kind)

    return AdvantageInput(
        token_rewards=flat("token_rewards", dtype),
        mask=flat("mask", torch.bool),
        offsets=offsets_of(rows),
        group=column("group", torch.int64),
        reward=column("reward", dtype),
        values=flat("values", dtype),
        turns=flat("turns", torch.int64),
        member=column("member", torch.int64),
        baseline=column("baseline", dtype),
        terms=torch.from_numpy(np.stack([row.terms for row in rows])).to(dtype),
        anchors=flat("anchors", torch.int64),
        parent=column("parent", torch.int64),
        branch_turn=column("branch_turn", torch.int64),
    )


def single(rows: list[Row]) -> list[Row]:
    """The same with every real rounded to float32, so that an oracle in float64 sees what float32 columns hold."""
    for row in rows:
        row.reward, row.baseline = float(np.float32(row.reward)), float(np.float32(row.baseline))
        for name in ("terms", "token_rewards", "values"):
            setattr(row, name, getattr(row, name).astype(np.float32).astype(np.float64))
    return rows


@dataclass
class Tokens:
    """Rows padded to one width, [N, L]: log-probabilities of the same tokens under three policies."""

    new: Array
    old: Array
    behave: Array
    advantages: Array
    mask: Array
    there: Array
    picked: Array


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def drawn_tokens(seed: int) -> Tokens:
    """A micro-batch: log-probabilities out of random logits at a temperature of 0.5 to 2, some ratios extreme."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 9)), int(rng.integers(1, 8))
    lengths = rng.integers(0, width + 1, rows)
    there = np.arange(width)[None, :] < lengths[:, None]
    temperature, drift = rng.uniform(0.5, 2), rng.choice([0.0, 0.05, 0.5, 2.0])
    logits = rng.normal(size=(rows, width, 6)) * 2
    token = rng.integers(0, 6, (rows, width, 1))

    def policy(away: float) -> Array:
        moved = logits + away * rng.normal(size=logits.shape)
        return np.take_along_axis(log_softmax(moved / temperature), token, 2)[..., 0]

    new, old, behave = policy(drift), policy(0.0), policy(drift * 0.3)
    extreme = rng.random((rows, width)) < (0.1 if rng.random() < 0.2 else 0.0)
    new = np.where(extreme, new + rng.choice([-60.0, -25.0, 25.0, 60.0], (rows, width)), new)
    behave = np.where(extreme & (rng.random((rows, width)) < 0.5), behave - 30, behave)
    per_row = rng.random() < 0.6
    advantages = np.repeat(rng.normal(size=(rows, 1)), width, 1) if per_row else rng.normal(size=(rows, width))
    advantages = np.where(rng.random((rows, 1)) < 0.1, 0.0, advantages)
    mask = there & (rng.random((rows, width)) < rng.choice([0.6, 1.0]))
    return Tokens(new, old, behave, advantages, mask, there, rng.random((rows, width)) < 0.3)


def loss_input(tokens: Tokens) -> LossInput:
    """The same, flat, in float64, `logprobs` with a gradient."""
    flat = {
        name: torch.from_numpy(getattr(tokens, name)[tokens.there])
        for name in ("new", "old", "behave", "advantages", "mask", "picked")
    }
    lengths = tokens.there.sum(1)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return LossInput(
        flat["new"].requires_grad_(), flat["old"], flat["behave"], flat["advantages"], flat["mask"], offsets, flat["picked"]
    )
