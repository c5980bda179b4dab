"""An environment that is nowhere, and a parameter that it does not take, are told by the key and the line that say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.run.checks import check_config
from agentrl.run.folder import RunFolder
from agentrl.utils.errors import CatalogError
from tests.conftest import Agentrl

SMALL = """\
base = "quickstart"
engine = "embedded"
cluster.backend = "inline"
"""
TWO = """\
[[env]]
id = "key_value"
name = "a"
[[env]]
id = "key_value"
name = "b"
"""
NO_Y = "agentrl/KeyValue-v0: no parameter 'y'; known: calls, "


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(("text", "words", "said"), [
    ('[env]\nid = "key_valu"', [], "c.toml: env.id: no environment 'key_valu'; did you mean 'key_value'?"),
    ("[env]\nparams = { calls = 3, y = 1 }", [], f"c.toml: env.params.y: {NO_Y}"),
    ("[env.params]\ncalls = 3\ny = 1", [], f"c.toml: env.params.y: {NO_Y}"),
    ("[env.params]\ncalls = true", [], "c.toml: env.params.calls: agentrl/KeyValue-v0: parameter calls = True: "),
    ("[env.sandbox]\nprovider = 'process'", [], "c.toml: env.sandbox: agentrl/KeyValue-v0 runs nothing in a sandbox"),
    ("", ["env.id=nope"], "override env.id=nope: env.id: no environment 'nope'; known: "),
    ("", ["env.params.y=1"], f"override env.params.y=1: env.params.y: {NO_Y}"),
    ("[sft]\nparams = { y = 1 }", [], f"c.toml: sft.params.y: {NO_Y}"),
    ("[sft.gate_params]\ny = 1", [], f"c.toml: sft.gate_params.y: {NO_Y}"),
    ("[env.sft]\ngate_params = { y = 1 }", [], f"c.toml: env.sft.gate_params.y: {NO_Y}"),
    ("", ["sft.gate_params.y=1"], f"override sft.gate_params.y=1: sft.gate_params.y: {NO_Y}"),
    (f"{TWO}params = {{ y = 1 }}", [], f"c.toml: env[1] (b).params.y: {NO_Y}"),
    (f"{TWO}sft = {{ params = {{ y = 1 }} }}", [], f"c.toml: env[1] (b).sft.params.y: {NO_Y}"),
    (TWO, ["env.b.params.y=1"], f"override env.b.params.y=1: env[1] (b).params.y: {NO_Y}"),
    (TWO, ["env.a.id=nope"], "override env.a.id=nope: env[0] (a).id: no environment 'nope'"),
    ("[env]\nparams = { y = 1 }", ["base"], "below.toml: env.id: no environment 'nope'"),
])  # fmt: skip
@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["sft"]])
def test_the_key_and_its_place_are_named(command: list[str], text: str, words: list[str], said: str, agentrl: Agentrl) -> None:
    Path("c.toml").write_text(f"{SMALL}{text}\n")
    if words == ["base"]:  # the place may be there
        Path("below.toml").write_text(f"{SMALL}[env]\nid = 'nope'\n")
        Path("c.toml").write_text(f'base = "below"\n{text}\n')
        words = []
    short = ["steps=1", "sft.min_steps=1", "sft.max_steps=1", "eval.tasks=1"]  # of a run that should not have begun
    assert agentrl(command[0], "c.toml", *words, *short, *command[1:], code=2).err.startswith(f"agentrl: {said}")
    assert not Path("runs").exists()


@pytest.mark.parametrize(("words", "said"), [
    (["eval", "--config", "c.toml"], f"c.toml: env.params.y: {NO_Y}"),
    (["eval", "--run", "runs/r"], f"runs/r/config.toml: env.params.y: {NO_Y}"),
    (["eval", "key_value", "env.params.y=1"], f"override env.params.y=1: env.params.y: {NO_Y}"),
    (["rollout", "key_value", "env.params.y=1"], f"override env.params.y=1: env.params.y: {NO_Y}"),
    (["eval", "key_value", "sql", "env.key_value.params.y=1"], "override env.key_value.params.y=1: env[0] (key_value).par"),
    (["eval", "key_value", "env.id=nope"], "override env.id=nope: env.id: no environment 'nope'"),
    (["eval", "key_valu"], "no environment 'key_valu'; did you mean 'key_value'?"),
    (["rollout", "key_valu"], "no environment 'key_valu'; did you mean 'key_value'?"),
    (["train", "--resume", "runs/r"], f"runs/r/config.toml: env.params.y: {NO_Y}"),
    (["train", "--resume", "runs/r", "--dry-run"], f"runs/r/config.toml: env.params.y: {NO_Y}"),
])  # fmt: skip
def test_every_command_that_plays_a_config_names_them(words: list[str], said: str, tiny: str, agentrl: Agentrl) -> None:
    Path("c.toml").write_text(f"{SMALL}[env]\nparams = {{ y = 1 }}\n")
    RunFolder.create(load_config("c.toml", ["name=r"], lambda name: Path(__file__).parents[2] / f"configs/{name}.toml"))
    more = [] if words[0] == "train" else ["--model", tiny]
    assert agentrl(*words, *more, code=2).err.startswith(f"agentrl: {said}")


def test_without_a_file_the_key_is_named() -> None:
    table = ["engine=embedded", "cluster.backend=inline", "sft.gate_params.y=1"]
    config = load_config(Path(__file__).parents[2] / "configs" / "quickstart.toml", table)
    with pytest.raises(CatalogError, match=r"^sft\.gate_params\.y: agentrl/KeyValue-v0: no parameter 'y'"):
        check_config(config, capacity=True)


def test_an_environment_that_is_not_chosen_may_be_missing(tiny: str) -> None:
    Path("c.toml").write_text(f"{SMALL}{TWO}params = {{ y = 1 }}\n[rollout]\nmax_turns = 1\nmax_turn_tokens = 4\n")
    assert main(["eval", "a", "--config", "c.toml", "--model", tiny, "-n", "1", "--out", "out"]) == 0
