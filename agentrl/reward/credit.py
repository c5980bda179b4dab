"""Credit assignment: from a Score to a reward for each token of each ledger."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentrl.reward.score import Score
from agentrl.trajectory import Trajectory, Turn

Spot = tuple[int, int, float]
"""Ledger, token, and the reward at that token."""


def token_rewards(trajectory: Trajectory, score: Score) -> list[npt.NDArray[np.float32]]:
    """One float32 array per ledger, of the ledger's length, zero except at emitted rewards (see `reward_spots`)."""
    columns = [np.zeros(len(ledger), dtype=np.float32) for ledger in trajectory.ledgers]
    for ledger, token, amount in reward_spots(trajectory, score):
        columns[ledger][token] = amount
    return columns


def reward_spots(trajectory: Trajectory, score: Score) -> list[Spot]:
    """The tokens that receive the rewards of a trajectory, at most one reward per token; their sum is `score.value`.

    A turn's reward is at the last token that the policy sampled in that turn (`Turn.ledger`, `Turn.end`),
    the terminal reward at that of the last sampled turn. The reward of a turn without sampled tokens goes to
    the next turn that has some, else to the last one before it, so that nothing is lost.
    Raises ValueError for a score without a value, and if a reward would be at a token that was not sampled
    or in a trajectory without sampled turns.
    """
    terminal = score.terminal
    if terminal is None:
        raise ValueError("an unscored trajectory has no rewards; it leaves the batch")
    sampled = [turn for turn in trajectory.turns if turn.ledger >= 0 and turn.end >= 0]
    if not sampled:
        if terminal != 0.0 or score.turns:
            raise ValueError("no turn of the trajectory was sampled, so no token can carry its reward")
        return []
    spots: dict[tuple[int, int], float] = {}
    for index, amount in score.turns.items():
        _add(spots, trajectory, _rewarded_turn(sampled, index), amount)
    _add(spots, trajectory, sampled[-1], terminal)
    return [(ledger, token, amount) for (ledger, token), amount in spots.items()]


def _rewarded_turn(sampled: list[Turn], index: int) -> Turn:
    return next((turn for turn in sampled if turn.index >= index), sampled[-1])


def _add(spots: dict[tuple[int, int], float], trajectory: Trajectory, turn: Turn, amount: float) -> None:
    if turn.ledger >= len(trajectory.ledgers) or turn.end >= len(trajectory.ledgers[turn.ledger]):
        raise ValueError(f"turn {turn.index} ends at token {turn.end} of ledger {turn.ledger}, which does not exist")
    if not trajectory.ledgers[turn.ledger].sampled[turn.end]:
        raise ValueError(f"turn {turn.index} ends at token {turn.end} of ledger {turn.ledger}: not a sampled token")
    place = (turn.ledger, turn.end)
    spots[place] = spots.get(place, 0.0) + amount
