"""Config files: what is wrong is named with file, key, expectation and the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import load_config, parse_overrides, to_toml
from agentrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GOOD = 'name = "x"\n[env]\nid = "key_value"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (GOOD + "[rollout]\ngroup_sise = 3\n", [], ["run.toml", "rollout.group_sise", "unknown key", "rollout.group_size"]),
        (GOOD + "[rolout]\ngroups = 3\n", [], ["rolout", "did you mean 'rollout'"]),
        (GOOD, ["rollout.groups=0"], ["override 'rollout.groups=0'", "greater than or equal to 1", "got 0"]),
        (GOOD, ["engine=vlm"], ["override 'engine=vlm'", "'auto', 'embedded' or 'vllm'"]),
        (GOOD, ["optim.lr=fast"], ["optim.lr", "valid number", "'fast'"]),
        (GOOD, ["rollout.groups=1.5"], ["rollout.groups", "valid integer"]),
        (GOOD, ["noequals"], ["KEY=VALUE"]),
        (GOOD, ["name.x=1"], ["'name' is a value, not a section"]),
        ('name = "x"\n', [], ["env", "required key is missing"]),
        ("name = \n", [], ["run.toml", "not valid TOML", "line 1"]),
        (GOOD, ["model.init.layrs=2"], ["model.init.layrs", "did you mean 'model.init.layers'"]),
    ],
)
def test_a_wrong_config_says_where_and_what(tmp_path: Path, text: str, overrides: list[str], expected: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    for part in expected:
        assert part in str(caught.value)


def test_a_missing_file_names_the_nearest(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such config file; did you mean .*run\.toml"):
        load_config(file.with_name("rum.toml"))


def test_several_mistakes_are_all_told(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD + "[rollout]\ngroups = -1\ntemprature = 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 2


def test_overrides_replace_values_and_create_sections(file: Path) -> None:
    config = load_config(file, ["seed=7", "rollout.groups=4", "sft.batch=2", "env.params.calls=[2, 6]", "engine=embedded"])
    assert (config.seed, config.rollout.groups, config.engine) == (7, 4, "embedded")
    assert config.sft is not None and config.sft.batch == 2
    assert config.env.params == {"calls": [2, 6]}


def test_the_resolved_config_reads_back_equal(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["sft.gate=0.5", "model.init.layers=2", "optim.betas=[0.8, 0.9]"])
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load_config(again) == config


@pytest.mark.parametrize("key", ["reward.judge.usd_per_million", "api.usd_per_million"])
def test_prices_are_a_pair(file: Path, key: str) -> None:
    config = load_config(file, [f"{key}=[0.4, 1.6]"])
    assert (0.4, 1.6) in (config.reward.judge.usd_per_million, config.api.usd_per_million)
    with pytest.raises(ConfigError, match=key):
        load_config(file, [f"{key}=[0.4]"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_packaged_config_is_valid(path: Path) -> None:
    assert load_config(path).name


@given(st.text(max_size=30))
def test_any_override_text_parses_or_names_itself(text: str) -> None:
    try:
        parse_overrides([text])
    except ConfigError as error:
        assert "override" in str(error)
