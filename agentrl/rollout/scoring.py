"""Finished episodes and their scores: of one by itself, of a group together, and what becomes of one whose scoring fails."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.deadline import LateError
from agentrl.errors import HungError
from agentrl.reward import Score, Scorer
from agentrl.rollout.clock import Watch
from agentrl.spans import span
from agentrl.trajectory import StopReason, Trajectory


async def score_episode(trajectory: Trajectory, scorer: Scorer, key: str, watch: Watch) -> None:
    """Score the finished episode `key` by itself, once."""
    with watch.waits(key, lambda: f"its score by reward spec {scorer.name}"), span("scoring", scorer.name, track=key) as opened:
        await _score(trajectory, scorer)
        if opened is not None:
            opened.set(reward=trajectory.reward, success=None if trajectory.success is None else float(trajectory.success))


async def _score(trajectory: Trajectory, scorer: Scorer) -> None:
    try:
        _apply(trajectory, await scorer.ascore(trajectory))
    except (LateError, HungError) as fault:
        _unscored(trajectory, scorer, str(fault))


def _unscored(trajectory: Trajectory, scorer: Scorer, error: str) -> None:
    """Mark an episode whose scoring failed: the infrastructure's fault, so it has no reward and is tried again."""
    trajectory.stop, trajectory.error = StopReason.ENV_ERROR, error
    trajectory.cause = {"blame": "infrastructure"}
    _apply(trajectory, Score(None, evidence={"unscored": error}, metrics=dict.fromkeys(scorer.ids)))


def scoring_failed(trajectory: Trajectory) -> bool:
    """Whether the scoring itself failed (took too long, say), so that the episode has no score."""
    return isinstance(trajectory.evidence, dict) and trajectory.evidence.keys() == {"unscored"}


async def score_group(trajectories: Sequence[Trajectory], scorer: Scorer) -> None:
    """Score the members of a group again, together, because the group leaves of a spec compare them."""
    try:
        with span("scoring", f"{scorer.name} of a group", track="groups"):
            scores = await scorer.ascore_group(trajectories)
    except (LateError, HungError) as fault:
        for trajectory in trajectories:
            _unscored(trajectory, scorer, str(fault))
        return
    for trajectory, score in zip(trajectories, scores, strict=True):
        _apply(trajectory, score)


def _apply(trajectory: Trajectory, score: Score) -> None:
    if trajectory.stored is not None:
        trajectory.stored.whole = False
    trajectory.reward, trajectory.success = score.value, score.success
    trajectory.evidence = score.evidence
    trajectory.metrics = dict(score.metrics)
    for turn in trajectory.turns:
        turn.reward = score.turns.get(turn.index)
