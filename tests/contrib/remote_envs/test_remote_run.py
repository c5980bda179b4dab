"""A run against an environment on a server: the numbers of the run that has it in its own process."""

from pathlib import Path

import pytest

from tests.conftest import proof
from tests.contrib.remote_envs.served import TOKEN, VARIABLE, served
from tests.contrib.remote_envs.test_equal_episodes import row_of
from tests.e2e.inside import config_of, episodes, execute, updates

NUMBERS = ("reward_mean", "success_rate", "loss", "grad_norm", "entropy", "lr", "tokens")


@proof
@pytest.mark.timeout(240)
def test_it_warms_up_trains_and_evaluates_as_without_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    sft = [
        f"sft.{key}={value}"
        for key, value in {"max_steps": 40, "min_steps": 40, "gate": 0.0, "gate_tasks": 4, "gate_every": 40}.items()
    ]
    # One episode at a time: which requests share a step of the engine depends on when answers come, and with it the last digit of
    # a log probability. With more at once the tokens, rewards and turns are still the same.
    sft.append("rollout.max_episodes=1")
    with served("key_value") as server:
        there = execute(config_of(tmp_path, "there", *sft, "steps=2", f"env.url={server.url}", f"env.token_env={VARIABLE}"))
        assert server.app.sessions.episodes == 0
    here = execute(config_of(tmp_path, "here", *sft, "steps=2"))
    for step in (1, 2):
        one, two = episodes(here, step), episodes(there, step)
        assert [row_of(episode) for episode in one] == [row_of(episode) for episode in two] and len(one) == 12
    found = [[{key: row[key] for key in NUMBERS if key in row} for row in updates(run)] for run in (here, there)]
    assert found[0] == found[1] and len(found[0][0]) > 3
