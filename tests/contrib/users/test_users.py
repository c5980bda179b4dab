"""Simulated users: scripted, by rules, and a model behind a real HTTP server."""

import json
from typing import Any

import pytest

from agentrl.contrib.users import ModelUser, RuleUser
from agentrl.data.trajectory import Message, StopReason
from agentrl.env import Task
from agentrl.env.users import ScriptedUser, User
from agentrl.utils.errors import EnvError
from tests.env.toyenvs import Notes, call
from tests.rollout.loopback import Loopback


class Asked(Notes):
    """Notes with a user: `make` builds one for each episode."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    async def setup(self, task: Task) -> None:
        await super().setup(task)
        self.user = self.make()


def talk(user: Any, *turns: str) -> list[str | None]:
    env = Asked(user)
    env.reset(seed=0)
    heard: list[str | None] = []
    for turn in turns:
        observation, _, terminated, _, _ = env.step(turn)
        heard.append(observation[0].content if observation else None)
        if terminated:
            break
    return heard


def test_a_script_is_said_in_order() -> None:
    assert talk(lambda: ScriptedUser(["first", "second"]), "a", "b", "c", "d") == ["first", "second", None]


def test_rules_answer_what_is_asked_and_patience_ends() -> None:
    def user() -> User:
        return RuleUser([(r"which size", "small"), (r"\bbye\b", None)], otherwise="?", patience=2)

    assert talk(user, "Which size?", "what", "which size", "bye") == ["small", "?", "small", None]
    assert talk(user, "a", "b", "c", "d") == ["?", "?", None]


def test_a_fork_has_its_own_user() -> None:
    env = Asked(lambda: ScriptedUser(["1", "2"]))
    env.reset(seed=0)
    env.step("a")
    replay_env = env.fork()
    assert replay_env.step("b")[0][0].content == "2" == env.step("b")[0][0].content


def test_a_model_needs_a_word_to_end_with() -> None:
    async def complete(messages: Any) -> str:
        return ""

    for options in ({"stop": ()}, {"stop": ""}, {"system": "Play.", "stop": ("",)}):
        with pytest.raises(ValueError, match="expected a word with which the model ends the conversation"):
            ModelUser("a goal", complete=complete, **options)  # type: ignore[arg-type]
    assert ModelUser(system="Play.", stop=(), complete=complete).stops == (), "one that leaves in another way"


async def test_a_model_sees_turned_roles_and_no_tools() -> None:
    seen: list[Any] = []

    async def complete(messages: Any) -> str:
        seen.append(messages)
        return "a small one" if len(messages) < 4 else "thanks ###STOP###"

    env = Asked(lambda: ModelUser("You want tea.", complete=complete))
    await env.areset(seed=0)
    await env.astep(call("write", text="secret"))
    observation = (await env.astep("which size?"))[0]
    assert observation == [Message("user", "a small one")]
    assert (await env.astep("here you are"))[2] is True
    roles = [message["role"] for message in seen[-1]]
    assert roles == ["system", "assistant", "user", "assistant", "user"]
    assert "You want tea." in seen[-1][0]["content"] and "secret" not in json.dumps(seen)


@pytest.mark.slow
async def test_litellm_speaks_to_a_real_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would look for a newer one
    pytest.importorskip("litellm", reason="the litellm extra is not installed")

    def answer(body: dict[str, Any], number: int) -> Any:
        return {"status": 400} if number else "you said: " + body["messages"][-1]["content"]

    with Loopback(answer) as server:
        env = Asked(lambda: ModelUser("tea", model="openai/stub", api_base=server.url, api_key="none", max_retries=0))
        await env.areset(seed=0)
        observation = (await env.astep("hello there"))[0]
        assert observation[0].content == "you said: hello there"
        assert (server.requests[0]["model"], server.requests[0]["temperature"]) == ("stub", 0.0)
        with pytest.raises(EnvError, match="plays the user"):
            await env.astep("again")
    assert env.trajectory.stop is StopReason.ENV_ERROR and env.trajectory.reward is None
