"""`env.url`: what is refused before a run, what `--dry-run` says, and rollouts that are those of a run without it."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from agentrl.cli.main import main
from agentrl.config import TrainConfig
from agentrl.config.identity import identity_of
from agentrl.config.load import config_from
from agentrl.config.schema import RewardConfig
from agentrl.contrib.remote_envs.run_checks import check_servers, remote_lines
from agentrl.contrib.remote_envs.sessions import SessionLimits
from agentrl.data.trajectory import StopReason
from agentrl.env.catalog import EnvRef
from agentrl.env.spaces import run_sync
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec, make_context
from agentrl.rollout.episode import Limits, Policy
from agentrl.run.checks import RunStart, check_eval
from agentrl.run.digests import contents_of
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError, UserError
from tests.conftest import proof
from tests.contrib.remote_envs.served import TOKEN, VARIABLE, Offer, Running, served
from tests.contrib.remote_envs.served import token as token  # a fixture
from tests.contrib.remote_envs.test_equal_episodes import row_of
from tests.e2e.inside import config_of, episodes, execute, updates
from tests.env.toyenvs import Notes
from tests.players import collector_of, run_tasks
from tests.rollout.conftest import FaultyEngine
from tests.run.starts import scorer_of


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served("key_value", SessionLimits(episodes=128)) as running:
        yield running


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return make_renderer(packaged_tokenizer(4096))


def made(server: Running | None, *overrides: str) -> TrainConfig:
    place = {} if server is None else {"url": server.url, "token_env": VARIABLE}
    base = {
        "env": {"id": "key_value", **place},
        "engine": "embedded",
        "model": {"init": {"layers": 1}},
        "rollout": {"max_episodes": 64},
    }
    return config_from(base, list(overrides))


def test_the_dry_run_tells_what_the_server_says(server: Running) -> None:
    assert remote_lines(RunStart(made(None), {})) == []
    first, *rest = remote_lines(RunStart(made(server), {}))
    assert re.fullmatch(
        rf"environment: {server.url} \(agentrl [\d.]+\) has agentrl/KeyValue-v0, with gold solutions and a teacher", first
    )
    assert rest == ["  tools: get, set, list, add", "  at most 128 episodes at once, each closed after 3600 s without a request"]


@pytest.mark.parametrize(("overrides", "why"), [
    (["rollout.max_episodes=129"], r"rollout\.max_episodes = 129: http.* takes 128 episodes at once.*--max-episodes 129"),
    (["tools.mcp.files.command=['x']"], r"tools\.mcp: the tools of an environment elsewhere run on its server"),
    (["agent.command=['python','mine.py']"], r"\[agent\]: its calls go to the tools one by one, and an environment elsewhere"),
    (
        ["env.id=key_valeu"],
        r"^env\.id: this server has agentrl/KeyValue-v0 \(key_value\), not 'key_valeu'; did you mean 'key_value'\?",
    ),
    (["env.params.cals=3"], "no parameter 'cals'; did you mean 'calls'"),
    (["env.token_env=NOT_SET_AT_ALL"], r"env\.token_env: the environment variable NOT_SET_AT_ALL is not set"),
    (["env.token_env=PATH"], r"wants another token than this one.*env\.token_env"),
    (
        ["env.url='http://127.0.0.1:9'"],
        r"env\.url: http://127\.0\.0\.1:9: no answer for 0\.1 s: ConnectError.*agentrl env serve key_value --http",
    ),
    (["env.url='127.0.0.1:80'"], r"env\.url = '127\.0\.0\.1:80': expected http://HOST:PORT"),
    (["env.url='http://me:secret@host:80'"], r"env\.url: it has a password in it.*env\.token_env"),
    (["env.protocol=openenv"], r"env\.url: OpenEnv server http.*: no action schema: HTTPStatusError: .*404"),
])  # fmt: skip
def test_what_cannot_be_played_there_is_refused_before_the_run(
    server: Running, overrides: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.contrib.remote_envs.client.CHECK_PATIENCE", 0.1)
    with pytest.raises(UserError, match=why):
        check_servers(RunStart(made(server, *overrides)))


@pytest.mark.parametrize("body", [b"200 hello", b"200 {}", b"200 []", b'200 {"limits"', b"202 {}", b"404 []"])
def test_a_server_of_something_else_is_named(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpx.AsyncClient.post", AsyncMock(return_value=httpx.Response(int(body[:3]), content=body[4:])))
    with pytest.raises(ConfigError, match=r"^env\.url: http://127.0.0.1:7: .*: is this a server of agentrl\?"):
        check_servers(RunStart(made(None, "env.url='http://127.0.0.1:7'")))


def test_one_of_several_environments_may_be_elsewhere(server: Running) -> None:
    """`[[env]]`: each entry has an address of its own, or none; a mistake names the entry."""
    entries = [{"id": "key_value"}, {"id": "key_value", "name": "there", "url": server.url, "token_env": VARIABLE}]
    base = {"env": entries, "engine": "embedded", "model": {"init": {"layers": 1}}, "rollout": {"max_episodes": 64}}
    config = config_from(base, [])
    assert len(remote_lines(RunStart(config, {}))) == 3
    assert [ref.at for ref in (EnvRef.of(env, config.tools) for env in config.envs)] == [None, server.address()]
    found = contents_of(config, "train").digests
    assert found["the files of env.there.id"] == found["the files of env.key_value.id"]
    with pytest.raises(UserError, match=r"env\[1\] \(there\).*no parameter 'cals'"):
        check_eval(config_from(base, ["env.there.params.cals=3"]))
    with Running(Offer("tests/Notes-v0", Notes), SessionLimits()) as toys:  # no teacher, but no part in the warm start either
        entries[1] |= {"id": "tests/Notes-v0", "url": toys.url}
        check_servers(RunStart(config_from({**base, "sft": {"envs": ["key_value"]}}, [])))


def test_an_address_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"env\.protocol, env\.token_env: only for a remote environment"):
        check_servers(RunStart(made(None, "env.token_env=X")))
    check_servers(RunStart(made(None)))


def test_where_it_runs_is_no_part_of_what_a_run_is(server: Running) -> None:
    """Moved to a server, or back, a run goes on; the environment's files, its spec and its parameters are told apart."""
    here, there = made(None), made(server)
    for purpose in ("train", "eval", "rollout"):
        assert identity_of(here, purpose) == identity_of(there, purpose)
        assert contents_of(here, purpose).digests == contents_of(there, purpose).digests
    assert "the files of env.id" in contents_of(there, "train").digests
    assert identity_of(made(server, "env.params.calls=5"), "train") != identity_of(there, "train")


SPEC = {
    "agentrl_reward": 1,
    "name": "replayed",
    "root": {
        "op": "mean",
        "of": [
            {"use": "state.match", "args": {"replay": {"$": "/task/gold/calls"}}},
            {"use": "results.contains", "args": {"replay": {"$": "/task/gold/calls"}, "credit": "partial"}},
        ],
    },
}


def test_gold_is_replayed_there(server: Running) -> None:
    """A spec whose expected state and answers come from a replay of the gold calls: on the server, in a thread of the scorer."""
    scores, environments = [], []
    for config in (made(None), made(server)):
        ref = EnvRef.of(config.the_env, config.tools)
        replayed: list[Any] = []
        context = make_context(
            RewardConfig(), replay_env=lambda task, ref=ref, out=replayed: [env := ref.build(), out.append(env)][0]
        )
        scorer, env = compile_spec(SPEC, context=context), ref.build()
        for turns in (slice(None), slice(1)):
            env.reset(seed=3)
            for turn in env.gold_turns(env.task)[turns]:
                env.step(turn)
            run_sync(env.aend(StopReason.MAX_TURNS))
            score = scorer.score(env.trajectory)
            scores.append((score.value, score.evidence))
        environments.append(len(replayed))
    assert scores[:2] == scores[2:] and scores[0][0] == 1.0 and scores[1][0] is not None and scores[1][0] < 1.0
    assert environments[0] == environments[1] > 0
    assert server.app.sessions.episodes == 0


async def test_an_evaluation_there_is_the_evaluation_here(server: Running, renderer: Renderer) -> None:
    found = []
    for config in (made(None), made(server)):
        policy = Policy(FaultyEngine(renderer.stop_token_ids[0]), renderer)
        limits = Limits(3, 16, 2000, 60.0, 60.0, 4096)
        pairs = [(index, member) for index in range(3) for member in range(2)]
        played = await run_tasks(RunStart(config).env, policy, scorer_of(config), limits, pairs, seed=5, max_episodes=4)
        found.append([row_of(one) for one in played])
    assert found[0] == found[1] and len(found[0]) == 6
    assert {row["stop"] for row in found[0]} == {"done"} and {row["reward"] for row in found[0]} == {0.0}


async def test_a_server_that_restarts_costs_an_attempt_and_no_reward(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the reset and the first step the server is another one: unscored; the second attempts are scored."""
    servers: list[Any] = [served("key_value")]
    arrived: list[Any] = []
    first = servers[0].__enter__()

    class Restarts(FaultyEngine):
        async def generate(self, *asked: Any) -> Any:
            arrived.append(asked)
            while len(arrived) < 2:  # until both episodes have begun on the first server
                await asyncio.sleep(0.01)
            if len(servers) == 1:
                servers.append(None)
                servers[0].__exit__(None, None, None)
                servers[1] = served("key_value", port=first.port)
                servers[1].__enter__()
            return await super().generate(*asked)

    config = made(first, "rollout.groups=1", "rollout.group_size=2", "rollout.max_turns=1", "rollout.retries=1")
    engine = Restarts(renderer.stop_token_ids[0])
    errors: list[str] = []
    monkeypatch.setattr("agentrl.rollout.collector.log.warning", lambda text, *args: errors.append(text % args))
    ref = EnvRef.of(config.the_env, config.tools)
    collect = collector_of(ref, Policy(engine, renderer), scorer_of(config), config.rollout, context=4096, seed=0)
    try:
        [group] = await collect.collect()
    finally:
        await collect.close()
        servers[1].__exit__(None, None, None)
    assert [(member.reward, member.stop) for member in group.trajectories] == [(0.0, StopReason.DONE)] * 2
    assert sorted(engine.keys) == ["g0.m0.a0", "g0.m0.a1", "g0.m1.a0", "g0.m1.a1"]
    assert len(errors) == 2 and all(f"{first.url}: the server was restarted after this episode began" in text for text in errors)


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "abc")
    for words, why in (
        ([], "give --http (its episodes, to train against) or --mcp"),
        (["--http", "--token-env", "NOT_SET_AT_ALL"], "--token-env: the environment variable NOT_SET_AT_ALL is not set"),
        (["--http", "--token-env", "SHORT"], "the server's token has 3 characters; expected at least 16"),
        (["--http", "--max-episodes", "0"], "--max-episodes 0: expected more than 0"),
        (["cals=3", "--http"], "no parameter 'cals'; did you mean 'calls'"),
    ):
        assert main(["env", "serve", "key_value", *words]) == 2
        assert why in capsys.readouterr().err


def test_the_command_serves_and_prints_how(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints is what a client needs, but for a token that has a place of its own."""
    said: list[str] = []

    def serve(app: Any, host: str, port: int, say: Any) -> None:
        say(f"http://{host}:{port}")
        said.append(app.secret.token)

    monkeypatch.setattr("agentrl.contrib.remote_envs.server.serve_http", serve)
    assert main(["env", "serve", "key_value", "calls=3", "--http"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("agentrl/KeyValue-v0: http://127.0.0.1:8100")
        and lines[1] == f"token: {said[0]}"
        and len(said[0]) == 32
    )
    assert re.fullmatch(r"for OpenEnv's clients: http://127\.0\.0\.1:8100/openenv/[0-9a-f]{32}", lines[2])
    assert main(["env", "serve", "key_value", "--http", "9000", "--token-env", VARIABLE]) == 0
    out = capsys.readouterr().out
    assert "http://127.0.0.1:9000" in out and TOKEN not in out and f"token: in {VARIABLE}" in out


NUMBERS = ("reward_mean", "success_rate", "loss", "grad_norm", "entropy", "lr", "tokens")


@proof
@pytest.mark.timeout(240)
def test_it_warms_up_trains_and_evaluates_as_without_the_server(tmp_path: Path) -> None:
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
