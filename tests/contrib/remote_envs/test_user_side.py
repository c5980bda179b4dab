"""Users with tools of their own on a server: their calls come back with the record, and replays put a recorded user there."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from agentrl.contrib.remote_envs import wire
from agentrl.contrib.remote_envs.client import Link, RemoteEnv
from agentrl.contrib.remote_envs.sessions import SessionLimits
from agentrl.data.trajectory import StopReason
from agentrl.env import Message, ToolCall
from agentrl.env.address import EnvRequest
from agentrl.env.users import RecordedUser, ScriptedUser
from agentrl.utils.errors import EnvError
from tests.contrib.remote_envs.served import TOKEN, Offer, Running
from tests.contrib.remote_envs.test_equal_episodes import row_of
from tests.env.phone import Phone


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(Offer("tests/Phone-v0", partial(Phone, scorer=None)), SessionLimits()) as running:
        yield running


def there(server: Running, **params: Any) -> RemoteEnv:
    return RemoteEnv(Link(server.url, TOKEN), EnvRequest("tests/Phone-v0", params), scorer=None)


SCRIPT = [
    "dead",
    [["press", {"button": "a"}], ["press", {"button": "none"}]],
    [["press", {"button": "b"}]],
    "now it blinks",
    {"parting": "bye"},
]
LINE = Message("assistant", "", (ToolCall("line", {"on": True}),))


def without_times(env: Any) -> dict[str, Any]:
    row = row_of(env.trajectory)
    for made in row.get("user_calls", []):
        made["result"].pop("seconds")
    return row


def test_an_episode_over_http_has_the_users_calls_of_the_episode_here(server: Running) -> None:
    envs = [Phone(script=SCRIPT, opens=True, scorer=None), there(server, script=SCRIPT, opens=True)]
    for env in envs:
        env.reset(seed=1)
    for action in (LINE, "Press a, then b.", "Anything else?"):
        first, second = (env.step(action) for env in envs)
        assert first == second
        assert without_times(envs[0]) == without_times(envs[1])
    assert envs[1].trajectory.parting == "bye"
    assert len(envs[1].trajectory.user_calls) == 3 and not envs[1].is_open
    assert envs[1].toolbox.names == ("line",)
    # A replay there: the recorded user takes the place of the server's own.
    twin = there(server, script=["something else"], opens=True)
    twin.reset(options={"task": envs[0].task, "user": RecordedUser.of(envs[0].trajectory)})
    for turn in envs[0].trajectory.turns:
        twin.step(turn.message)
    assert without_times(twin) == without_times(envs[1])


def test_calls_of_the_users_alone_and_a_fork(server: Running) -> None:
    env = there(server)
    env.reset(seed=0)
    assert env.user_call(ToolCall("press", {"button": "b"})).content == "pressed b"
    forked = env.fork()
    assert forked.user_call(ToolCall("press", {"button": "a"})).content == "pressed a"
    assert [len(one.trajectory.user_calls) for one in (env, forked)] == [1, 2]
    assert env.state() == {"done": [["user", "press", "b"]]}
    with pytest.raises(EnvError, match="the phone exploded"):
        env.user_call(ToolCall("press", {"button": "broken"}))
    assert env.trajectory.stop is StopReason.ENV_ERROR
    forked.close()
    with pytest.raises(EnvError, match="its user is on the server"):
        there(server).reset(options={"user": ScriptedUser([])})
    there(server).reset(seed=0)


async def test_a_users_call_in_progress_is_seen_here_and_is_nobodys_fault(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "WAIT_SECONDS", 0.05)
    env = there(server, script=[[["wait", {}]], "never"])
    await env.areset(seed=0)
    box = server.app.sessions.find(env._session)._env.user_toolbox
    box.replace(box["wait"].with_options(timeout=30.0))
    step = asyncio.ensure_future(env.astep("Wait."))
    for _ in range(200):
        await asyncio.sleep(0.02)
        if any("wait" in one.call_id for one in env.waiting):
            break
    [seen] = env.waiting
    assert seen.running and not seen.tool.options.policy_late and "wait" in str(seen)
    env.cut(StopReason.EPISODE_TIMEOUT)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await env.aclose()
    assert env.trajectory.stop is StopReason.EPISODE_TIMEOUT


def test_a_prompt_that_awaits_is_one_of_an_episode(server: Running) -> None:
    with pytest.raises(EnvError, match="its prompt awaits its user"):
        env = there(server)
        env.prompt(Phone().make_task(0, "train"))
