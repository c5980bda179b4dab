"""What is refused before a run: gold that is not a success, a success that nobody can tell, judges that cannot be paid."""

import logging
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import ToolsConfig
from agentrl.contrib.mcp.client import McpSession
from agentrl.env.catalog import EnvRef
from agentrl.run.assembly import RunStart
from agentrl.run.checks import check_config, check_eval
from agentrl.run.checks.model_checks import check_prompts, longest_prompt
from agentrl.run.checks.reward_checks import check_success
from agentrl.utils.errors import ConfigError, EnvError
from tests.run.own_spec import RIGHT, with_spec
from tests.run.starts import scored

NEVER = {"use": "text.equals", "args": {"expect": "never"}}
TURNS = {"use": "cost.turns", "weight": -0.1, "args": {"max": 10}}
MARK = {"use": "judge", "args": {"model": "openai/j-2026-01-01", "prompt": "{transcript}"}}


def test_gold_that_is_no_success_is_refused_with_spec_task_value_and_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(with_spec(tmp_path, {"op": "mean", "of": [RIGHT, NEVER]}, None))
    told = str(caught.value)
    for part in ("env.reward", "'mine'", "key_value/train/0", "the task part of /root is not 1", "reward 0.5", '"success"',
                 f"agentrl reward lint {tmp_path}/mine.json --env key_value"):  # fmt: skip
        assert part in told, part
    at = "reward spec 'mine' at /root: the gold solution earns"
    assert f"{at} 0.5, the maximum is 1" in check_config(with_spec(tmp_path, {"op": "mean", "of": [RIGHT, NEVER]}, RIGHT))
    # A cost is no part of the task.
    assert check_config(with_spec(tmp_path, {"op": "sum", "of": [RIGHT, TURNS]}, None)) == [f"{at} 0.95, the maximum is 1"]


def test_faults_that_a_wrapper_injects_are_no_fault_of_the_gold(tmp_path: Path) -> None:
    """A script cannot try again, as a policy can. Without any fault the same gold is a success."""
    env = {"id": "service_desk", "reward": "service_desk", "wrappers": [{"name": "tool_faults", "args": {"rate": 1.0}}]}
    notes = check_config(with_spec(tmp_path, RIGHT, None, env=env))
    assert not [note for note in notes if "gold" in note]


BROKEN = """
import time
from agentrl.env import Message, Task, ToolEnv

class Broken(ToolEnv):
    id = "test/Broken-v0"
    summary = "broken"

    def __init__(self, *, how="", **base):
        super().__init__(**base)
        self.how = how

    def make_task(self, rng_seed, split):
        return Task(f"broken/{rng_seed}", rng_seed, split, {}, {"answer": "1"})

    def prompt(self, task):
        return [Message("user", "begin")]

    def gold_turns(self, task):
        return [Message("assistant", "1")]

    async def setup(self, task):
        if self.how == "raises":
            raise ValueError("no database")
        if self.how == "exits":
            raise SystemExit(4)
        if self.how == "hangs":
            time.sleep(30)
"""


@pytest.mark.parametrize(("how", "says"), [
    ("raises", "ValueError: no database"),
    ("exits", r"called sys\.exit\(4\)"),
    ("hangs", r"not finished within 1\.5 s \(rollout\.env_timeout"),
])  # fmt: skip
def test_an_environment_that_breaks_or_hangs_before_the_run_is_named(here: Path, how: str, says: str) -> None:
    (here / "envs" / "broken").mkdir(parents=True)
    (here / "envs" / "broken" / "env.py").write_text(BROKEN)
    config = with_spec(here, RIGHT, None, rollout={"env_timeout": 0.5, "episode_timeout": 1.0})
    config = config.model_copy(update={"env": config.env.model_copy(update={"id": "broken", "params": {"how": how}})})
    with pytest.raises(ConfigError, match=rf"env\.id: the gold solution of a task of 'broken' cannot be played: .*{says}"):
        check_success(scored(config))


def test_every_kind_of_task_that_the_sampler_may_choose_is_tried(tmp_path: Path) -> None:
    """Gold of 2 and 4 calls fits; of 6 calls it does not."""
    short = {"op": "all", "of": [RIGHT, {"use": "cost.calls", "scale": [2, 0], "args": {"max": 10}}]}
    stages = [{"calls": 2}, {"calls": 2}, {"calls": 4}, {"calls": 6}]
    few, all_of = ({"sampler": {"name": "staged", "args": {"stages": some}}} for some in (stages[:3], stages))
    check_config(with_spec(tmp_path, short, None, rollout=few))
    with pytest.raises(ConfigError, match="is not a success"):
        check_config(with_spec(tmp_path, short, None, rollout=all_of))


def test_a_spec_in_which_nothing_decides_is_refused_for_training_and_for_evaluation(tmp_path: Path) -> None:
    for refuse in (check_config, check_eval):
        with pytest.raises(ConfigError, match=r"'mine' does not define success.*\"success\""):
            refuse(with_spec(tmp_path, {"op": "sum", "of": [TURNS]}, None))


def test_an_environment_without_gold_is_said_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import agentrl.run.checks.reward_checks as module

    def without(build: Any, seed: int, split: str) -> Any:
        raise NotImplementedError("key_value has no scripted gold policy")

    monkeypatch.setattr(module, "gold_episode", without)
    with caplog.at_level(logging.WARNING, logger="agentrl"):
        check_success(scored(with_spec(tmp_path, NEVER, None)))
    assert "not checked" in caplog.text and "no scripted gold policy" in caplog.text


def test_the_best_by_reward_needs_a_reward_of_single_episodes(tmp_path: Path) -> None:
    rank = {"use": "group.rank", "scope": "group", "args": {"of": TURNS}}
    root = {"op": "sum", "of": [RIGHT, rank]}
    check_success(scored(with_spec(tmp_path, root, None)))
    with pytest.raises(ConfigError, match=r"checkpoint\.best.*compares the members"):
        check_success(scored(with_spec(tmp_path, root, None, checkpoint={"best": "reward"})))


OPENING = """
from agentrl.env import Message, Task, ToolEnv
from agentrl.contrib.suites.benchmarks import published_tool
from agentrl.contrib.users import ModelUser
from agentrl.env.users import ScriptedUser, UserModel
from agentrl.env import Tool

class Opens(ToolEnv):
    id = "test/Opens-v0"
    summary = "a user opens, and its setup adds a tool"

    def __init__(self, *, words=0, tools=0, model=False, **base):
        super().__init__(**base)
        self.words, self.tools, self.model = words, tools, model

    def user_models(self):
        return [UserModel("no/model")] if self.model else []

    def make_task(self, rng_seed, split):
        return Task(f"opens/{rng_seed}", rng_seed, split, {}, {"answer": "1"})

    async def setup(self, task):
        for number in range(self.tools):
            shown = {"name": f"tool_{number}", "description": "does one thing", "parameters": {"type": "object"}}
            self.toolbox.add(published_tool(shown, lambda env: "", inline=True))
        self.user = ModelUser("g", model="no/model") if self.model else ScriptedUser(["word " * self.words])

    async def prompt(self, task):
        said = await self.ask_user([Message("system", "begin")])
        return [Message("user", str(said))]
"""


def test_the_opening_of_an_episode_counts_with_what_its_user_says_and_its_setup_adds(here: Path) -> None:
    (here / "envs" / "opens").mkdir(parents=True)
    (here / "envs" / "opens" / "env.py").write_text(OPENING)
    config = with_spec(here, RIGHT, None)

    def tokens(**params: Any) -> int:
        section = config.env.model_copy(update={"id": "opens", "params": params})  # type: ignore[union-attr]
        one = config.model_copy(update={"env": section})
        return longest_prompt(one.model, EnvRef.of(one.the_env, one.tools), one.rollout.env_timeout)[1]

    few, many = tokens(words=3), tokens(words=303)
    # "word " 300 times more, a token or more each; nothing of it was counted if nobody opened an episode.
    assert few > 0 and many - few >= 300
    assert tokens(words=3, tools=4) - few > 4 * 5
    assert tokens(model=True) == 0, "a model that plays the user is not asked"
    with pytest.raises(ConfigError, match=r"the opening prompt of opens \(task seed 0\) has \d{4,} tokens"):
        section = config.env.model_copy(update={"id": "opens", "params": {"words": 40000}})  # type: ignore[union-attr]
        check_prompts(RunStart(config.model_copy(update={"env": section})))


def test_a_server_that_does_not_answer_is_waited_for_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the opening prompts' check, of three tasks; a server of 30 s kept a start silent for two minutes."""
    tried: list[str] = []

    async def never(session: McpSession) -> Any:
        tried.append(str(session))
        raise EnvError(f"{session}: no answer within 30 s")

    monkeypatch.setattr(McpSession, "open", never)
    tools = ToolsConfig.model_validate({"mcp": {"x": {"command": ["sleep"]}}})
    one = with_spec(here, RIGHT, None).model_copy(update={"tools": tools})
    assert longest_prompt(one.model, EnvRef.of(one.the_env, one.tools), one.rollout.env_timeout) == (0, 0)
    assert tried == ["MCP server 'x'"]
