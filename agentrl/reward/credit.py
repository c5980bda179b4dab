"""Credit assignment: from a Score to a reward for each token of each ledger."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentrl.reward.score import Score
from agentrl.trajectory import Trajectory, Turn

Spot = tuple[int, int, float]
"""Ledger, token, and a reward that falls there."""


def token_rewards(trajectory: Trajectory, score: Score) -> list[npt.NDArray[np.float32]]:
    """One float32 array a ledger, as long as the ledger, zero but where a reward is emitted (see `reward_spots`)."""
    columns = [np.zeros(len(ledger), dtype=np.float32) for ledger in trajectory.ledgers]
    for ledger, token, amount in reward_spots(trajectory, score):
        columns[ledger][token] = amount
    return columns


def reward_spots(trajectory: Trajectory, score: Score) -> list[Spot]:
    """Where the rewards of a trajectory lie, at most one a token; together they are `score.value`.

    A turn's reward lies on the last token that the policy sampled in that turn (`Turn.ledger`,
    `Turn.end`), the terminal reward on that of the last turn that sampled any. A turn that sampled nothing
    hands its reward to the next turn that did, or else to the last one before it, so that nothing is lost.
    Raises ValueError for a score without a value, and where a reward falls on a trajectory without a sampled
    turn or on a token that was not sampled.
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
        _add(spots, trajectory, _bearer(sampled, index), amount)
    _add(spots, trajectory, sampled[-1], terminal)
    return [(ledger, token, amount) for (ledger, token), amount in spots.items()]


def _bearer(sampled: list[Turn], index: int) -> Turn:
    return next((turn for turn in sampled if turn.index >= index), sampled[-1])


def _add(spots: dict[tuple[int, int], float], trajectory: Trajectory, turn: Turn, amount: float) -> None:
    if turn.ledger >= len(trajectory.ledgers) or turn.end >= len(trajectory.ledgers[turn.ledger]):
        raise ValueError(f"turn {turn.index} ends at token {turn.end} of ledger {turn.ledger}, which is not there")
    if not trajectory.ledgers[turn.ledger].sampled[turn.end]:
        raise ValueError(f"turn {turn.index} ends at token {turn.end} of ledger {turn.ledger}: not a sampled token")
    place = (turn.ledger, turn.end)
    spots[place] = spots.get(place, 0.0) + amount
