"""Trajectories to one TensorDict batch: one row per ledger, token columns unpadded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.data.expert_routing import free
from agentrl.data.rows import IMAGES, TRUNCATED, build, items_column, nested_tensor
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Spot, Trajectory, reward_spots, terminal_reward


def collate(
    trajectories: Sequence[Trajectory], groups: Sequence[int] | None = None, *, allow_unscored: bool = False
) -> TensorDict:
    """One batch of N rows (a row is a non-empty ledger), T_i tokens in row i.

    Ragged columns [N, T_i]: `token_ids` int32, `sampled` bool, `logprobs` float32, `versions` int32,
    `turns` int16, all as in the ledgers, and `rewards` float32 (placed by `reward.credit`; over a trajectory's rows they sum to
    its reward). If a ledger has `experts`, so does the batch: [N, T_i, routers, k], tokens without any marked as free
    (experts.FREE). If a ledger has images, `images` are those of each row, in order. Row columns [N]: `group` int64,
    `member` int64, `trajectory` int64 (index into the argument), `reward` float32 (the trajectory's reward, the same on all
    of its rows), `truncated` bool (the same).

    `groups[i]` is the group number of `trajectories[i]`; by default trajectories of one task form a
    group, numbered by first appearance (a member seen again opens a new one).

    Raises ValueError for an unscored trajectory (reward None): an infrastructure failure is never a
    reward and must be dropped before this point. With `allow_unscored` its rewards are NaN instead.
    """
    numbers = list(groups) if groups is not None else number_groups(trajectories)
    if len(numbers) != len(trajectories):
        raise ValueError(f"{len(numbers)} group numbers for {len(trajectories)} trajectories")
    ledgers: list[TokenLedger] = []
    rewards: list[list[tuple[int, float]]] = []
    rows: list[tuple[int, int, int, float, bool]] = []
    for index, trajectory in enumerate(trajectories):
        if trajectory.reward is None and not allow_unscored:
            raise ValueError(f"trajectory {index} (task {trajectory.task.id!r}) is unscored; drop it before collating")
        reward = float("nan") if trajectory.reward is None else trajectory.reward
        spots = _spots(trajectory)
        for place, ledger in enumerate(trajectory.ledgers):
            if len(ledger) == 0:
                continue
            ledgers.append(ledger)
            rewards.append([(token, amount) for at, token, amount in spots if at == place])
            rows.append((numbers[index], trajectory.member, index, reward, trajectory.truncated))
    return _batch(ledgers, rewards, rows)


def number_groups(trajectories: Sequence[Trajectory]) -> list[int]:
    """Group numbers by task, in order of first appearance; a (task, member) seen again opens a new group."""
    current: dict[tuple[str, str, int], int] = {}
    seen: set[tuple[int, int]] = set()
    numbers: list[int] = []
    opened = 0
    for trajectory in trajectories:
        task = (trajectory.env_id, trajectory.task.id, trajectory.task.seed)
        # A task can be drawn twice in a batch. Two episodes with one member number cannot be of one group, so a repeated
        # number starts the next.
        if task not in current or (current[task], trajectory.member) in seen:
            current[task] = opened
            opened += 1
        seen.add((current[task], trajectory.member))
        numbers.append(current[task])
    return numbers


def _spots(trajectory: Trajectory) -> list[Spot]:
    """The tokens that carry `trajectory.reward`, as (ledger, token, amount).

    The turns' rewards, and the rest of the episode's, go where `reward_spots` puts them. Ledgers without turns
    (transcripts) carry the whole reward on the last sampled token. A trajectory that sampled
    nothing has no token to carry a reward. If it is unscored, the rest is NaN.
    """
    total = float("nan") if trajectory.reward is None else trajectory.reward
    if any(turn.ledger >= 0 and turn.end >= 0 for turn in trajectory.turns):
        turns = {turn.index: turn.reward for turn in trajectory.turns if turn.reward is not None}
        return reward_spots(trajectory, terminal_reward(total, turns), turns)
    last = max((at for at, ledger in enumerate(trajectory.ledgers) if ledger.sampled_tokens), default=None)
    if last is None:
        return []
    return [(last, int(np.flatnonzero(trajectory.ledgers[last].sampled)[-1]), total)]


def _batch(
    ledgers: Sequence[TokenLedger],
    rewards: Sequence[Sequence[tuple[int, float]]],
    rows: Sequence[tuple[int, int, int, float, bool]],
) -> TensorDict:
    offsets = torch.zeros(len(ledgers) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor([len(ledger) for ledger in ledgers], dtype=torch.int64), 0, out=offsets[1:])
    starts, total = offsets[:-1].tolist(), int(offsets[-1])

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        """A column of all ledgers, written in place: no second array of its size is allocated."""
        values = torch.empty(total, dtype=dtype)
        flat = values.numpy()
        for start, ledger in zip(starts, ledgers, strict=True):
            flat[start : start + len(ledger)] = getattr(ledger, name)
        return nested_tensor(values, offsets)

    placed = torch.zeros(total)
    flat_rewards = placed.numpy()
    with np.errstate(over="ignore"):  # a reward beyond float32 becomes infinite; the learner then names its row
        for start, spots in zip(starts, rewards, strict=True):
            for token, amount in spots:
                flat_rewards[start + token] = np.float64(amount)
    experts = _experts(ledgers, starts, total)
    pictured = any(ledger.images for ledger in ledgers)
    return build(
        {
            **({} if experts is None else {"experts": nested_tensor(experts, offsets)}),
            **({IMAGES: items_column([ledger.images for ledger in ledgers])} if pictured else {}),
            "token_ids": column("token_ids", torch.int32),
            "sampled": column("sampled", torch.bool),
            "logprobs": column("logprobs", torch.float32),
            "versions": column("versions", torch.int32),
            "turns": column("turns", torch.int16),
            "rewards": nested_tensor(placed, offsets),
            "group": torch.tensor([row[0] for row in rows], dtype=torch.int64),
            "member": torch.tensor([row[1] for row in rows], dtype=torch.int64),
            "trajectory": torch.tensor([row[2] for row in rows], dtype=torch.int64),
            "reward": torch.tensor([row[3] for row in rows], dtype=torch.float32),
            TRUNCATED: torch.tensor([row[4] for row in rows], dtype=torch.bool),
        },
        len(ledgers),
    )


def _experts(ledgers: Sequence[TokenLedger], starts: Sequence[int], total: int) -> torch.Tensor | None:
    """The experts of all ledgers' tokens, [T, routers, k]; None if no ledger has any. Raises ValueError if they are of several
    models."""
    kinds = {(ledger.experts.shape[1:], ledger.experts.dtype.name) for ledger in ledgers if ledger.experts is not None}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ValueError(f"ledgers with experts of several models in one batch: {sorted(kinds)}")
    [(shape, kind)] = kinds
    out = free(torch.empty(0, *shape, dtype=getattr(torch, kind)), total)
    flat = out.numpy()
    for start, ledger in zip(starts, ledgers, strict=True):
        if ledger.experts is not None:
            flat[start : start + len(ledger.experts)] = ledger.experts
    return out
