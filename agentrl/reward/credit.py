"""Credit assignment: from a Score to a reward for each token of each ledger."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentrl.reward.score import Score
from agentrl.trajectory import Trajectory, Turn


def token_rewards(trajectory: Trajectory, score: Score) -> list[npt.NDArray[np.float32]]:
    """One float32 array a ledger, as long as the ledger, zero but where a reward is emitted.

    A turn's reward lies on the last token that the policy sampled in that turn (`Turn.ledger`,
    `Turn.end`), the terminal reward on that of the last turn that sampled any. All entries add up to
    `score.value`. A turn that sampled nothing hands its reward to the next turn that did, or else to the
    last one before it, so that nothing is lost. Raises ValueError for a score without a value, and where
    a reward falls on a trajectory without a sampled turn or on a token that was not sampled.
    """
    terminal = score.terminal
    if terminal is None:
        raise ValueError("an unscored trajectory has no rewards; it leaves the batch")
    columns = [np.zeros(len(ledger), dtype=np.float64) for ledger in trajectory.ledgers]
    sampled = [turn for turn in trajectory.turns if turn.ledger >= 0 and turn.end >= 0]
    if not sampled:
        if terminal != 0.0 or score.turns:
            raise ValueError("no turn of the trajectory was sampled, so no token can carry its reward")
        return [column.astype(np.float32) for column in columns]
    for index, amount in score.turns.items():
        _add(columns, trajectory, _bearer(sampled, index), amount)
    _add(columns, trajectory, sampled[-1], terminal)
    return [column.astype(np.float32) for column in columns]


def _bearer(sampled: list[Turn], index: int) -> Turn:
    return next((turn for turn in sampled if turn.index >= index), sampled[-1])


def _add(columns: list[npt.NDArray[np.float64]], trajectory: Trajectory, turn: Turn, amount: float) -> None:
    if turn.ledger >= len(columns) or turn.end >= len(columns[turn.ledger]):
        raise ValueError(
            f"turn {turn.index} ends at token {turn.end} of ledger {turn.ledger}, which is not there"
        )
    if not trajectory.ledgers[turn.ledger].sampled[turn.end]:
        raise ValueError(
            f"turn {turn.index} ends at token {turn.end} of ledger {turn.ledger}: not a sampled token"
        )
    columns[turn.ledger][turn.end] += amount
