"""Overrides of the command line: `a.b=c` sets, `~a.b` unsets, and what is set replaces its alternatives."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.cli.main import _parse
from agentrl.config import TrainConfig, load_config
from agentrl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
BASE = """
name = "base"
stop_at_success = 0.9
[env]
id = "key_value"
reward = "key_value_exact"
params = { calls = 2, max_value = 4 }
[model]
dtype = "float32"
[model.init]
layers = 1
[sft]
batch = 2
[rollout]
groups = 3
max_turns = 4
[algorithm]
loss = { name = "ppo_clip", args = { clip_low = 0.1, clip_high = 0.3 } }
[tools.mcp.shop]
command = ["serve"]
"""
TWO = 'name = "two"\n[[env]]\nid = "key_value"\nreward = "key_value_dapo"\n[[env]]\nid = "python"\n'


def read(tmp_path: Path, *overrides: str, text: str = BASE) -> TrainConfig:
    (tmp_path / "base.toml").write_text(text)
    return load_config(tmp_path / "base.toml", overrides)


def test_the_quickstarts_model_is_replaced_as_its_page_says() -> None:
    """docs/quickstart.md: `model.path=FOLDER_OR_HUB_NAME` for a real one. The warm start stays until it is taken away."""
    config = load_config(QUICKSTART, ["model.path=some/model"])
    assert (config.model.path, config.model.init) == ("some/model", None)
    assert config.sft is not None and config.optim.lr == 1e-3, "only the model is another one"
    bare = load_config(QUICKSTART, ["model.path=some/model", "~sft", "~optim", "~model.dtype"])
    assert (bare.sft, bare.optim.lr, bare.optim.betas, bare.model.dtype) == (None, None, (0.9, 0.999), "auto")


def test_alternatives_replace_one_another_in_a_config_above_its_base_too(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "real.toml").write_text('base = "base"\n[model]\npath = "x"\n[tools.mcp.shop]\nurl = "http://x"\n')
    (tmp_path / "tiny.toml").write_text('base = "real"\n[model.init]\nlayers = 2\n')
    real, tiny = load_config(tmp_path / "real.toml"), load_config(tmp_path / "tiny.toml")
    assert (real.model.path, real.model.init, real.model.dtype) == ("x", None, "float32")
    assert (real.tools.mcp["shop"].url, real.tools.mcp["shop"].command) == ("http://x", [])
    assert tiny.model.path is None and tiny.model.init is not None and tiny.model.init.layers == 2
    back = load_config(tmp_path / "real.toml", ["model.init.layers=3"])
    assert back.model.path is None and back.model.init is not None and back.model.init.layers == 3


def test_both_alternatives_on_the_command_line_are_both_kept_for_the_check_to_refuse(tmp_path: Path) -> None:
    model = read(tmp_path, "model.path=x", "model.init.layers=2").model
    assert model.path == "x" and model.init is not None and model.init.layers == 2
    url = read(tmp_path, "tools.mcp.shop.url=http://x").tools.mcp["shop"]
    assert (url.url, url.command) == ("http://x", [])
    agent = read(tmp_path, 'agent.command=["a"]').agent
    assert agent is not None and agent.command == ["a"]
    for text in ("model.path=false", "~model.path"):
        assert read(tmp_path, text).model.init is not None, "what is false or unset replaces nothing"


@pytest.mark.parametrize(("overrides", "expected"), [
    (["~model.init"], lambda c: (c.model.init, c.model.dtype) == (None, "float32")),
    (["~sft"], lambda c: c.sft is None),
    (["~rollout.groups"], lambda c: (c.rollout.groups, c.rollout.max_turns) == (16, 4)),
    (["~rollout"], lambda c: (c.rollout.groups, c.rollout.max_turns) == (16, 16)),
    (["~stop_at_success"], lambda c: c.stop_at_success is None),
    (["~env.reward"], lambda c: c.env.reward is None),
    (["~env.params.calls"], lambda c: c.env.params == {"max_value": 4}),
    (["~env.params"], lambda c: c.env.params == {}),
    (["~algorithm.loss.args.clip_low"], lambda c: c.algorithm.loss.args == {"clip_high": 0.3}),
    (["~algorithm.loss"], lambda c: c.algorithm.loss.args == {}),
    (["~tools.mcp.shop"], lambda c: c.tools.mcp == {}),
    (["~critic"], lambda c: c.critic is None),  # nothing had set it: it stays as it is
    (["~model.lora.rank"], lambda c: c.model.lora is None),
    (["~model.init", "model.init.hidden=16"], lambda c: (c.model.init.layers, c.model.init.hidden) == (3, 16)),
    (["rollout.groups=9", "~rollout.groups"], lambda c: c.rollout.groups == 16),
    (["~rollout.groups", "rollout.groups=9"], lambda c: c.rollout.groups == 9),
    (["sft=false", "sft.batch=7"], None),
    (['env.params."a.b = c".d=1'], lambda c: c.env.params["a.b = c"] == {"d": 1}),
    (['env.params."a.b"=1', "~env.params.'a.b'"], lambda c: "a.b" not in c.env.params and "calls" in c.env.params),
    (['env.params.x=a="b.c"'], lambda c: c.env.params["x"] == 'a="b.c"'),
    (["stop_at_success=false"], lambda c: c.stop_at_success is None),
    (["~model.dtype"], lambda c: c.model.dtype == "auto"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_an_override_unsets(tmp_path: Path, overrides: list[str], expected) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="'sft' is a value, not a section"):
            read(tmp_path, *overrides)
    else:
        assert expected(read(tmp_path, *overrides))


def test_false_is_no_limit_where_there_is_one_by_default(tmp_path: Path) -> None:
    config = read(tmp_path, "reward.judge.calls=false", "critic.clip=false")
    assert config.reward.judge.calls is None and config.critic is not None and config.critic.clip is None
    assert read(tmp_path).reward.judge.calls == 10_000
    assert read(tmp_path, "model.activation_checkpointing=false").model.activation_checkpointing is False, "a switch is one"


def test_of_several_environments_one_is_taken_away_by_name(tmp_path: Path) -> None:
    assert [env.called for env in read(tmp_path, "~env.python", text=TWO).envs] == ["key_value"]
    assert read(tmp_path, "~env.key_value.reward", text=TWO).envs[0].reward is None
    assert read(tmp_path, "~env.1", "~env.key_value.reward", text=TWO).envs[0].reward is None


@pytest.mark.parametrize(("text", "overrides", "said"), [
    (BASE, ["~rollout.group"], ["override '~rollout.group'", "rollout.group: unknown key; did you mean 'rollout.groups'"]),
    (BASE, ["~rolout"], ["override '~rolout'", "did you mean 'rollout'"]),
    (BASE, ["~env.params.call"], ["override '~env.params.call'", "env.params.call is not set; did you mean 'calls'"]),
    (BASE, ["~rollout.groups=3"], ["~ unsets a key and takes no value; write rollout.groups=VALUE"]),
    (BASE, ["~"], ["expected KEY=VALUE or ~KEY"]), (BASE, ["~model..init"], ["expected KEY=VALUE or ~KEY"]),
    (BASE, ["~name.x"], ["'name' is a value, not a section"]), (BASE, ['env.params."a=1'], ["expected KEY=VALUE or ~KEY"]),
    (BASE, ["~base"], ["base can only be set in a config file"]), (BASE, ["~env.id"], ["env.id: required key is missing"]),
    (BASE, ["~env"], ["env: required key is missing"]),
    (TWO, ["~env.pythn"], ["override '~env.pythn'", "did you mean 'python'"]),
    (TWO, ["~env.python.rewards"], ["override '~env.python.rewards'", "did you mean 'env.reward'"]),
    (TWO, ["~env.0", "~env.0"], ["env: list should have at least 1 item"]),
    (BASE, ["tools.mcp.shop.timeot=3"], ["tools.mcp.shop.timeot: unknown key; did you mean 'tools.mcp.shop.timeout'"]),
    (BASE, ["cluster.pools.big.gpu=1"], ["cluster.pools.big.gpu: unknown key; did you mean 'cluster.pools.big.gpus'"]),
])  # fmt: skip
def test_a_mistake_names_the_override(tmp_path: Path, text: str, overrides: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, *overrides, text=text)
    for part in said:
        assert part in str(caught.value), str(caught.value)


def test_an_override_does_not_change_what_it_is_applied_to() -> None:
    from agentrl.config.load import config_from

    table = {"env": {"id": "key_value", "params": {"calls": 2}}, "model": {"init": {}}}
    config_from(table, ["env.params.calls=5", "model.path=x", "rollout.groups=2"])
    assert table == {"env": {"id": "key_value", "params": {"calls": 2}}, "model": {"init": {}}}


def test_overrides_behind_an_option_are_taken() -> None:
    args = _parse(["train", "x.toml", "a.b=1", "--overwrite", "c=2"])
    assert args.overrides == ["a.b=1", "c=2"] and args.overwrite
    behind = ["play mcp --seed 1 a=b", "check --fuzz 1 mcp a=b"]
    assert [_parse(["env", *words.split()]).params for words in behind] == 2 * [["a=b"]]


@pytest.mark.parametrize(
    "argv", [["train", "x.toml", "--overwrit3", "a=1"], ["env", "list", "a=1"], ["train", "x.toml", "--overwrite", "y"]]
)
def test_what_is_left_over_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse(argv)
    assert caught.value.code == 2
