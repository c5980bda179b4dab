"""An environment built directly is rewarded by the spec that its class names, as one that `make_env` built."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.config.schema import RewardConfig
from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.catalog import EnvRef, find_env, find_spec, make_env, make_scorer
from agentrl.env.wrappers import TurnLimit
from agentrl.utils import search_path
from agentrl.utils.errors import CatalogError
from agentrl.utils.search_path import load_module
from tests.env.toyenvs import Notes

REPLAY = {
    "agentrl_reward": 1,
    "name": "replayed",
    "root": {"use": "results.contains", "id": "success", "args": {"replay": {"$": "/task/gold/calls"}}},
}


def played(env: ToolEnv, seed: int = 3) -> tuple[float, bool | None]:
    """Reward of the gold turns, and whether the record says that they solved the task."""
    env.reset(seed=seed)
    reward = 0.0
    for turn in env.gold_turns(env.task):
        _, reward, *_ = env.step(turn)
    return reward, env.trajectory.success


@pytest.mark.parametrize("name", ["key_value", "workspace"])
def test_gold_is_worth_what_it_is_worth_elsewhere(name: str) -> None:
    env = find_env(name).load()()
    assert played(env) == (1.0, True) == played(make_env(name))
    env.reset(seed=3)
    assert [env.step(text)[1] for text in ["I do not know"] * 5 if env.is_open][-1] == 0.0 and env.trajectory.success is False


def test_none_scores_nothing_and_so_does_a_reference_whose_run_scores() -> None:
    silent = find_env("key_value").load()(scorer=None)
    assert played(silent) == (0.0, None) and silent.trajectory.reward is None
    assert EnvRef("key_value").build().scorer is None
    assert pickle.loads(pickle.dumps(EnvRef("key_value"))).build().scorer is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_environment_is_not_pickled_and_says_what_is_and_a_deep_copy_is_a_fork(wrapped: bool) -> None:
    env: ToolEnv = make_env("key_value", calls=2)
    env = TurnLimit(env, turns=4) if wrapped else env
    with pytest.raises(TypeError, match=r"is not pickled; pickle what makes it, as EnvRef\('agentrl/KeyValue-v0'"):
        pickle.dumps(env)
    env.reset(seed=3)
    other = copy.deepcopy(env)
    assert [other.step(turn)[1] for turn in other.gold_turns(other.task)][-1] == 1.0
    assert env.is_open and env.trajectory.turns == []


HOME = """
from agentrl.env import Message, Task, ToolCall, ToolEnv
from agentrl.env import tool

class Doubled(ToolEnv):
    id = "own/Doubled-v0"
    reward, summary = "replayed.json", "doubles"

    def __init__(self, *, factor: int = 2, **base):
        super().__init__(**base)
        self.factor = factor

    def make_task(self, rng_seed, split):
        return Task(f"d/{split}/{rng_seed}", rng_seed, split, {}, {"calls": [{"name": "double", "arguments": {"n": rng_seed}}]})

    def prompt(self, task):
        return [Message("user", "double it")]

    @tool(read_only=True)
    async def double(self, n: int) -> str:
        "n times the factor"
        return str(n * self.factor)

class Tripled(Doubled):
    id = "own/Tripled-v0"

class Paid(Doubled):
    id = "own/Paid-v0"

    def reward(episode):
        return float(episode.messages[-1].content == "15")
"""


@pytest.mark.parametrize("name", ["Doubled", "Tripled", "Paid"])
def test_a_spec_beside_the_file_replays_on_a_twin_of_the_same_parameters(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a twin of the default factor, 2, the answer 15 of five times 3 would not be the one of the gold call. By its id an
    inherited spec or a function was none, and paid 0; of a class in another folder the file was not found."""
    (home := tmp_path / "envs" / "own").mkdir(parents=True)
    (home / "env.py").write_text(HOME)
    (home / "replayed.json").write_text(json.dumps(REPLAY))
    kind: Any = getattr(load_module(home / "env.py"), name)

    def makes(factor: int) -> Any:
        return kind(factor=factor)

    monkeypatch.chdir(tmp_path)
    for env in (kind(factor=3), *(agentrl.make(named, factor=3) for named in (kind, makes, f"own/{name}-v0"))):
        env.reset(seed=5)
        env.step(Message("assistant", tool_calls=(ToolCall("double", {"n": 5}),)))
        assert env.trajectory.turns[0].results[0].content == "15"
        assert env.step("15")[1] == 1.0
    spec = find_spec(ref := EnvRef(f"own/{name}-v0"), None)
    monkeypatch.delitem(search_path._TABLE, f"{ref.id}.reward", raising=False)  # as in another process
    assert make_scorer(spec, RewardConfig(), ref).name == spec["name"]


def test_a_spec_that_is_not_there_is_named() -> None:
    env: ToolEnv = type("Lost", (Notes,), {"reward": "no_such_spec"})()
    env.reset(seed=0)
    with pytest.raises(CatalogError, match="no reward spec 'no_such_spec'"):
        env.step("done")
