"""`agentrl config`: docs, show, diff and schema, from the command line."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.config.keys import all_keys
from agentrl.config.load import config_from
from tests.conftest import Agentrl

ROOT = Path(__file__).resolve().parents[2]
PPO = str(ROOT / "configs" / "ppo.toml")
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


# -- docs --------------------------------------------------------------------------------------------


def test_a_key_is_explained_with_type_default_unit_and_meaning(agentrl: Agentrl) -> None:
    text = agentrl("config", "docs", "rollout.turn_timeout")
    assert text.startswith("rollout.turn_timeout\n  Time without any token or answer of the engine")
    assert "type: number > 0 <= 1e+09; default: 300.0; unit: seconds" in text


def test_the_names_that_a_key_takes_are_listed_with_their_arguments(agentrl: Agentrl) -> None:
    text = agentrl("config", "docs", "algorithm.loss.name")
    assert "  ppo_clip(clip_low = 0.2, clip_high = 0.2" in text and "  gspo(" in text
    [row] = json.loads(agentrl("config", "docs", "env.advantage", "--json"))
    assert row["key"] == "env.advantage" and {"grpo", "gae", "rloo"} <= {one["name"] for one in row["choices"]}
    gae = next(one for one in row["choices"] if one["name"] == "gae")
    assert gae["args"] == {"gamma": "1.0", "lam": "1.0", "whitened": "true"}


def test_all_keys_are_listed_with_a_line_each(agentrl: Agentrl) -> None:
    lines = agentrl("config", "docs").split("\n")
    for key in all_keys():
        assert any(line.startswith(f"[{key.name}]" if key.section else f"{key.name} ") for line in lines), key.name
    rows = json.loads(agentrl("config", "docs", "--json"))
    assert [row["key"] for row in rows] == [key.name for key in all_keys()]


def test_an_unknown_key_is_told_with_the_nearest(agentrl: Agentrl) -> None:
    assert "rollout.group: unknown key; did you mean 'rollout.groups'" in agentrl("config", "docs", "rollout.group", code=2)


# -- show --------------------------------------------------------------------------------------------


def test_what_is_shown_is_the_resolved_config(agentrl: Agentrl) -> None:
    text = agentrl("config", "show", PPO, "model.path=some/model", "~sft")
    assert config_from(tomllib.loads(text)) == load_config(PPO, ["model.path=some/model", "sft=false"])


def test_each_value_is_shown_with_its_origin(agentrl: Agentrl) -> None:
    lines = agentrl("config", "show", PPO, "optim.lr=0.5", "~model.init", "model.path=x", "--origin").split("\n")
    assert "groups = 16  # groups; configs/quickstart.toml" in lines
    assert "lr = 0.5  # override optim.lr=0.5" in lines and 'name = "ppo"  # configs/ppo.toml' in lines
    assert "# init is unset (default, by override ~model.init)" in lines and "seed = 0  # default" in lines
    [engine] = [line for line in lines if line.startswith('engine = "auto"')]
    assert re.search(r'; here: "(embedded|vllm)"$', engine)


def test_only_what_is_given_is_shown(agentrl: Agentrl) -> None:
    table = tomllib.loads(agentrl("config", "show", PPO, "rollout.top_k=3", "--given"))
    assert table["rollout"] == {
        "groups": 16,
        "group_size": 8,
        "max_turns": 8,
        "max_turn_tokens": 64,
        "max_episode_tokens": 512,
    } | {"top_k": 3}
    assert "cluster" not in table and "reward" not in table
    rows = json.loads(agentrl("config", "show", PPO, "rollout.top_k=3", "--given", "--origin", "--json"))
    assert rows["rollout.top_k"] == {"value": 3, "origin": "override rollout.top_k=3"} and "seed" not in rows


def test_a_runs_folder_and_a_packaged_name_are_configs_too(agentrl: Agentrl, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "mine"\n[env]\nid = "key_value"\n')
    assert 'name = "mine"' in agentrl("config", "show", str(tmp_path))
    assert 'name = "quickstart"' in agentrl("config", "show", "quickstart")


# -- diff --------------------------------------------------------------------------------------------


def test_keys_that_differ_are_listed_with_both_values(agentrl: Agentrl) -> None:
    found = json.loads(agentrl("config", "diff", "configs/ppo.toml", "configs/dapo.toml", "rollout.groups=4", "--json"))
    assert found["rollout.groups"] == [16, 4] and found["env.reward"] == ["key_value_exact", "key_value_dapo"]
    assert found["critic.epochs"] == [2, None] and "steps" not in found
    text = agentrl("config", "diff", "configs/ppo.toml", "steps=3", "~critic")
    for line in (r"steps +40 +->  3", r"critic.lr +0.001 +->  unset"):
        assert re.search(f"^{line}$", text, re.MULTILINE)
    assert agentrl("config", "diff", PPO, "configs/ppo.toml") == "no key differs\n"
    assert "env.functions.weight" in agentrl("config", "diff", "configs/two_envs.toml", "env.functions.weight=2")


UNPAIRED = [([PPO], "expected two configs"), (["a=1", PPO], "a config comes first"), (["a", "b", "c"], "expected two configs")]


@pytest.mark.parametrize(("words", "why"), UNPAIRED)
def test_what_is_no_pair_of_configs_is_refused(agentrl: Agentrl, words: list[str], why: str) -> None:
    assert why in agentrl("config", "diff", *words, code=2)
