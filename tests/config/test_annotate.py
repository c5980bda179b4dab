"""A run's config.toml: complete, with what each key means and where its value is from, and read back as the equal config."""

from __future__ import annotations

import datetime
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import TrainConfig, load_config, to_toml
from agentrl.config.identity import identity_of
from agentrl.config.keys import all_keys, inline
from agentrl.config.load import config_from, with_absolute_paths
from agentrl.config.origin import differing, read_origins
from agentrl.run.api.base import config_of
from agentrl.run.config_file import find_config_file
from agentrl.run.folder import RunFolder
from agentrl.utils.errors import ConfigError
from tests.config.test_identity import EVERY

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
LOW = (
    'name = "low"\n\n# a comment\n[env]\nid = "key_value"\nparams = { calls = 2 }\n'
    '[rollout]\ngroups = [\n  "no"\n]\nmax_turns = 3\n'
)
TOP = 'base = "low"\nname = "top"\nsft = false\n[rollout]\ngroups = 4\n[algorithm]\nloss = { name = "gspo" }\n'


def again(config: TrainConfig) -> TrainConfig:
    return config_from(tomllib.loads(to_toml(config)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_packaged_config_reads_back_equal(path: Path) -> None:
    config = load_config(path, ["model.path=x"], find_config_file)
    assert again(config) == config


def test_with_every_key_set_and_with_every_optional_one_unset_it_reads_back_equal() -> None:
    every = TrainConfig.model_validate(EVERY)
    least = config_from({"env": {"id": "a"}}, ["reward.judge.calls=false", "critic.clip=false"])
    assert again(every) == every and again(least) == least
    assert least.reward.judge.calls is None and "\ncalls = false  # calls" in to_toml(least)
    assert identity_of(again(every), "train") == identity_of(every, "train")


def test_every_key_stands_in_it_once_with_its_meaning_and_unit() -> None:
    text = to_toml(TrainConfig.model_validate(EVERY))
    lines, table = text.split("\n"), tomllib.loads(text)
    keys = [
        key for key in all_keys() if not key.section and "NAME" not in key.name and key.name not in ("env.tools", "env.agent")
    ]
    for key in keys:
        inner = table
        for part in key.name.split("."):
            inner = inner[part]
        first = key.meaning.split(". ")[0].rstrip(".")[:60]
        assert any(line.startswith(f"# {first[:40]}") for line in lines), key.name
    assert "max_turns = 16  # turns" in text and "retries = 3  # attempts" in text
    assert max(map(len, lines)) < 200


def test_each_value_says_where_it_is_from(here: Path) -> None:
    Path("low.toml").write_text(LOW)
    Path("top.toml").write_text(TOP)
    overrides = ["env.params.max_value=3", "optim.lr=0.5", "~rollout.max_turns"]
    text = to_toml(load_config("top.toml", overrides), read_origins("top.toml", overrides))
    for line in (
        'name = "top"  # top.toml',
        'id = "key_value"  # low.toml',
        "params = { calls = 2, max_value = 3 }  # low.toml, override env.params.max_value=3",
        "groups = 4  # groups; top.toml",
        "max_turns = 16  # turns; default, by override ~rollout.max_turns",  # low.toml had set it
        'loss = { name = "gspo", args = {} }  # top.toml',
        "lr = 0.5  # override optim.lr=0.5",
        "seed = 0  # default",
    ):
        assert line in text.split("\n"), line
    assert "# sft is unset: " in text


def test_what_a_base_said_of_another_environment_is_not_the_origin(here: Path) -> None:
    Path("low.toml").write_text('[env]\nid = "a"\nreward = "r"\nparams = { x = 1 }\n')
    Path("top.toml").write_text('base = "low"\n[env]\nid = "b"\n')
    origins = read_origins("top.toml")
    assert (origins.of(("env", "id")), origins.of(("env", "reward")), origins.of(("env", "params"))) == (
        "top.toml", "default", "default",
    )  # fmt: skip


def test_the_environments_of_a_list_have_origins_of_their_own() -> None:
    file, renamed = ROOT / "configs" / "two_envs.toml", "env.functions.name=f"
    origins = read_origins(file, ["env.functions.weight=2", renamed])
    assert origins.of(("env", 1, "params")).endswith("two_envs.toml")
    assert origins.of(("env", 1, "weight")) == "override env.functions.weight=2"
    assert origins.of(("env", 1, "name")) == f"override {renamed}" and origins.of(("env", 0, "weight")) == "default"
    for taken in ("~env.0", "~env.numbers"):
        left = read_origins(file, [taken])
        assert left.of(("env", 0, "id")).endswith("two_envs.toml") and left.of(("env", 0, "weight")) == "default", "the first now"


def test_a_file_that_names_an_environment_by_its_number_is_the_origin(here: Path) -> None:
    Path("low.toml").write_text('[[env]]\nid = "a"\nreward = "r"\n[[env]]\nid = "b"\n')
    Path("top.toml").write_text('base = "low"\n[env.0]\nreward = "s"\n')
    assert read_origins("top.toml").of(("env", 0, "reward")) == "top.toml"
    with pytest.raises(ConfigError, match=r"^top\.toml: env\[0\] \(a\)\.weight: "):
        Path("low.toml").write_text('[[env]]\nid = "a"\nweight = 1\n[[env]]\nid = "b"\n')
        Path("top.toml").write_text('base = "low"\n[env.0]\nweight = -1\n')
        load_config("top.toml")


def test_a_comment_cannot_become_a_key() -> None:
    """An override may hold a line break; in a comment it would begin a line of TOML."""
    base = ROOT / "configs" / "quickstart.toml"
    overrides = ['env.system="a\nb"', "env.params.x=1\nsteps = 7"]
    with pytest.raises(ConfigError, match="steps: input should be a valid integer"):
        load_config(base, ["steps=1\nseed = 7"])
    text = to_toml(load_config(base, overrides), read_origins(base, overrides))
    assert tomllib.loads(text)["steps"] == 40


values = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_any_value_on_one_line_reads_back_equal(value) -> None:
    text = inline(value)
    assert "\n" not in text and tomllib.loads(f"x = {text}")["x"] == value


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, datetime.date(2024, 1, 2), [datetime.datetime(2024, 1, 2, 3, 4), math.inf]]
)
def test_what_toml_has_and_json_has_not_reads_back_equal(value: object) -> None:
    """Also on its way through absolute paths, by which each run's config goes, and through Python."""
    config = config_from({"env": {"id": "a", "params": {"x": value}}})
    assert again(config).envs[0].params == {"x": value}
    assert with_absolute_paths(config).envs[0].params == {"x": value}
    assert config_of(config).envs[0].params == {"x": value}
    assert differing(config, config_from({"env": {"id": "a"}})) == {"env.params.x": (value, None)}


def test_what_toml_cannot_say_is_refused_by_its_key_before_there_is_a_folder(tmp_path: Path) -> None:
    config = config_from({"env": {"id": "a", "params": {"x": [1, None]}}, "out": str(tmp_path), "name": "none"})
    with pytest.raises(ConfigError, match=r"env.params: \{'x': \[1, None\]\} cannot be written to config.toml"):
        RunFolder.create(config)
    assert list(tmp_path.iterdir()) == []
