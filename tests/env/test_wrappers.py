"""Wrappers: turns, tools, faults, prompts; each alone and stacked, forked and restored."""

import asyncio
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

from agentrl.config import load_config
from agentrl.data.trajectory import Message, StopReason, Task
from agentrl.env import Action, StepResult, ToolEnv, tool
from agentrl.env.catalog import EnvRef
from agentrl.env.check import check_all
from agentrl.env.check_tools import Subject
from agentrl.env.wrappers import WRAPPERS, SystemPrompt, ToolFaults, ToolSubset, ToolWrapper, TurnLimit
from agentrl.reward import compile_spec, load_spec
from agentrl.run.assembly import RunStart
from agentrl.utils.errors import ConfigError
from tests.env.toyenvs import Constant, Notes, call
from tests.tool.process_tools import square


class TextLimit(ToolWrapper):
    """A user's own: at most so many characters of answers."""

    def __init__(self, env: ToolEnv, most: int) -> None:
        super().__init__(env)
        self.most, self.used = most, 0

    async def astep(self, action: Action) -> StepResult:
        result = await self.env.astep(action)
        self.used += sum(len(message.content) for message in [self.trajectory.turns[-1].message, *result[0]])
        over = result[2] or result[3] or self.used < self.most
        return result if over else await self._truncate(result, StopReason.MAX_TOKENS)


def test_an_own_wrapper_truncates_in_ten_lines() -> None:
    env = TextLimit(Notes(scorer=Constant(0.5)), 9)
    env.reset(seed=0)
    assert env.step(call("write", text="a"))[3] is False and env.used == 1
    assert env.step("x" * 40)[2:4] == (True, False), "an end by the task comes first"
    env.reset(seed=0)
    assert env.step(Message("assistant", "y" * 9, call("write", text="b").tool_calls))[1:4] == (0.5, False, True)
    assert env.trajectory.stop is StopReason.MAX_TOKENS and env.trajectory.truncated


@pytest.mark.parametrize("name", ["setup", "state", "user_reply", "make_task", "look"])
def test_a_hook_or_tool_of_a_wrapper_that_no_episode_calls_is_refused(name: str) -> None:
    """It did nothing, without a word."""
    made = tool(name="look")(lambda self: 1) if name == "look" else getattr(Notes, name)
    with pytest.raises(TypeError, match=rf"Odd\.{name}: no episode would call it.*`areset` or `astep`"):
        type("Odd", (ToolWrapper,), {name: made})


def test_turn_limit_truncates_and_scores() -> None:
    env = TurnLimit(Notes(scorer=Constant(0.5)), 2)
    env.reset(seed=0)
    assert env.step(call("write", text="a"))[1:4] == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step(call("write", text="b"))
    assert observation[0].content == "2" and (reward, terminated, truncated) == (0.5, False, True)
    assert info["stop"] == "max_turns" and env.trajectory.truncated and env.unwrapped.log == ["setup", "teardown"]
    env.reset(seed=0)
    env.step(call("write", text="a"))
    assert env.step("done")[2:4] == (True, False), "the task's own end is not a truncation"


def test_tool_subset() -> None:
    env = ToolSubset(Notes(), ["write"])
    for seed in (0, 1):
        env.reset(seed=seed)
        assert env.toolbox.names == ("write",)
        assert [t["function"]["name"] for t in env.trajectory.tools] == ["write"]
    assert "unknown_tool" in env.step(call("quit"))[0][0].content
    with pytest.raises(ConfigError, match="did you mean 'write'"):
        ToolSubset(Notes(), ["writ"]).reset(seed=0)


def outcomes(rate: float, seed: int = 0, episode: int = 0) -> list[bool]:
    env = ToolFaults(Notes(), rate, seed=seed)
    env.reset(seed=episode)
    return ["unavailable" in env.step(call("write", text=f"t{n}"))[0][0].content for n in range(60)]


def test_faults_come_at_the_rate_and_are_the_same_in_a_replay() -> None:
    (env := ToolFaults(Notes(), 0.0)).reset(seed=3, options={"split": "heldout"})
    assert env.trajectory.task.split == "heldout"
    assert sum(outcomes(0.0)) == 0 and sum(outcomes(1.0)) == 60
    first = outcomes(0.3)
    assert 8 <= sum(first) <= 30 and first == outcomes(0.3)
    assert first != outcomes(0.3, seed=1) and first != outcomes(0.3, episode=1)
    env = ToolFaults(Notes(), 1.0)
    env.reset(seed=0)
    env.step(call("write", text="a"))
    assert env.state() == {"notes": []}, "a failed call was not run"
    with pytest.raises(ValueError, match="0 to 1"):
        ToolFaults(Notes(), 1.5)


async def test_a_tool_that_may_fail_keeps_its_process_and_its_limit_of_concurrency() -> None:
    most = running = 0

    class Slow(Notes):
        tools = (square,)

        @tool(concurrency=1)
        async def write(self, text: str) -> str:
            nonlocal most, running
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return text

    rooms = [ToolFaults(Slow(), 0.0) for _ in range(3)]
    for env in rooms:
        await env.areset(seed=0)
    await asyncio.gather(*(env.astep(call("write", text="a")) for env in rooms))
    for env in rooms:
        await env.astep(call("square", n=3))
    values = [env.trajectory.turns[1].results[0].value for env in rooms]
    assert [value[0] for value in values] == [9, 9, 9] and os.getpid() not in {value[1] for value in values}
    assert most == 1


def test_tools_come_and_go_and_the_record_has_them_all() -> None:
    @tool
    async def shout(text: str) -> str:
        """say it loud"""
        return text.upper()

    class Growing(ToolWrapper):
        async def astep(self, action: Action) -> StepResult:
            result = await self.env.astep(action)
            if len(self.trajectory.turns) == 1:
                self.toolbox.add(shout)
                self.toolbox.remove("quit")
            return result

    env = Growing(Notes())
    for _ in range(2):
        env.reset(seed=0)
        assert "unknown_tool" in env.step(call("shout", text="a"))[0][0].content
        assert env.step(call("shout", text="a"))[0][0].content == "A"
        assert "unknown_tool" in env.step(call("quit"))[0][0].content
        assert [t["function"]["name"] for t in env.trajectory.tools] == ["write", "hang", "quit", "shout"]


WRAPPED: dict[str, Any] = {
    "turns": lambda env: TurnLimit(env, 50), "own": lambda env: TextLimit(env, 100_000),
    "subset": lambda env: ToolSubset(env, ["get", "add", "set", "list"]), "faults": lambda env: ToolFaults(env, 0.0),
    "plain": ToolWrapper, "stack": lambda env: SystemPrompt(ToolFaults(TurnLimit(TextLimit(env, 10**5), 50), 0.0), "Be brief."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.filterwarnings("ignore:.*unwrapped version.*")
def test_a_wrapped_environment_keeps_the_contract(name: str) -> None:
    def build() -> ToolEnv:
        return WRAPPED[name](EnvRef("key_value").build())  # type: ignore[no-any-return]

    spec = compile_spec(load_spec(EnvRef("key_value").default_reward() or ""))
    findings = check_all(Subject(build, spec, tasks=3, fuzz=15))
    assert {f.check: f.evidence for f in findings if f.ok is False} == {}
    check_env(build(), skip_render_check=True)


async def test_forks_of_wrapped_environments_keep_their_own_counts() -> None:
    env = TextLimit(Notes(), 10**6)
    await env.areset(seed=0)
    await env.astep(call("write", text="a"))
    snapshot, replay_env, used = env.snapshot(), env.fork(), env.used
    assert isinstance(replay_env, TextLimit) and replay_env.env is not env.env
    await replay_env.astep(call("write", text="b" * 100))
    assert env.used == used < replay_env.used
    await env.astep(call("write", text="c" * 50))
    env.restore(snapshot)
    assert env.used == used and env.state() == {"notes": ["a"]}
    with pytest.raises(ValueError, match="does not fit"):
        TurnLimit(Notes(), 2).restore(snapshot)


def test_an_environment_is_forked_once_for_its_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for a snapshot, which holds none."""
    env, forks = TurnLimit(Notes(), 2), list[ToolEnv]()
    own = Notes.fork
    monkeypatch.setattr(Notes, "fork", lambda self: forks.append(self) or own(self))
    env.reset(seed=0)
    env.fork()
    assert len(forks) == 1
    env.restore(env.snapshot())
    assert len(forks) == 1


def test_wrappers_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    head = '[env]\nid = "key_value"\n'
    path.write_text(
        head + '[[env.wrappers]]\nname = "tool_subset"\nargs = { names = ["get", "add"] }\n'
        '[[env.wrappers]]\nname = "turn_limit"\nargs = { turns = 1 }\n'
    )
    ref = pickle.loads(pickle.dumps(RunStart(load_config(path)).env))
    env = ref.build()
    assert isinstance(env, TurnLimit) and isinstance(env.env, ToolSubset)
    env.reset(seed=0)
    assert env.toolbox.names == ("get", "add") and env.step(call("get", key="a"))[3]
    arguments: dict[str, Any] = {
        "turn_limit": {"turns": 2}, "tool_subset": {"names": ["get"]}, "tool_faults": {"rate": 0.5},
        "system_prompt": {"text": "be brief"}, "gold_user": {},
    }  # fmt: skip
    assert set(arguments) == {entry.name for entry in WRAPPERS.own()}
    for name, args in arguments.items():
        assert isinstance(WRAPPERS[name](Notes(), **args), ToolWrapper)
    for text, says in (
        ('name = "turn_limt"', "did you mean 'turn_limit'"),
        ('name = "turn_limit"\nargs = { turn = 1 }', "unknown argument 'turn'; did you mean 'turns'"),
        ('name = "turn_limit"\nargs = { turns = 0 }', "at least 1"),
    ):
        path.write_text(f"{head}[[env.wrappers]]\n{text}\n")
        with pytest.raises(ConfigError, match=says):
            RunStart(load_config(path)).env.build()


def test_a_system_prompt_is_before_the_environments_own() -> None:
    class Stern(Notes):
        def prompt(self, task: Task) -> list[Message]:
            return [Message("system", "Obey."), *super().prompt(task)]

    for inner, text in ((Notes(), "Be brief."), (Stern(), "Be brief.\n\nObey.")):
        env = SystemPrompt(inner, "Be brief.")
        first, _ = env.reset(seed=1)
        rest = Notes().prompt(env.task)
        assert list(first) == env.trajectory.messages == env.prompt(env.task) == [Message("system", text), *rest]
        forked = env.fork()
        assert forked.prompt(env.task) == list(first) and forked.trajectory.messages == list(first)
        env.close()
        forked.close()


def test_what_a_wrapper_is_asked_about_its_environment() -> None:
    class Kinds(Notes):
        def family(self, task: Task) -> str:
            return "boxes"

    env = Kinds(scorer=None)
    wrapped = TurnLimit(env, turns=3)
    assert wrapped.family(env.make_task(1, "train")) == "boxes" and not wrapped.has_sources
