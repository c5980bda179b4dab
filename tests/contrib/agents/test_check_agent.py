"""What cannot go with an agent is refused by name before a run, and a rehearsal says what an agent does."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import config_from, load_config, with_absolute_paths
from agentrl.contrib.agents.run_checks import check_agents, rehearse
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_assembly
from agentrl.utils.errors import ConfigError, ResourceError

AGENT = str(Path(__file__).with_name("agent_over_http.py"))


PLAIN = {"python": "tests.contrib.agents.parts:plain_agent"}


def config_of(*overrides: str, env: str = "key_value", **agent: object) -> TrainConfig:
    base = {"env": {"id": env}, "engine": "embedded", "model": {"init": {}}, "agent": agent or dict(PLAIN)}
    return config_from(base, list(overrides))


@pytest.mark.parametrize(("env", "override", "said"), [
    ("key_value", 'rollout.context={name="keep_recent"}', "'keep_recent': with [agent] the agent itself decides"),
    ("key_value", 'env.wrappers=[{name="turn_limit",args={turns=2}}]', "wrapper TurnLimit acts on whole steps"),
    ("service_desk", "seed=0", "has a simulated user"),
    ("key_value", "agent.python=tests.contrib.agents.parts:gone", "has no function 'gone'"),
    ("key_value", "URL", "agent.url: http://127.0.0.1:9/ does not answer: ConnectError"),
    ("service_desk", "agent.user=true", None), ("key_value", 'env.wrappers=[{name="tool_subset",args={names=["get"]}}]', None),
    ("key_value", 'env.wrappers=[{name="tool_faults",args={rate=0.5}}]', None),
])  # fmt: skip
def test_what_cannot_go_with_an_agent_is_refused_by_name(env: str, override: str, said: str | None) -> None:
    config = config_of(url="http://127.0.0.1:9/") if override == "URL" else config_of(override, env=env)
    with nullcontext() if said is None else pytest.raises((ConfigError, ResourceError), match=re.escape(said)):
        (check_assembly if "gone" in override else check_agents)(RunStart(config))


def test_a_rehearsal_plays_the_gold_turns_and_says_what_an_agent_that_fails_wrote() -> None:
    command = [sys.executable, "-S", AGENT]
    said = rehearse(RunStart(config_of(command=command)))
    assert "a rehearsal on gold turns ended with done after" in said and said.endswith("1 ledgers, reward 1.0")
    with pytest.raises(ConfigError, match=r"ended with agent_error: the agent failed \(exit code 3: cannot save\)"):
        rehearse(RunStart(config_of(command=[*command, "3"])))


def test_the_words_of_a_command_that_are_paths_are_beside_the_config(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here / "there"
    folder.mkdir()
    (folder / "my.py").touch()
    (here / "docs").mkdir()
    (folder / "run.toml").write_text(
        'env = {id = "key_value"}\n[model.init]\n[agent]\ncommand = ["python", "./my.py", "docs"]\nenv = {KEY = "secret"}\n'
    )
    config = load_config(folder / "run.toml")
    assert config.agent is not None and config.agent.command == ["python", str(folder / "my.py"), "docs"]
    monkeypatch.chdir(folder)
    again = with_absolute_paths(config_from({"env": {"id": "key_value"}, "agent": {"command": ["./my.py", "docs"]}}, []))
    assert again.agent is not None and again.agent.command == [str(folder / "my.py"), "docs"]
