"""`[[env]]`, several environments in one config: how they are written, called, merged, refused, and what each has of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig, load_config, to_toml
from agentrl.config.envs import eval_weights, warm_start_envs, weight_at
from agentrl.config.identity import differences, identity_of
from agentrl.config.load import with_absolute_paths
from agentrl.config.schema import EnvConfig, SftConfig
from agentrl.env.catalog import EnvRef
from agentrl.rollout.mixtures import MixedTasks, parts_of
from agentrl.rollout.player import Evaluation, combine_evaluations
from agentrl.utils.errors import ConfigError, ResourceError

TWO = """
name = "two"
[[env]]
id = "key_value"
params = { calls = 2 }
weight = 3.0
[[env]]
id = "agentrl/Python-v0"
name = "code"
reward = "./code.json"
"""


def written(path: Path, text: str = TWO) -> Path:
    path.write_text(text)
    return path


def names(config: TrainConfig) -> list[str]:
    return [env.called for env in config.envs]


def test_a_table_is_one_environment_and_a_list_is_several(tmp_path: Path) -> None:
    one = load_config(written(tmp_path / "one.toml", '[env]\nid = "agentrl/Key-v0"\n'))
    assert names(one) == ["agentrl_Key-v0"] and one.envs == (one.env,)
    two = load_config(written(tmp_path / "two.toml"))
    assert names(two) == ["key_value", "code"] and [env.weight for env in two.envs] == [3.0, None]
    again = load_config(written(tmp_path / "again.toml", to_toml(two)))
    assert again == two


def test_an_override_calls_an_environment_by_name_or_number(tmp_path: Path) -> None:
    file = written(tmp_path / "two.toml")
    config = load_config(file, ["env.code.params.limit=4", "env.0.params.calls=[3,4]", "env.key_value.limits.max_turns=5"])
    assert [env.params for env in config.envs] == [{"calls": [3, 4]}, {"limit": 4}]
    assert config.envs[0].limits is not None and config.envs[0].limits.max_turns == 5
    assert load_config(file, ["env.code.name=python"]).envs[1].called == "python"


@pytest.mark.parametrize(("text", "overrides", "said"), [
    (TWO, ["env.cod.weight=1"], ["override 'env.cod.weight=1'", "no environment has this name", "did you mean 'code'"]),
    (TWO, ["env.params.calls=3"], ["override 'env.params.calls=3'", "there are key_value, code"]),
    (TWO, ["env.code=3"], ["override 'env.code=3'", "expected a key of this environment"]),
    (TWO, ["env.code.weight=-1.0"], ["override 'env.code.weight=-1.0'", "env[1] (code).weight", "greater than or equal"]),
    (TWO, ["env.code.weight=inf"], ["env[1] (code).weight", "finite number"]),
    (TWO, ["env.code.weight=[[1.5,1]]"], ["env[1] (code).weight: expected a number >= 0 or list of pairs", "[40, 0.5]"]),
    (TWO, ["env.code.weight=[[0,1.0],[5,inf]]"], ["env[1] (code).weight", "finite number"]),
    (TWO, ["env.code.eval.weight=inf"], ["env[1] (code).eval.weight", "finite number"]),
    (TWO + "paramz = 3\n", [], ["two.toml", "env[1] (code).paramz", "unknown key", "did you mean 'env.code.params'"]),
    (TWO + "[[env]]\nparams = {}\n", [], ["env[2]", "id", "required key is missing"]),
    (TWO + '[[env]]\nid = "key_value"\n', [], ["env[2] (key_value).name", "env[0] is called 'key_value' too"]),
    (TWO + '[[env]]\nid = "sql"\nname = "a.b"\n', [], ["env[2] (a.b).name", "pattern"]),
    (TWO + '[[env]]\nid = "sql"\nname = "7"\n', [], ["env[2] (7).name", "pattern"]),
    (TWO, ["env.code.weight=0", "env.0.weight=0"], ["every weight is 0"]),
    (TWO, ["env.code.weight=[[5,0.0],[9,1.0]]", "env.0.weight=[[4,1.0],[5,0.0]]"], ["every weight is 0 at step 5"]),
    (TWO, ["env.code.weight=[[5,1.0],[5,2.0]]"], ["env[1] (code).weight", "ascending steps, got [5, 5]"]),
    (TWO, ["env.code.eval.weight=0", "env.0.eval.weight=0"], ["every eval.weight is 0"]),
    (TWO, ["sft.envs=['cod']"], ["sft.envs", "no environment 'cod'", "did you mean 'code'"]),
    ("env = []\n", [], ["env", "at least 1 item"]),
])  # fmt: skip
def test_a_mistake_names_the_entry(tmp_path: Path, text: str, overrides: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path / "two.toml", text), overrides)
    for part in said:
        assert part in str(caught.value), str(caught.value)


def test_a_config_builds_on_the_environments_of_its_base(tmp_path: Path) -> None:
    written(tmp_path / "two.toml")
    (tmp_path / "code.json").write_text("{}")

    def of(text: str) -> TrainConfig:
        return load_config(written(tmp_path / "top.toml", f'base = "two"\n{text}'))

    kept = of("[env.code]\nweight = 2.0\n[env.key_value.params]\nset_share = 0.5\n")
    assert [(env.id, env.weight, env.params) for env in kept.envs] == [
        ("key_value", 3.0, {"set_share": 0.5}),  # the value of a key replaces that of the base, as everywhere
        ("agentrl/Python-v0", 2.0, {}),
    ]
    assert kept.envs[1].reward == str(tmp_path / "code.json")  # beside the base, which names it
    chosen = of('[[env]]\nname = "code"\n[[env]]\nid = "sql"\n')
    assert [(env.called, env.id) for env in chosen.envs] == [("code", "agentrl/Python-v0"), ("sql", "sql")]
    assert chosen.envs[0].reward == kept.envs[1].reward and chosen.envs[1].reward is None
    other = of('[[env]]\nname = "code"\nid = "sql"\n')
    assert other.envs[0].id == "sql" and other.envs[0].reward is None
    assert names(of('[env]\nid = "sql"\n')) == ["sql"]
    with pytest.raises(ConfigError, match=r"top\.toml: env\.codes: no environment has this name.*'code'"):
        of("[env.codes]\nweight = 2.0\n")


def test_paths_are_whole_in_every_entry(here: Path) -> None:
    written(here / "code.json", "{}")
    (here / "checkout").mkdir()
    more = ["env.key_value.tools.sets=['code.json','dates']", "env.key_value.params.source='checkout'"]
    config = load_config(written(here / "two.toml"), more)
    whole = with_absolute_paths(config).envs
    assert whole[1].reward == str(here / "code.json")
    assert whole[0].tools is not None and whole[0].tools.sets == [str(here / "code.json"), "dates"]
    assert whole[0].params["source"] == str(here / "checkout")


FULL: dict[str, Any] = {
    "system": "Be brief.",
    "tools": {"sets": ["dates"]},
    "limits": {"max_turns": 3, "max_turn_tokens": 40, "max_episode_tokens": 900, "episode_timeout": 2.0},
    "agent": {"command": ["./mine.py"]},
    "sampler": {"name": "uniform", "args": {"pool": 5}},
    "advantage": {"name": "rloo"},
    "eval": {"tasks": 7, "split": "train", "temperature": 0.25, "weight": 2.0},
    "sft": {"teacher": {"stop": 0.5}, "params": {"calls": 1}, "gate": 0.5, "gate_params": {"calls": 4}},
}


def test_what_an_environment_sets_itself_takes_the_place_of_the_runs() -> None:
    table: dict[str, Any] = {"env": [{"id": "key_value"}, {"id": "key_value", "name": "own", **FULL}], "sft": {"gate": 0.75}}
    config = TrainConfig.model_validate(table)
    plain, own = config.each()
    assert plain.model_copy(update={"env": config.env}) == config
    assert {key: getattr(own.rollout, key) for key in FULL["limits"]} == FULL["limits"]
    assert (
        own.rollout.model_copy(update={key: getattr(plain.rollout, key) for key in (*FULL["limits"], "sampler")}) == plain.rollout
    )
    assert (own.rollout.sampler.args, own.algorithm.advantage.name, own.tools.sets) == ({"pool": 5}, "rloo", ["dates"])
    assert own.agent is not None and own.agent.command == ["./mine.py"] and plain.agent is None
    assert (own.eval.tasks, own.eval.split, own.eval.temperature) == (7, "train", 0.25)
    assert own.sft is not None and plain.sft is not None and (own.sft.gate, plain.sft.gate) == (0.5, 0.75)
    assert (own.sft.teacher, own.sft.params, own.sft.gate_params) == ({"stop": 0.5}, {"calls": 1}, {"calls": 4})
    [env] = own.envs
    assert env == config.envs[1].model_copy(update=dict.fromkeys((*FULL.keys() - {"system"},)))
    # 16 turns of 2048 tokens, but 16384 in all; and of the other 3 turns of 40
    assert config.longest_sample() == 16384 and own.longest_sample() == 120
    wide = TrainConfig.model_validate({**table, "rollout": {"max_turns": 2, "max_episode_tokens": 100}})
    assert (wide.widest().rollout.max_turns, wide.widest().rollout.max_episode_tokens) == (3, 900)
    assert config.alone(config.envs[1]) == own

    ref = EnvRef.of(own.the_env, own.tools)
    assert ref.tools.sets == ["dates"] and EnvRef.of(plain.the_env, plain.tools).tools.sets == []
    opened = ref.build()
    messages, _ = opened.reset(seed=3)
    assert messages[0].role == "system" and messages[0].content.startswith("Be brief.")
    before, _ = EnvRef.of(plain.the_env, plain.tools).build().reset(seed=3)
    rest = [message for message in before if message.role != "system"]
    assert list(messages[1:]) == rest and opened.trajectory.messages == list(messages)
    own_text = "".join(message.content for message in before if message.role == "system")
    assert messages[0].content == (f"Be brief.\n\n{own_text}" if own_text else "Be brief.")
    opened.close()
    with pytest.raises(ConfigError, match="this takes one environment, and the config has 2: key_value, own"):
        EnvRef.of(config.the_env, config.tools)


def test_tasks_are_drawn_by_the_samplers_and_weights_of_the_config() -> None:
    envs = [{"id": "key_value", "weight": 0.0}, {"id": "key_value", "name": "own", "sampler": FULL["sampler"]}]
    config = TrainConfig.model_validate({"env": envs})
    mixed = MixedTasks(parts_of(config), config.rollout.mixture, 0)
    drawn = [mixed.draw(index) for index in range(10)]
    assert {choice.env for choice in drawn} == {"own"} and len({choice.seed for choice in drawn}) == 5


def test_a_weight_changes_with_the_steps_along_straight_lines() -> None:
    assert [weight_at(0.25, step) for step in (0, 9)] == [0.25, 0.25] and weight_at(None, 3) == 1.0
    points = [(10, 0.0), (20, 1.0), (30, 0.5)]
    assert [weight_at(points, step) for step in (0, 10, 13, 20, 25, 30, 99)] == pytest.approx([0, 0, 0.3, 1, 0.75, 0.5, 0.5])


def test_evaluations_of_several_environments_are_averaged_by_their_weights() -> None:
    envs = [{"id": "key_value", "eval": {"weight": 3.0}}, {"id": "sql"}, {"id": "search", "eval": {"weight": 0.0}}]
    weights = eval_weights(TrainConfig.model_validate({"env": envs}).envs)
    assert weights == {"key_value": 3.0, "sql": 1.0, "search": 0.0}
    found = {
        "key_value": Evaluation(0.5, 0.1, 8, 0, []),
        "sql": Evaluation(1.0, 0.5, 3, 1, []),
        "search": Evaluation(None, None, 0, 4, []),
    }
    all_of = combine_evaluations(found, weights)
    assert (all_of.success, all_of.reward) == pytest.approx(((3 * 0.5 + 1.0) / 4, (3 * 0.1 + 0.5) / 4))
    assert (all_of.scored, all_of.unscored) == (11, 5) and all_of.by_env == found
    # Without one that counts, a mean would be of something else, and no checkpoint may be the best by it.
    assert combine_evaluations({**found, "sql": found["search"]}, weights).success is None


def test_the_warm_start_is_of_those_named_or_of_those_with_a_weight() -> None:
    envs = [{"id": "key_value"}, {"id": "sql", "weight": [[0, 0.0], [5, 1.0]]}, {"id": "search", "weight": 0.0}]

    def of(sft: dict[str, Any]) -> list[str]:
        return [env.called for env in warm_start_envs(tuple(map(EnvConfig.model_validate, envs)), SftConfig.model_validate(sft))]

    assert of({}) == ["key_value"] and of({"envs": ["search", "sql"]}) == ["sql", "search"]
    with pytest.raises(ConfigError, match="no environment takes part"):
        of({"envs": []})


def test_the_identity_names_keys_by_environment_whatever_their_order() -> None:
    one, two = {"id": "key_value", "params": {"calls": 2}}, {"id": "sql", "weight": 2.0}

    def of(*envs: Any, purpose: Any = "train") -> Any:
        return identity_of(TrainConfig.model_validate({"env": list(envs)}), purpose)

    assert of(one, two) == of(two, one)
    assert differences(of(one, two), of({**one, "params": {"calls": 3}}, two)) == "env.key_value.params.calls was 2, is 3"
    assert differences(of(one, two), of(one, {**two, "weight": 1.0})) == "env.sql.weight was 2.0, is 1.0"
    assert of(one, two, purpose="eval") == of(one, {**two, "weight": 1.0, "advantage": {"name": "rloo"}}, purpose="eval")
    secret = {**one, "tools": {"mcp": {"s": {"url": "http://user:pw@a"}}}}
    assert "pw@" not in str(of(secret, two))


@pytest.mark.parametrize(("envs", "number", "error", "said"), [
    ([{"id": "key_value"}, {"id": "sql"}], 1, ConfigError("env.reward: no spec"), r"^env\[1\] \(sql\)\.reward: no spec$"),
    ([{"id": "key_value"}, {"id": "sql"}], 0, ResourceError("too large"), r"^env\[0\] \(key_value\): too large$"),
    ({"id": "sql"}, 0, ConfigError("env.reward: no spec"), r"^env.reward: no spec$"),
])  # fmt: skip
def test_a_refusal_names_the_entry(envs: Any, number: int, error: Exception, said: str) -> None:
    config = TrainConfig.model_validate({"env": envs})
    with pytest.raises(type(error), match=said), config.name_entry_in_errors(config.envs[number]):
        raise error
