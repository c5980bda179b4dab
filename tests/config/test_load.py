"""Config files: what is wrong is named with file, key, expectation and the nearest key."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import load_config, parse_overrides
from agentrl.config.keys import NAME, all_keys, inline
from agentrl.run.api.base import config_of
from agentrl.run.config_file import find_config_file
from agentrl.utils.errors import CatalogError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
GOOD = 'name = "x"\n[env]\nid = "key_value"\n'
LOSS, SEVERAL = "algorithm.loss", ("x", "true", "1.5", '["x"]', "{ x = 1 }")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(("text", "overrides", "expected"), [
    (GOOD + "[rollout]\ngroup_sise = 3\n", [], ["run.toml", "rollout.group_sise", "unknown key", "rollout.group_size"]),
    (GOOD + "[rolout]\ngroups = 3\n", [], ["rolout", "did you mean 'rollout'"]),
    (GOOD, ["rollout.groups=0"], ["override 'rollout.groups=0'", "greater than or equal to 1", "got 0"]),
    (GOOD, ["engine=3"], ["override 'engine=3'", "valid string"]),
    (GOOD, ["optim.lr=fast"], ["optim.lr", "valid number", "'fast'"]),
    (GOOD, ["optim.betas=[0.9, 1.0]"], ["optim.betas.1", "less than 1", "got 1.0"]),
    (GOOD, ["optim.betas=[-0.1, 0.99]"], ["optim.betas.0", "greater than or equal to 0"]),
    (GOOD, ["rollout.groups=1.5"], ["rollout.groups", "valid integer"]),
    (GOOD, ["noequals"], ["KEY=VALUE"]),
    (GOOD, ["name.x=1"], ["'name' is a value, not a section"]),
    ('name = "x"\n', [], ["env", "required key is missing"]),
    ("name = \n", [], ["run.toml", "not valid TOML", "line 1"]),
    (GOOD, ["model.init.layrs=2"], ["model.init.layrs", "did you mean 'model.init.layers'"]),
    (GOOD, ["nosuch.key=1"], ["override 'nosuch.key=1': nosuch: unknown key"]),
    (GOOD, ["vllm.block_size=16"], ["unknown key", "as an argument it is 'vllm.args.block_size'"]),
    (GOOD, ["rollout.slow_loop=0.5"], ["unknown key"]),
    (GOOD + "[nosuch]\nx = 1\n", ["nosuch.key=1"], ["run.toml: nosuch: unknown key"]),
    (GOOD, [f"{LOSS}.args.clip_high=0.3"], [f"override '{LOSS}.args.clip_high=0.3': {LOSS}.name", "'ppo_clip'"]),
    (GOOD + "[algorithm]\nloss = { args = {} }\n", [], [f"run.toml: {LOSS}.name: required key is missing", "'ppo_clip'"]),
    ('bas = "quickstart"\n' + GOOD, [], ["bas: unknown key; did you mean 'base'?", "base, name, "]),
    (GOOD + "[rollout]\ngroups = -1\ntemprature = 2\n", [], ["rollout.groups", "-1\n", "rollout.temprature"]),
    (GOOD, ["base=quickstart"], ["base can only be set in a config file"]),
    (GOOD, ["api.usd_per_million=[0.4]"], ["api.usd_per_million"]),
    (GOOD, ["reward.judge.usd_per_million=[0.4]"], ["reward.judge.usd_per_million"]),
    # On another file, which says that group_sise = 3.
    ('base = "run"\n', [], ["circle: run.toml -> run.toml"]),
    ("base = 3\n", [], ["run.toml: base: expected the name of a config", "3"]),
    ('base = "lo"\n', [], ["no such config file", "did you mean", "low.toml"]),
    ('base = "low"\n[rollout]\n', [], ["low.toml: rollout.group_sise", "did you mean 'rollout.group_size'"]),
    ('base = "low"\n[rollout]\ngroups = 0\n', [], ["run.toml: rollout.groups", "got 0"]),
    # The name of the form was taken for a key below it, which ended in a stack trace.
    *((GOOD, [f"model.threads={value}"], ["model.threads: input should be a valid integer"]) for value in SEVERAL),
])  # fmt: skip
def test_a_wrong_config_says_where_and_what(file: Path, text: str, overrides: list[str], expected: list[str]) -> None:
    file.with_name("low.toml").write_text(GOOD + "[rollout]\ngroup_sise = 3\n")
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, find=lambda name: file.with_name(f"{name}.toml"))
    for part in expected:
        assert part in str(caught.value)


def test_a_missing_file_names_the_nearest_and_a_name_without_its_ending_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no such config file; did you mean .*run\.toml"):
        load_config(file.with_name("rum.toml"))
    monkeypatch.chdir(file.parent)
    with pytest.raises(CatalogError, match=r"no config 'run' .*; did you mean the file 'run\.toml'\?"):
        find_config_file("run")


@given(st.text(max_size=30))
def test_any_override_text_parses_or_names_itself(text: str) -> None:
    try:
        parse_overrides([text])
    except ConfigError as error:
        assert "override" in str(error)


def test_a_config_builds_on_another(tmp_path: Path) -> None:
    (tmp_path / "low.toml").write_text(
        'name = "low"\nsteps = 7\n[env]\nid = "key_value"\nparams = { calls = 2, max_value = 4 }\n'
        '[algorithm]\nminibatch = 3\nloss = { name = "ppo_clip", args = { clip_low = 0.1 } }\n'
    )
    (tmp_path / "mid.toml").write_text('base = "low"\nname = "mid"\n[optim]\nlr = 0.5\n')
    (tmp_path / "top.toml").write_text(
        'base = "mid.toml"\nname = "top"\n[env]\nparams = { calls = 9 }\n[algorithm]\nloss = { name = "gspo" }\n'
    )
    config = load_config(tmp_path / "top.toml", ["steps=8"])
    assert (config.name, config.steps, config.optim.lr, config.algorithm.minibatch) == ("top", 8, 0.5, 3)
    assert config.env.id == "key_value" and config.env.params == {"calls": 9}, "a table that is a value replaces the base's"
    assert config.algorithm.loss.name == "gspo" and config.algorithm.loss.args == {}, "arguments belong to their loss"


def test_another_environment_than_the_bases_has_its_own_parameters_and_reward(tmp_path: Path) -> None:
    """Nothing says that a reward spec was written for another environment: what it measures there is anybody's guess."""
    (tmp_path / "low.toml").write_text(
        '[env]\nid = "key_value"\nreward = "key_value_exact"\nparams = { calls = 2 }\nwrappers = [{ name = "wall_clock" }]\n'
    )
    (tmp_path / "other.toml").write_text('base = "low"\n[env]\nid = "mine"\nparams = { rooms = 2 }\n')
    (tmp_path / "above.toml").write_text('base = "other"\n[env]\nid = "mine"\nreward = "mine"\n')
    other = load_config(tmp_path / "other.toml").env
    assert (other.id, other.params, other.reward, other.wrappers) == ("mine", {"rooms": 2}, None, [])
    above = load_config(tmp_path / "above.toml").env
    assert (above.id, above.params, above.reward) == ("mine", {"rooms": 2}, "mine"), "the same environment: key by key"


def test_a_base_is_looked_for_beside_the_file_and_then_on_the_shelf(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "low"\nname = "mine"\n')
    (shelf := tmp_path / "shelf").mkdir()
    (shelf / "low.toml").write_text(GOOD + "[rollout]\ngroups = 3\n")
    found = load_config(tmp_path / "mine.toml", find=lambda name: shelf / f"{name}.toml")
    assert (found.name, found.rollout.groups) == ("mine", 3)
    (tmp_path / "low.toml").write_text(GOOD + "[rollout]\ngroups = 5\n")
    assert load_config(tmp_path / "mine.toml", find=lambda name: shelf / f"{name}.toml").rollout.groups == 5


def test_a_config_in_an_empty_folder_builds_on_one_of_the_shelf(here: Path) -> None:
    Path("mine.toml").write_text('base = "quickstart"\nname = "mine"\n')
    whole = load_config(ROOT / "configs" / "quickstart.toml", ["name=mine"])
    assert load_config("mine.toml", find=find_config_file) == whole


def test_false_takes_a_section_of_the_base_away(tmp_path: Path) -> None:
    (tmp_path / "low.toml").write_text(GOOD + "[model.init]\nlayers = 1\n[sft]\nbatch = 2\n[critic]\nclip = 0.1\n")
    (tmp_path / "top.toml").write_text('base = "low"\nsft = false\n[model]\npath = "x"\ninit = false\n')
    config = load_config(tmp_path / "top.toml")
    assert config.model.path == "x" and config.model.init is None and config.sft is None
    assert config.critic is not None and load_config(tmp_path / "top.toml", ["critic=false"]).critic is None
    with pytest.raises(ConfigError, match="rollout"):
        load_config(tmp_path / "top.toml", ["rollout=false"])


# Each kind of wrong value, at each key, from each source: its place is said, and what is proposed is a value that loads.

WRONG: list[Any] = ["x", "3", "a=1", 3, -1.5, True, ["x"], ["x", "y"], [3], [[]], {"name": "x"}, {"z": 1}, [{"name": "x"}]]


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def load(source: str, key: str, value: Any, file: Path) -> None:
    """A config with the value at the key, given in one of three ways."""
    if source == "Python":
        config_of({"name": "x", "env.id": "key_value"}, {key: value})
    elif source == "command line":
        file.write_text(GOOD)
        load_config(file, [f"{key}={inline(value)}"])
    else:
        above, _, last = key.rpartition(".")
        section = "" if above in ("", "env") else f"[{above}]\n"
        text, line = GOOD.replace('name = "x"\n', "" if key == "name" else 'name = "x"\n'), f"{last} = {inline(value)}\n"
        text = text.replace('id = "key_value"\n', "") if key in ("env.id", "env") else text
        text = text.replace("[env]\n", "") if key == "env" else text
        file.write_text(f"{text}{section}{line}" if above else f"{line}{text}")
        load_config(file)


@pytest.mark.parametrize("source", ["file", "command line", "Python"])
@settings(deadline=None)
@given(data=st.data())
def test_what_is_proposed_loads(source: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    keys = [key.name for key in all_keys() if NAME not in key.name]
    key, value = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(WRONG))
    file = tmp_path_factory.getbasetemp() / "proposed.toml"
    try:
        load(source, key, value, file)
    except ConfigError as problem:
        for line in str(problem).splitlines():
            place, _, said = line.partition(f"{key}: ")
            if not said or "; write " not in said:
                continue
            assert place == {"Python": "the overrides in Python: ", "file": f"{file}: "}.get(
                source, f"override {f'{key}={inline(value)}'!r}: "
            )
            proposed = said.partition("; write ")[2]
            if any(word in proposed for word in ("agentrl config docs", "VALUE", "YYYY")) or proposed[0] == "[":
                continue  # a form, of which the values are not known
            if source == "Python":
                fixed = ast.literal_eval(f"{{{proposed}}}")[key]
            else:
                fixed = read(proposed if source == "file" else shlex.split(proposed)[0])
            try:
                load(source, key, fixed, file)
            except ConfigError as again:
                assert f"{key}: " not in str(again), (key, value, proposed)


def read(assignment: str) -> Any:
    return parse_overrides([assignment.replace(" = ", "=", 1)])[0].value


@pytest.mark.parametrize("source", ["file", "command line", "Python"])
@pytest.mark.parametrize(("key", "value", "mended"), [
    ("trackers", ["x"], [{"name": "x"}]), ("trackers", "x", [{"name": "x"}]), ("tools.sets", "notes", ["notes"]),
    ("algorithm.loss", "ppo_clip", {"name": "ppo_clip"}), ("env.params", "calls=4", {"calls": 4}), ("rollout.groups", [8], 8),
    ("sft", True, {}),
])  # fmt: skip
def test_a_near_value_of_the_right_form_is_proposed(file: Path, source: str, key: str, value: Any, mended: Any) -> None:
    with pytest.raises(ConfigError) as error:
        load(source, key, value, file)
    last = key.rpartition(".")[2]
    forms = {"Python": f"{key!r}: {mended!r}", "file": f"{last} = {inline(mended)}"}
    assert str(error.value).endswith("; write " + forms.get(source, shlex.quote(f"{key}={inline(mended)}")))
    load(source, key, mended, file)


def test_a_path_may_begin_with_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these made a folder that is called ~, or was looked for on the hub."""
    monkeypatch.setenv("HOME", "/home/me")
    keys = {"out": "~/runs", "model.path": "~/m", "weights.folder": "~", "reward.judge.cache": "~/kept"}
    found = config_of("quickstart", keys)
    paths = [found.out, found.model.path, found.weights.folder, found.reward.judge.cache]
    assert paths == ["/home/me/runs", "/home/me/m", "/home/me", "/home/me/kept"]


@pytest.mark.parametrize("key", ["model.path", "env.reward", "weights.folder", "reward.judge.cache"])
def test_an_empty_path_is_not_the_working_folder(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: '' is no path and no name"):
        config_of("quickstart", {key: ""})
