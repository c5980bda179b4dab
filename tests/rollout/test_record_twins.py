"""Replays of calls in a recorded run: scored as without a record, and once more from the record, without the environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl.data.trajectory import Trajectory
from agentrl.env import Message, Task, ToolCall
from agentrl.reward import Context
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.episode import score_episode
from agentrl.rollout.replay import Recorder, Replayer
from agentrl.rollout.tape import EpisodeIO, Recorded, RecordWriter, digest, in_episode
from agentrl.utils.errors import ReplayError
from tests.reward.rounds_env import Cabinet, Guest, by_round, played, put, swap, task_of

Scored = list[tuple[float | None, str]]


class Chatty(Cabinet):
    """Its user listens: what it leaves in a drawer depends on the policy's words."""

    scripted = False

    async def user_reply(self, message: Message) -> list[Message] | None:
        self.drawers.setdefault("heard", []).append(message.content)
        return await super().user_reply(message)


class Opens(Guest):
    """Its user turns the cabinet before its first words, each time in another way."""

    def prompt(self, task: Task) -> Any:
        async def opening() -> list[Message]:
            return [Message("user", await self.ask_user() or "")]

        return opening()


class Frail(Cabinet):
    """Some of its twins fail, at their setup or at the first call of a round: `fails` is what each one does, in their order."""

    fails: ClassVar[list[str]] = []
    made = 0

    async def setup(self, task: Task) -> None:
        Frail.made += 1
        self.failing = f"{self.fails[Frail.made - 1]} {Frail.made}" if Frail.made <= len(self.fails) else ""
        if self.failing.startswith("setup"):
            raise OSError(self.failing)
        await super().setup(task)

    async def user_reply(self, message: Message) -> list[Message] | None:
        if self.failing.startswith("user"):
            raise OSError(self.failing)
        return await super().user_reply(message)

    async def teardown(self) -> None:
        """So it holds something, and is not copied."""


def gone(task: Task) -> Any:
    raise AssertionError("a replay builds no environment")


def right_calls(kind: type[Cabinet]) -> list[list[ToolCall]]:
    return [[put("a", "x")], [swap("a", "guest" if issubclass(kind, Guest) else "b")], [put("a", "y")]]


def episodes(kind: type[Cabinet]) -> list[Trajectory]:
    """Right in all rounds; in all but the second; in a round fewer; and a task whose gold the environment refuses."""
    gold = right_calls(kind)
    task = task_of(gold, brings={} if issubclass(kind, Guest) else {"1": ["swap"]})
    refused = task_of([[put("a", "x")], [ToolCall("take", {"drawer": "none"})]])
    right = [[[call] for call in calls] for calls in gold]
    return [
        played(task, right, kind()),
        played(task, [right[0], [[put("b", "x")]], right[2]], kind()),
        played(task, right[:2], kind()),
        played(refused, [right[0], []], kind()),
    ]


def scores(io: EpisodeIO, make: Any, records: list[Trajectory], backwards: bool = False) -> Scored:
    scorer = by_round(make=make, through=io.scoring)
    found = {}
    for number, record in sorted(enumerate(records), reverse=backwards):
        with in_episode(f"heldout0.m{number}"):
            score = scorer.score(record)
        found[number] = (score.value, json.dumps(score.evidence))
    return [found[number] for number in range(len(records))]


def recorded(path: Path, make: Any, records: list[Trajectory]) -> tuple[Scored, Callable[[], Replayer]]:
    """Scores under a record, and what replays it."""
    recorder = Recorder(path / "calls.jsonl")
    found = scores(recorder, make, records)
    recorder.close()
    return found, lambda: Replayer(Recorded.read(path / "calls.jsonl"))


@pytest.mark.parametrize("kind", [Cabinet, Chatty, Guest, Opens])
def test_a_record_changes_no_score_and_holds_what_a_replay_needs(kind: type[Cabinet], tmp_path: Path) -> None:
    """Tools that come with the user's turn, a user who listens, one that is a model and makes calls of its own (before the first
    turn too), gold that is refused. A replay may score the members of a group in another order."""
    made = episodes(kind)
    plain = scores(EpisodeIO(), lambda task: kind(), made)
    assert [value for value, _ in plain] == [1, 0, 1, None] and "refused gold call 2 of 2, take" in plain[-1][1]
    asked = Guest.asked
    live, replayer = recorded(tmp_path, lambda task: kind(), made)
    assert live == plain
    assert scores(replayer(), gone, made) == plain
    assert scores(replayer(), gone, made, backwards=True) == plain
    assert Guest.asked == asked


@pytest.mark.parametrize(
    ("fails", "values"),
    [
        (["setup", "setup", "setup"], [None, None, None, 1]),  # the gold's twin of the first three
        (["user", "", "setup", "user"], [None, None, None, 1]),  # of the first member's gold, of the next two's own calls
    ],
)
def test_an_environment_that_failed_fails_again_for_the_same_episodes(
    fails: list[str], values: list[float | None], tmp_path: Path
) -> None:
    """In whichever order they are scored; and where one of a group failed, the others' are right."""
    Frail.fails, Frail.made = [], 0
    gold = right_calls(Cabinet)
    made = [played(task_of(gold), [[[call] for call in calls] for calls in gold], Frail())] * 4
    Frail.fails, Frail.made = fails, 0
    live, replayer = recorded(tmp_path, lambda task: Frail(), made)
    assert [value for value, _ in live] == values
    for (_, evidence), word, number in zip(live, [fail for fail in fails if fail], [1, 2, 3, 4], strict=False):
        place = number if "" not in fails or number == 1 else number + 1
        assert f"the replay environment failed: OSError: {word} {place}" in evidence
    assert scores(replayer(), gone, made) == live
    assert scores(replayer(), gone, made, backwards=True) == live


def test_the_rounds_before_a_fault_are_scored_from_the_record_as_well(tmp_path: Path) -> None:
    Frail.fails, Frail.made = [], 0
    gold = right_calls(Cabinet)
    made = [played(task_of(gold), [[[call] for call in calls] for calls in gold], Frail())]
    Frail.fails, Frail.made = ["user"], 0
    live, replayer = recorded(tmp_path, lambda task: Frail(), made)
    parts = json.loads(live[0][1])["root"]["parts"]
    assert [part["value"] for part in parts] == [1, None, None]
    assert scores(replayer(), gone, made) == live


def test_what_a_record_lacks_ends_the_replay_and_is_no_outage(tmp_path: Path) -> None:
    """Another course than the recorded one, and another task."""
    made = episodes(Cabinet)
    _, replayer = recorded(tmp_path, lambda task: Cabinet(), made[:1])
    with pytest.raises(ReplayError, match=r"episode heldout0\.m0, .* expected one of the recorded calls"):
        scores(replayer(), gone, made[1:2])
    with pytest.raises(ReplayError, match=r"heldout0\.m0: it has no replays of calls of task c .*record it again"):
        scores(replayer(), gone, made[3:])


def test_a_record_of_an_older_version_is_refused_by_name(tmp_path: Path) -> None:
    """Those had an environment's steps, found by all that had been done before."""
    record = played(task_of([[put("a", "x")]]), [[[put("a", "x")]]])
    writer = RecordWriter(tmp_path / "calls.jsonl")
    row = {name: getattr(record.task, name) for name in record.task.__dataclass_fields__}
    writer.add("", "replay_env", 1, "twin", {"scripted": True, "talks": True}, asked=digest([row, "twin"]))
    writer.close()
    scorer = by_round(through=Replayer(Recorded.read(tmp_path / "calls.jsonl")).scoring, make=gone)
    with pytest.raises(ReplayError, match=r"calls\.jsonl: .* by an older version.*; record it again"):
        scorer.score(record)


def test_a_spec_that_replays_nothing_is_recorded_as_it_is() -> None:
    context = Context()
    assert EpisodeIO().scoring(context) == context


async def test_an_episode_of_which_the_scoring_took_too_long_is_stored_whole(tmp_path: Path) -> None:
    """A replay cannot know when a timeout fires."""

    class Hangs(Cabinet):
        async def setup(self, task: Task) -> None:
            await asyncio.sleep(5)

    recorder = Recorder(tmp_path / "calls.jsonl")
    episode = episodes(Cabinet)[0]
    scorer = by_round(make=lambda task: Hangs(), through=recorder.scoring)
    scorer.timeout = 0.05
    with in_episode("heldout0.m0"):
        await score_episode(episode, scorer, "heldout0.m0", Watch(1.0))
    assert episode.reward is None and "reward spec rounds" in str(episode.error)
    recorder.ended("heldout0.m0", episode)
    recorder.close()
    again = Replayer(Recorded.read(tmp_path / "calls.jsonl")).ready("heldout0.m0")
    assert again is not None and again.to_json() == episode.to_json()


def test_two_environments_of_a_run_with_the_same_tasks_have_answers_of_their_own(tmp_path: Path) -> None:
    """As one that is there twice, with other parameters."""

    class Loud(Cabinet):
        async def setup(self, task: Task) -> None:
            await super().setup(task)
            self.drawers["a"] = ["old"]

    gold = right_calls(Cabinet)
    made = {kind: played(task_of(gold), [[[call] for call in calls] for calls in gold], kind()) for kind in (Cabinet, Loud)}

    def found(io: EpisodeIO, live: bool) -> list[tuple[float | None, Any]]:
        scorers = [by_round(make=(lambda task, kind=kind: kind()) if live else gone, through=io.scoring) for kind in made]
        scored = [scorer.score(record) for scorer, record in zip(scorers, made.values(), strict=True)]
        return [(score.value, score.evidence) for score in scored]

    recorder = Recorder(tmp_path / "calls.jsonl")
    live = found(recorder, True)
    recorder.close()
    assert [value for value, _ in live] == [1, 1]
    assert found(Replayer(Recorded.read(tmp_path / "calls.jsonl")), False) == live
