"""What the run's config lets a spec use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.config.schema import RewardConfig
from agentrl.reward import Context, compile_spec, make_context
from agentrl.run.assembly import scorer_of
from agentrl.utils.errors import ConfigError, RewardSpecError
from tests.reward.reward_episodes import Counter, episode, gold, leaf, spec


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_reward_functions.py").write_text("def half(view, args):\n    return 0.5\n\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_reward_functions"
    sys.modules.pop("my_reward_functions", None)


def test_a_python_leaf_runs_only_where_the_config_allows_it_by_name(module):
    node = spec(leaf("python", {"name": "half"}))
    allowed = make_context(RewardConfig(python={"half": f"{module}:half"}))
    assert compile_spec(node, context=allowed).score(episode("x")).value == 0.5
    for context in (None, make_context(RewardConfig())):
        with pytest.raises(RewardSpecError, match="does not allow a function 'half'"):
            compile_spec(node, context=context)
    direct = spec(leaf("python", {"name": f"{module}:half"}))  # a spec cannot import by itself
    with pytest.raises(RewardSpecError, match="does not allow"):
        compile_spec(direct, context=allowed)


@pytest.mark.parametrize("kind", [BaseException, GeneratorExit, SystemExit, ValueError])
def test_whatever_a_function_raises_leaves_the_episode_unscored_and_the_run_going(kind):
    def broken(view, args):
        raise kind("boo")

    score = compile_spec(spec(leaf("python", {"name": "f"})), context=Context(python={"f": broken})).score(episode("x"))
    assert score.value is None and f"f raised {kind.__name__}: boo" in score.evidence["root"]["unscored"]


@pytest.mark.parametrize("target", ["half", ":half", "my_reward_functions:", "a b:c d", "no_such_module_here:f",
                                    "my_reward_functions:hlaf", "my_reward_functions:number"])  # fmt: skip
def test_a_function_that_is_not_there(module, target):
    with pytest.raises(ConfigError, match=r"reward\.python\.f"):
        make_context(RewardConfig(python={"f": target}))


def test_the_replay_environment_of_the_run_is_used_for_replays():
    node = spec(leaf("state.match", {"replay": gold(("add", {"x": 3}))}))
    context = make_context(RewardConfig(), replay_env=Counter)
    assert compile_spec(node, context=context).score(episode("x", state={"total": 3})).value == 1


def test_a_run_compiles_the_replaying_profiles():
    """The wiring of a training run: its environment is the replay environment of its reward spec."""
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.toml", ["env.reward=tau_bench"])
    assert scorer_of(config).name == "tau_bench"
