"""Replays by round in a recorded run score as without a record, and as from the record alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "reward"))
from rounds_env import Cabinet, by_round, played, put, swap, task_of
from test_reward_rounds import Guest

from agentrl.errors import ReplayError
from agentrl.rollout.replay.play import Replayer
from agentrl.rollout.replay.record import Recorder
from agentrl.rollout.replay.tape import Recorded
from agentrl.trajectory import ToolCall, Trajectory


def episodes(kind: type[Cabinet]) -> list[Trajectory]:
    gold = [[put("a", "x")], [swap("a", "guest")], [put("a", "y")]]
    task = task_of(gold, brings={} if kind is Guest else {"1": ["swap"]})
    refused = task_of([[ToolCall("take", {"drawer": "none"})]])
    right = [[[call] for call in calls] for calls in gold]
    return [
        played(task, right, kind()),
        played(task, [right[0], [[put("b", "x")]], right[2]], kind()),
        played(task, right[:2], kind()),
        played(refused, [[]], kind()),
    ]


@pytest.mark.parametrize("kind", [Cabinet, Guest])
def test_a_record_changes_no_score_and_holds_what_a_replay_needs(kind: type[Cabinet], tmp_path: Path) -> None:
    made = episodes(kind)

    def scores(make: Any, order: int = 1) -> list[float | None]:
        scorer = by_round(make=make)
        return [scorer.score(episode).value for episode in made[::order]][::order]

    plain = scores(lambda task: kind())
    assert plain == [1, 0, 1, None]  # the last one's gold is refused
    recorder = Recorder(tmp_path / "calls.jsonl")
    assert scores(recorder.replay_env(lambda task: kind())) == plain
    recorder.close()
    replayer = Replayer(Recorded.read(tmp_path / "calls.jsonl"))
    never: Any = None
    assert scores(replayer.replay_env(never)) == plain
    assert scores(replayer.replay_env(never), -1) == plain  # whichever episode comes first


def test_what_a_record_lacks_ends_the_replay_and_is_no_outage(tmp_path: Path) -> None:
    """Another course than the recorded one, and a record of an older version."""
    right, *_ = made = episodes(Cabinet)
    recorder = Recorder(tmp_path / "calls.jsonl")
    by_round(make=recorder.replay_env(lambda task: Cabinet())).score(right)
    recorder.close()
    never: Any = None
    tape = Recorded.read(tmp_path / "calls.jsonl")
    with pytest.raises(ReplayError, match="expected one of the recorded calls"):
        by_round(make=Replayer(tape).replay_env(never)).score(made[1])
    for key, answer in tape.replay_envs.items():
        if isinstance(answer, dict) and "over" in answer:
            tape.replay_envs[key] = {"answers": answer["answers"]}
    with pytest.raises(
        ReplayError, match=r"calls\.jsonl: its replays of calls were recorded by an older version; record it again"
    ):
        by_round(make=Replayer(tape).replay_env(never)).score(right)
