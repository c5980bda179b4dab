"""Replays by round of an environment elsewhere: its user is heard, and scores are those of the environment here."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentrl.contrib.remote_envs import client as link
from agentrl.contrib.remote_envs.client import Link, RemoteEnv
from agentrl.contrib.remote_envs.sessions import SessionLimits
from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.env import Message, Task, ToolCall, tool
from agentrl.env.address import EnvRequest
from agentrl.env.spaces import run_sync
from agentrl.reward import Scorer
from tests.contrib.remote_envs.served import TOKEN, Offer, Running
from tests.reward.rounds_env import Cabinet, Guest, by_round, played, put, swap, task_of


class Chatty(Cabinet):
    """What its user leaves in a drawer depends on the policy's words."""

    scripted = False

    async def user_reply(self, message: Message) -> list[Message] | None:
        self.drawers.setdefault("heard", []).append(message.content)
        return await super().user_reply(message)


class Leaves(Guest):
    """Its user may end the episode by a call of its own."""

    @tool(by="user", inline=True)
    def leave(self) -> str:
        """ends the episode"""
        self.finish()
        return "gone"


class Hurried(Cabinet):
    """One turn with calls a round: a second one is the episode's last, but for a replay, which makes one call a turn."""

    async def astep(self, action: Any) -> Any:
        before = self.trajectory.turns[-1:]
        if not self.replays and isinstance(action, Message) and before and before[0].message.tool_calls and action.tool_calls:
            self.finish()
        return await super().astep(action)


KINDS: dict[str, type[Cabinet]] = {kind.__name__: kind for kind in (Cabinet, Chatty, Guest, Hurried, Leaves)}


def offer() -> Offer:
    return Offer("tests/Cabinets-v0", lambda kind="Cabinet": KINDS[kind](scorer=None))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(offer(), SessionLimits()) as running:
        yield running


def maker(server: Running, kind: str) -> Callable[..., RemoteEnv]:
    return lambda task=None: RemoteEnv(Link(server.url, TOKEN), EnvRequest("tests/Cabinets-v0", {"kind": kind}), scorer=None)


GOLD = [[put("a", "x")], [swap("a", "b")], [put("b", "y")]]


def task_for(kind: str, gold: list[list[ToolCall]] = GOLD) -> Task:
    return task_of(gold, brings={} if issubclass(KINDS[kind], Guest) else {"1": ["swap"]})


def scored(scorer: Scorer, episode: Trajectory) -> Any:
    score = scorer.score(episode)
    return score.value, score.evidence


@pytest.mark.parametrize("kind", ["Cabinet", "Chatty", "Guest"])
def test_scores_by_round_over_http_are_those_in_process(kind: str, server: Running) -> None:
    """Gold, a wrong second round, nothing: the same values and evidence, also under and from a record."""
    there = maker(server, kind)
    right = [[[call] for call in calls] for calls in GOLD]
    refused = [GOLD[0], [ToolCall("take", {"drawer": "nowhere"})]]
    plays = [
        (task_for(kind), right),
        (task_for(kind), [right[0], [[put("b", "x")]], right[2]]),
        (task_for(kind), [[], [], []]),
        (task_for(kind, refused), right[:2]),
    ]
    episodes = []
    for task, rounds in plays:
        env = there()
        episodes.append(played(task, rounds, env))
        run_sync(env.aend(StopReason.MAX_TURNS))  # the guest would go on
    asked = Guest.asked
    here, over = by_round(make=lambda task: KINDS[kind]()), by_round(make=there)
    found = [scored(over, episode) for episode in episodes]
    assert [value for value, _ in found] == [1, 0, 0, None]
    assert found == [scored(here, episode) for episode in episodes]
    assert Guest.asked == asked
    assert not server.app.sessions.episodes


def test_a_limit_that_is_not_a_replays_is_lifted_there_too(server: Running) -> None:
    """Three gold calls in the first round, which the policy makes in one turn."""
    three = [put("a", "x"), put("a", "y"), put("b", "z")]
    there, task = maker(server, "Hurried"), task_for("Hurried", [three, [swap("a", "b")]])
    episodes = [played(task, [[calls], [[swap("a", "b")]]], there()) for calls in (three, three[:2])]
    assert [len(episode.turns) for episode in episodes] == [4, 4]
    for make in (lambda task: Hurried(), there):
        assert [scored(by_round(make=make), episode)[0] for episode in episodes] == [1, 0]


def test_gold_is_replayed_once_a_task_there_too_if_the_user_is_scripted(server: Running) -> None:
    for kind, replayed in (("Cabinet", 1), ("Chatty", 3)):
        there, built = maker(server, kind), []
        episodes = [played(task_for(kind), [[[call] for call in calls] for calls in GOLD], there()) for _ in range(3)]
        for number, episode in enumerate(episodes):  # of each member other words
            for turn in episode.turns:
                if not turn.message.tool_calls:
                    turn.message = Message("assistant", f"{turn.message.content} {number}")
        scorer = by_round("results.contains", make=lambda task, there=there, built=built: [built.append(1), there()][1])
        assert [scorer.score(episode).value for episode in episodes] == [1, 1, 1]
        assert len(built) == replayed


def test_forks_and_snapshots_know_of_the_user(server: Running) -> None:
    env = maker(server, "Cabinet")()
    env.reset(seed=0, options={"task": task_for("Cabinet")})
    assert env.has_user and "swap" not in env.toolbox
    env.step(Message("assistant", "", (put("a", "x"),)))
    before = env.snapshot()
    env.step("done 0")
    forked = env.fork()
    assert forked.has_user and "swap" in forked.toolbox and not forked.has_finished
    forked.step(Message("assistant", "", (ToolCall("lock", {}),)))
    assert forked.has_finished and not env.has_finished
    env.restore(before)
    assert env.has_user and not env.has_finished and "swap" not in env.toolbox
    for turn in ("done 0", swap("a", "b"), "done 1", put("b", "y"), "done 2"):
        env.step(turn if isinstance(turn, str) else Message("assistant", "", (turn,)))
    assert by_round(make=maker(server, "Cabinet")).score(env.trajectory).value == 1


def test_a_call_of_the_users_that_ends_the_episode_is_seen(server: Running) -> None:
    """Gold after it cannot be replayed, here or there."""
    gold = [[put("a", "x"), ToolCall("leave", {}), put("a", "y")]]
    task = task_of(gold)
    rounds = [[{**row, "by": "user"} if row["name"] == "leave" else row for row in task.gold["rounds"][0]]]
    task = Task(task.id, task.seed, task.split, task.data, {"rounds": rounds})
    episode = played(task, [[[put("a", "x")]]], Leaves())
    found = [scored(by_round(make=make), episode) for make in (lambda task: Leaves(), maker(server, "Leaves"))]
    assert found[0] == found[1] and found[0][0] is None
    assert "the replay environment ended after 2 of 3 replayed calls" in str(found[0][1])


def test_a_server_that_dies_in_a_replay_leaves_the_episode_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.1)
    server = Running(offer(), SessionLimits())
    steps: list[int] = []

    class Cut(RemoteEnv):
        async def astep(self, action: Any) -> Any:
            steps.append(len(steps))
            if len(steps) == 3:  # after the first round's call and its text
                server.close()
            return await super().astep(action)

    episode = played(task_for("Cabinet"), [[[call] for call in calls] for calls in GOLD])
    make = lambda task: Cut(Link(server.url, TOKEN), EnvRequest("tests/Cabinets-v0", {"kind": "Cabinet"}), scorer=None)  # noqa: E731
    score = by_round(make=make).score(episode)
    assert score.value is None and len(steps) == 3
    assert "the replay environment failed: RemoteEnvError: " + server.url in str(score.evidence)
