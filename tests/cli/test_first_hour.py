"""What somebody meets who has the docs alone: commands as they are documented, and the mistakes of a first hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.run.checks.reward_checks import check_success
from agentrl.utils.errors import ConfigError
from agentrl.utils.terminal import console
from tests.conftest import Agentrl
from tests.run.made_folders import episode, run_folder
from tests.run.starts import scored


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose path has a space, and output that goes to no terminal."""
    home = tmp_path / "my project"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.delenv("COLUMNS", raising=False)
    return home


PLAY, SERVE = ["env", "play", "key_value"], ["env", "serve", "key_value", "--mcp"]
NUMBERS = ("-n/--tasks", "-k/--samples", "--max-concurrent")


@pytest.mark.parametrize(("command", "option", "given", "least"), [
    *((command, "--seed", "-1", 0) for command in (PLAY, SERVE, ["init-model", "m"])),
    *(([name, "key_value", "--policy", "gold"], option, "0", 1) for name in ("rollout", "eval") for option in NUMBERS),
])  # fmt: skip
def test_a_number_that_is_too_small_is_refused_by_its_option(
    agentrl: Agentrl, command: list[str], option: str, given: str, least: int
) -> None:
    if command is SERVE:
        pytest.importorskip("agentrl.contrib.remote_envs")
    text = agentrl(*command, option.partition("/")[0], given, code=2)
    assert f"argument {option}: expected a whole number of at least {least}, got '{given}'" in text and "Traceback" not in text


def test_a_random_model_replaces_none_that_is_there(here: Path, agentrl: Agentrl) -> None:
    (here / "trained").mkdir()
    (here / "trained" / "model.safetensors").write_bytes(b"a week of training")
    text = agentrl("init-model", "trained", code=2)
    assert "trained: already exists" in text and "Give a path that does not exist" in text
    assert (here / "trained" / "model.safetensors").read_bytes() == b"a week of training"


@pytest.fixture
def compared(here: Path, agentrl: Agentrl) -> Path:
    """Two evaluations of one environment, and what comparing them wrote beside them."""
    assert main(["eval", "key_value", "--policy", "gold", "--policy", "idle", "-n", "2"]) == 0
    return here / "evals" / "key_value"


def test_evaluations_are_compared_by_the_documented_pattern(compared: Path, agentrl: Agentrl) -> None:
    """`agentrl eval --compare evals/key_value/*`, as a shell hands it on."""
    names = sorted(str(path) for path in compared.iterdir())
    assert [Path(name).name for name in names] == ["comparison.json", "policy_gold", "policy_idle"]
    text = agentrl("eval", "--compare", *names)
    # No terminal, so no line is broken; the names of the two differ at their ends.
    lines = [line for line in text.splitlines() if "policy_" in line and "minus" not in line and "calls" not in line]
    rows = {line.split()[1]: line for line in lines}
    assert set(rows) == {"policy_gold", "policy_idle"} and "0 / 2 of 2" in rows["policy_idle"]
    assert "minus policy_gold" in text
    text = agentrl("eval", "--compare", *names[:2], code=2)
    assert "two or more folders of evaluations are needed, got" in text and "comparison.json" in text


def test_show_prints_the_tables_of_an_evaluation_whose_parts_are_in_folders(compared: Path, here: Path, agentrl: Agentrl) -> None:
    """The folders that `agentrl eval` names: of several models the comparison, of several environments the table of all."""
    printed = agentrl("eval", "--compare", *(str(compared / name) for name in ("policy_gold", "policy_idle")))
    assert agentrl("show", str(compared)) == printed
    rows = json.loads(agentrl("show", str(compared), "--json"))["envs"]["key_value"]["rows"]
    assert [row["model"] for row in rows] == ["policy_gold", "policy_idle"]
    (here / "two.toml").write_text('[[env]]\nid = "key_value"\nname = "a"\n[[env]]\nid = "key_value"\nname = "b"\n')
    printed = agentrl("eval", "--config", "two.toml", "--policy", "gold", "-n", "2", "--out", "two")
    shown = agentrl("show", "two")
    assert "held-out tasks by environment" in shown
    assert {*map(str.strip, shown.splitlines())} <= {*map(str.strip, printed.splitlines())}
    assert set(json.loads(agentrl("show", "two", "--json"))["envs"]) == {"a", "b"}
    text = agentrl("show", "two", "--step", "0", code=2)
    assert "no episodes of its own; there are evaluations in it: two/a, two/b" in text


def test_a_narrow_terminal_breaks_names_and_cuts_none(compared: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    text = agentrl("eval", "--compare", *(str(compared / name) for name in ("policy_gold", "policy_idle")))
    assert "…" not in text and max(map(len, text.splitlines())) <= 70


def test_what_goes_to_no_terminal_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert console().width == 10_000 and console(width=90).width == 90
    monkeypatch.setenv("COLUMNS", "66")
    assert console().width == 66


def test_episodes_that_are_not_there_are_told_by_those_that_are(here: Path, agentrl: Agentrl) -> None:
    pytest.importorskip("agentrl.contrib.view")
    run_folder(here / "runs" / "a", {"step_000003": [episode(1), episode(2)]}, [{"step": 3, "phase": "train", "success": 0.5}])
    text = agentrl("runs", "failures", "runs/a", "--step", "10", code=2)
    assert "--step 10: no episodes are of it; there are episodes of 3" in text
    text = agentrl("show", "runs/a", "--episode", "step_000003.7", code=2)
    assert "for example step_000003.0; step_000003 has 2 episodes, from 0 on" in text
    assert "ref: there is no such folder" in agentrl("show", "ref", code=2)
    assert "a: there is no such folder; did you mean 'runs/a'?" in agentrl("show", "a", code=2)
    shown = agentrl("show", "runs/a", "--step", "3")
    assert "step_000003.0" in shown and "step_000003.1" in shown, "an episode's name is in one piece, for grep"


def test_commands_that_are_advised_can_be_typed(here: Path) -> None:
    from agentrl.run.trackers import TensorBoard

    tracker = TensorBoard.__new__(TensorBoard)
    tracker._folder = here / "runs" / "a" / "tensorboard"
    assert tracker.look() == f"tensorboard --logdir '{here}/runs/a/tensorboard'"


def test_the_lint_that_a_refusal_advises_finds_the_spec(here: Path, agentrl: Agentrl) -> None:
    """The spec's own name is not what `agentrl reward lint` takes, if it is a file."""

    assert main(["env", "new", "shop"]) == 0
    spec = json.loads((here / "envs" / "shop" / "reward.json").read_text())
    spec["root"]["args"]["expect"] = -1
    (here / "not the right one.json").write_text(json.dumps({**spec, "name": "mine"}))
    config = load_config("shop.toml", ["env.reward=not the right one.json"])
    with pytest.raises(ConfigError) as error:
        check_success(scored(config))
    assert "agentrl reward lint 'not the right one.json' --env shop shows more" in str(error.value)
    assert "gold-no-success" in agentrl("reward", "lint", "not the right one.json", "--env", "shop", code=1)


POINTS = "expected a number >= 0 or list of pairs of integer >= 0 and number >= 0, such as [[0, 1.0], [40, 0.5]]"


@pytest.mark.parametrize("words, message", [
    (
        ["algorithm.advantage=grpo"],
        "algorithm.advantage: expected a table, got 'grpo'; write 'algorithm.advantage={ name = \"grpo\" }'",
    ),
    (["rollout=3"], "rollout: expected a table, got 3; write rollout.KEY=VALUE (agentrl config docs rollout)"),
    (["model.init=true"], "model.init: expected a table, got true; write 'model.init={}'"),
    (["rollout.start=[{}]"], "rollout.start: expected one table, got a list of 1; write 'rollout.start={}'"),
    (["steps=true"], "steps: input should be a valid integer, got true"),
    (["rollout.temperature=[[1.0,0]]"], f"rollout.temperature: {POINTS}, got [[1.0, 0]]"),
    (["rollout.temperature=[[0,1],[4]]"], f"rollout.temperature: {POINTS}, got [[0, 1], [4]]"),
    (["env.weight=[[0,1,2]]"], f"env.weight: {POINTS}, got [[0, 1, 2]]"),
])  # fmt: skip
def test_a_value_where_a_table_belongs(here: Path, agentrl: Agentrl, words: list[str], message: str) -> None:
    (here / "c.toml").write_text('[env]\nid = "key_value"\n')
    text = agentrl("config", "show", "c.toml", *words, code=2)
    assert f"agentrl: override {words[0]!r}: {message}" in text and "Config" not in text and "Choice" not in text


def test_what_a_file_sets_by_an_empty_section_is_shown(here: Path, agentrl: Agentrl) -> None:
    """`--given` of a config with `[model.init]` reads back as that config."""
    text = '\ufeffname = "x"\n\n[env]\nid = "key_value"\n\n[model.init]\n\n[rollout.start]\n'
    (here / "c.toml").write_text(text, encoding="utf-8")  # with the mark with which some editors begin
    shown = agentrl("config", "show", "c.toml", "--given")
    assert "\n[model.init]\n" in shown and "\n[rollout.start]" in shown and "[optim]" not in shown
    (here / "d.toml").write_text(shown)
    assert load_config("d.toml") == load_config("c.toml")


def test_configs_that_are_none_are_told_by_what_is_near(here: Path, agentrl: Agentrl) -> None:
    (here / "shop é.toml").write_text('[env]\nid = "key_value"\n')
    run_folder(here / "runs" / "a", {"step_000001": [episode(1)]}, [])
    assert "a file here: did you mean 'shop é.toml'?" in agentrl("train", "shop é.tml", code=2)
    assert "a file here" not in agentrl("config", "show", "zzzz", code=2)
    assert ".: a folder; name a TOML file" in agentrl("train", ".", code=2)
    text = agentrl("train", "runs/a", code=2)
    assert "runs/a: a folder; its config: runs/a/config.toml; to continue the run: --resume" in text
    text = agentrl("train", "shop é.toml", "--resume", "runs/a", code=2)
    assert "--resume runs/a has its own config: leave 'shop é.toml' out" in text
    for missing in ("runs/b", "runs"):
        text = agentrl("train", "--resume", missing, code=2)
        assert text.startswith(f"agentrl: {missing}: not a run folder (it has no config.toml); runs in ")
        assert text.endswith("/runs: a\n")


def test_a_long_command_says_that_its_reader_has_gone(here: Path) -> None:
    """`agentrl train ... | head` ended the run with code 1 and without a word."""
    read, write = os.pipe()
    os.close(read)
    words = ["rollout", "key_value", "--policy", "gold", "-n", "1"]
    try:
        done = subprocess.run([sys.executable, "-m", "agentrl", *words], stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert done.stderr.startswith("agentrl: the reader of this output has") and done.stderr.count("\n") == 1, done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("wrong, near", [("task/gold/answer", "/task/gold/answer"), ("/tsk/gold", "/task/gold"), ("/x", "")])
def test_a_pointer_that_is_none_is_told_how_it_begins(here: Path, agentrl: Agentrl, wrong: str, near: str) -> None:
    root = {"use": "number.close", "args": {"expect": {"$": wrong}}}
    (here / "s.json").write_text(json.dumps({"agentrl_reward": 1, "name": "s", "root": root}))
    text = agentrl("reward", "lint", "s.json", code=2)
    told = f"s.json: at /root/args/expect/$: {wrong!r} is no pointer of a spec, which begins with /task, /episode, /turn or /call"
    assert told in text and text.rstrip().endswith(f"; did you mean {near!r}?" if near else "/call")


def test_a_new_environment_says_whose_name_it_takes(here: Path, agentrl: Agentrl) -> None:
    """Every packaged config of key_value would be of the new one, in this folder."""
    text = agentrl("env", "new", "key_value")
    assert "in this folder key_value now means this environment; use the full id for agentrl/KeyValue-v0" in text
    assert agentrl("env", "show", "key_value").startswith("my/KeyValue-v0")
    assert agentrl("env", "show", "agentrl/KeyValue-v0").startswith("agentrl/KeyValue-v0")
    assert "no longer" not in agentrl("env", "new", "shop")


@pytest.mark.parametrize("number", ["99999999999999999999999", "-9223372036854775809", "0x8000000000000000"])
def test_an_integer_that_no_machine_holds_is_no_toml(number: str, here: Path, agentrl: Agentrl) -> None:
    """A dry run ended in numpy's traceback."""
    (here / "c.toml").write_text(f'[env]\nid = "key_value"\n[rollout]\ngroups = {number}\n')
    told = agentrl("train", "c.toml", "--dry-run", code=2)
    assert f"c.toml: not valid TOML: {str(int(number, 0))[:24]}... is beyond the integers of TOML, which have 64 bits" in told
    (here / "c.toml").write_text('[env]\nid = "key_value"\n')
    told = agentrl("train", "c.toml", "--dry-run", f"rollout.groups={number}", code=2)
    assert "rollout.groups" in told and number in told
