"""What a session survives (lost answers, the client's death) and what it does not (the server's restart, silence, refusals)."""

import asyncio
import hmac
import pickle
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from agentrl.config.schema import Choice, ToolsConfig
from agentrl.contrib.remote_envs import client as link
from agentrl.contrib.remote_envs import commands, wire
from agentrl.contrib.remote_envs.client import POOLS, Link, RemoteEnv
from agentrl.contrib.remote_envs.openenv import OpenEnvFace
from agentrl.contrib.remote_envs.server import EnvOffer, open_socket
from agentrl.contrib.remote_envs.sessions import Secret, SessionLimits
from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.env import Message, tool
from agentrl.env.address import EnvRequest
from agentrl.env.catalog import EnvRef
from agentrl.env.check import check_all
from agentrl.env.check_tools import Subject
from agentrl.rollout.deadlines import blame_of_running
from agentrl.utils.errors import CatalogError, ConfigError, EnvError, RemoteEnvError, ToolTimeoutError, UserError
from tests.conftest import proof
from tests.contrib.remote_envs.served import TOKEN, Offer, Running, served
from tests.contrib.remote_envs.served import token as token  # a fixture
from tests.contrib.remote_envs.test_equal_episodes import row_of
from tests.env.toyenvs import Notes, call
from tests.waits import until


class Slow(Notes):
    """Notes, one tool of which takes until it is woken."""

    id = "tests/Slow-v0"
    awake = False

    @tool(timeout=30.0, late="policy")
    async def nap(self) -> str:
        while not self.awake:
            await asyncio.sleep(0.01)
        return "rested"


class ToyServer(Running):
    def __init__(self, **limits: Any) -> None:
        self.toys = Offer("tests/Slow-v0", Slow)
        super().__init__(self.toys, SessionLimits(**limits))

    def env(self, key: str = TOKEN) -> RemoteEnv:
        return RemoteEnv(Link(self.url, key), EnvRequest("tests/Slow-v0"))


@pytest.fixture(scope="module")
def toys() -> Iterator[ToyServer]:
    with ToyServer() as server:
        yield server


@pytest.fixture(scope="module")
def key_value() -> Iterator[Running]:
    with served("key_value", calls=2) as server:
        yield server


def remote(server: Running, **params: Any) -> EnvRef:
    return EnvRef("key_value", {"calls": 2, **params}, at=server.address())


# -- lost answers --------------------------------------------------------------------------------------


class Lossy(httpx.AsyncHTTPTransport):
    """Every request reaches the server; the first answer to each is lost, as if the connection had broken."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        content = await request.aread()
        self.seen.append(content)
        if self.seen.count(content) == 1:
            await answer.aread()
            await answer.aclose()
            raise httpx.ReadError("the connection broke")
        return answer


async def test_a_request_whose_answer_is_lost_is_done_once(key_value: Running) -> None:
    there = Link(key_value.url, TOKEN)
    await there.ask("/v1/describe", {"env": {"id": "key_value"}}, lambda seen: None)
    transport = Lossy()
    for pool in range(POOLS):
        there._client(pool)._transport = transport
    one, two = EnvRef("key_value", {"calls": 2}).build(), RemoteEnv(there, EnvRequest("key_value"))
    for env in (one, two):
        await env.areset(seed=4)
        for turn in one.gold_turns(one.task):
            await env.astep(turn)
        await env.aend(StopReason.DONE)
    assert row_of(one.trajectory) == row_of(two.trajectory)
    # reset, a step for each turn; each of them twice. The last turn ends the episode, so there is nothing to end.
    assert len(transport.seen) == 2 * (1 + len(one.trajectory.turns))


@pytest.mark.parametrize("answer", [(500, b"", {}), (200, b"{}", {}), (200, b"no", {"content-encoding": "gzip"})], ids=str)
async def test_an_episode_that_a_proxy_cuts_off_is_ended_on_the_server(
    toys: ToyServer, answer: tuple[int, bytes, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it takes a place there until --idle-timeout."""
    monkeypatch.setattr(link, "PATIENCE", 0.2)

    class Cut(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if not request.url.path.endswith("/step"):
                return await super().handle_async_request(request)
            status, content, headers = answer
            return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content))

    env = toys.env()
    for pool in range(POOLS):
        env._link._client(pool)._transport = Cut()
    await env.areset(seed=0)
    with pytest.raises(RemoteEnvError, match=f"{toys.url}: "):
        await env.astep(call("write", text="a"))
    await env.aclose()
    assert until(lambda: toys.app.sessions.episodes == 0)


async def test_a_number_stands_for_one_request(toys: ToyServer) -> None:
    env = toys.env()
    await env.areset(seed=0)
    asks = f"/v1/sessions/{env._session}/step"
    body = {"number": 1, "have": 0, "action": call("write", text="a")}
    again = [await env._link.ask(asks, body, lambda seen: None) for _ in range(3)]
    assert again[0] == again[1] == again[2] and again[0]["number"] == 1
    assert toys.toys.made[-1].state() == {"notes": ["a"]}
    for other, why in (
        ({**body, "action": "x"}, "request 1 of this session was another one"),
        ({**body, "number": 3}, "request 3: the next one of this session is 2"),
        ({**body, "number": 0}, "request 0: the next one of this session is 2"),
    ):
        with pytest.raises(RemoteEnvError, match=why):
            await env._link.ask(asks, other, lambda seen: None)
    assert toys.toys.made[-1].state() == {"notes": ["a"]}
    # Who did not get the answer to the last request (`have`) is told everything, else what is new.
    for number, have, keep in ((2, 1, 3), (3, 1, 0), (4, 3, 7)):
        told = await env._link.ask(asks, {**body, "number": number, "have": have}, lambda seen: None)
        assert told["record"]["messages"][0] == keep and keep + len(told["record"]["messages"][1]) == 1 + 2 * number
    env._number = 4
    await env.aclose()


# -- the server ----------------------------------------------------------------------------------------


async def test_an_episode_does_not_outlive_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE", 0.2)
    with served("key_value", calls=2) as first:
        env = remote(first).build()
        await env.areset(seed=1)
        gone = remote(first).build()
        await gone.areset(seed=2)
    with pytest.raises(RemoteEnvError, match=rf"{first.url}: no answer for 0.2 s: ConnectError") as fault:
        await gone.astep("anything")
    assert isinstance(fault.value, EnvError) and not isinstance(fault.value, UserError)
    assert gone.trajectory.stop is StopReason.ENV_ERROR and gone.trajectory.stop.infrastructure
    with served("key_value", port=first.port, calls=2) as second:
        assert second.url == first.url
        with pytest.raises(RemoteEnvError, match=rf"{first.url}: the server was restarted after this episode began"):
            await env.astep("anything")
        assert env.trajectory.stop is StopReason.ENV_ERROR and env.trajectory.reward is None and not env.is_open
        await env.areset(seed=1)  # the next episode finds the new server
        await env.aclose()
        assert second.app.sessions.episodes == 0


async def test_a_silent_session_is_closed_and_says_so() -> None:
    with ToyServer(idle=50.0) as server:
        env, busy = server.env(), server.env()
        await env.areset(seed=0)
        await busy.areset(seed=0)
        working = asyncio.ensure_future(busy.astep(call("nap")))
        while not server.app.sessions.find(busy._session).running:
            await asyncio.sleep(0.02)
        for session in (env._session, busy._session):
            server.app.sessions.find(session).touched -= 51.0
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.app.sessions.sweep(), server._loop))
        assert server.app.sessions.episodes == 1  # a request in progress is no silence
        with pytest.raises(RemoteEnvError, match=r"no request came for 50 s, so the session was closed \(--idle-timeout\)"):
            await env.astep("hello?")
        server.toys.made[1].awake = True
        assert (await working)[0][0].content == "rested"
        assert [made.log[-1] for made in server.toys.made] == ["teardown", "setup"]
    assert [made.log for made in server.toys.made] == [["setup", "teardown"]] * 2  # the server's end tears down too


def test_an_answer_does_not_wait_for_the_clients_acknowledgement() -> None:
    """An answer is written in two parts; without this option of the connections each costs 40 ms (17 turns a second, not 350)."""
    with open_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        connection.close()


async def test_no_more_episodes_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ToyServer(episodes=1) as server:
        one, two = server.env(), server.env()
        await one.areset(seed=0)
        monkeypatch.setattr(link, "PATIENCE", 0.2)
        with pytest.raises(
            RemoteEnvError, match=r"no answer for 0\.2 s: 503 1 episodes run here, and no more may \(--max-episodes\)"
        ):
            await two.areset(seed=1)
        monkeypatch.setattr(link, "PATIENCE", 30.0)
        waits = asyncio.ensure_future(two.areset(seed=1))
        await asyncio.sleep(0.2)
        assert not waits.done()
        await one.aclose()
        await waits  # as soon as the first is over
        await two.aclose()


# -- who may ask ---------------------------------------------------------------------------------------


async def test_only_the_token_opens_the_server(toys: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: [compared.append((a, b)), real(a, b)][1])
    for wrong in (TOKEN[:-1], TOKEN + "x", toys.app.secret.player):
        with pytest.raises(ConfigError, match=r"wants another token than this one.*env\.token_env"):
            await toys.env(wrong).areset(seed=0)
    with pytest.raises(ConfigError, match=r"the server wants its token, as .*env\.token_env"):
        await toys.env("").areset(seed=0)
    assert len(compared) == 4  # in constant time, the wrong ones too
    assert toys.app.secret.player not in TOKEN and len(toys.app.secret.player) == 32
    with pytest.raises(ConfigError, match="9 characters"):
        Secret("too short")
    with pytest.raises(RemoteEnvError, match="a session's id has at least 32 characters"):
        await Link(toys.url, TOKEN).ask("/v1/sessions/mine/reset", {"number": 0}, lambda seen: None)
    assert len({wire.new_id() for _ in range(100)}) == 100 and len(wire.new_id()) == 32


async def test_a_client_of_another_protocol_and_a_body_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with ToyServer(body=2000) as server:
        env = server.env()
        await env.areset(seed=0)
        with pytest.raises(RemoteEnvError, match=r"a request of more than 2000 bytes \(--max-body\)"):
            await env.astep("x" * 2000)
        real = link.wire.dumps
        for theirs, older in ((2, "client"), (4, "server")):
            monkeypatch.setattr(link.wire, "dumps", lambda value, theirs=theirs: real({**value, "protocol": theirs}))
            with pytest.raises(RemoteEnvError, match=rf"speaks protocol 3, the client {theirs}; upgrade the {older}'s agentrl$"):
                Link(server.url, TOKEN).ask_now("/v1/describe", {"env": {"id": "x"}}, 1.0)


@pytest.mark.parametrize(("change", "kind", "why"), [
    ({"id": "key_valu"}, CatalogError, "this server has agentrl/KeyValue-v0"),
    ({"params": {"cals": 3}}, CatalogError, "no parameter 'cals'; did you mean 'calls'"),
    ({"wrappers": (Choice(name="turn_limt", args={}),)}, ConfigError, "turn_limit"),
    ({"wrappers": (Choice(name="turn_limit", args={"turns": 0}),)}, ConfigError, "expected at least 1"),
    ({"tools": ToolsConfig(sets=["calculater"])}, CatalogError, "calculator"),
    ({"tools": ToolsConfig(sets=[__file__])}, CatalogError, "is a path; a client names tool sets"),
    ({"tools": ToolsConfig(sets=["../tools/calculator.py"])}, CatalogError, "is a path; a client names tool sets"),
])  # fmt: skip
async def test_what_the_server_does_not_have_is_refused_there(
    key_value: Running, change: Mapping[str, Any], kind: type, why: str
) -> None:
    wrong = replace(remote(key_value), **change)
    with pytest.raises(kind, match=why):
        wrong.card()
    with pytest.raises(kind, match=why):
        await wrong.build().areset(seed=0)


@pytest.mark.parametrize(("name", "params", "why"), [
    ("mcp", {"command": ["/bin/false"]}, r"params.command names a thing on the server's machine.*env serve mcp command="),
    ("harbor", {"source": "/"}, r"params.source names .* env serve harbor source="),
    ("python", {"sandbox": {"name": "local"}}, r"params.sandbox names"),
])  # fmt: skip
def test_what_is_on_the_servers_machine_is_not_a_clients_to_name(name: str, params: dict[str, Any], why: str) -> None:
    """A program, a folder, a place where commands run: whoever has the token would otherwise have the machine."""
    offer = EnvOffer(EnvRef(name, {"level": 1} if name == "mcp" else {}))
    with pytest.raises(CatalogError, match=why):
        offer.build(EnvRequest(name, params))
    offer.build(EnvRequest(name, {}))


# -- faults and time -----------------------------------------------------------------------------------


async def test_a_fault_there_is_the_fault_here(toys: ToyServer) -> None:
    for turn, kind, stop in (
        (call("write", text="boom"), EnvError, StopReason.ENV_ERROR),
        (call("hang"), ToolTimeoutError, StopReason.TOOL_TIMEOUT),
    ):
        here, there = Slow(), toys.env()
        faults = []
        for env in (here, there):
            await env.areset(seed=0)
            await env.astep(call("write", text="a"))
            with pytest.raises(kind) as fault:
                await env.astep(turn)
            faults.append((type(fault.value), str(fault.value)))
            assert env.trajectory.stop is stop and len(env.trajectory.turns) == 2 and env.trajectory.state is None
            await env.aend(stop, "told")
        assert faults[0] == faults[1]
        assert row_of(here.trajectory) == row_of(there.trajectory)
        assert toys.toys.made[-1].log == ["setup", "teardown"]


async def test_a_long_step_is_asked_for_again_and_shown_as_in_progress(toys: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "WAIT_SECONDS", 0.05)
    env = toys.env()
    await env.areset(seed=0)
    working = asyncio.ensure_future(env.astep(call("nap")))
    while not env.toolbox.waiting:
        await asyncio.sleep(0.01)
    waiting = list(env.toolbox.waiting)
    assert [(one.tool.name, one.call_id, one.running) for one in waiting] == [("nap", "call_0", True)]
    assert blame_of_running(waiting) == "policy"
    await asyncio.sleep(0.2)
    assert env.toolbox.waiting[0] is waiting[0]  # the same call: nothing has moved
    toys.toys.made[-1].awake = True
    assert (await working)[0][0].content == "rested" and not env.toolbox.waiting
    await env.aclose()


async def test_while_the_server_does_not_answer_nobody_blames_the_policy(toys: ToyServer) -> None:
    env = toys.env()
    await env.areset(seed=0)
    env._watch([{"name": "nap", "call_id": "call_0", "running": True}])
    assert blame_of_running(env.toolbox.waiting) == "policy"
    env._watch("ConnectError")
    assert blame_of_running(env.toolbox.waiting) == "infrastructure"
    await env.aclose()


async def test_a_client_gets_the_tasks_of_the_server_as_json(toys: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are JSON from the start, so that specs read the same keys on both sides; a set has no order."""
    task = Slow().make_task(0, "train")
    given: list[Any] = [{"a", "b"}, {1: ("a", {"b": (1, None, float("nan"))})}]
    monkeypatch.setattr(Slow, "make_task", lambda self, seed, split: replace(task, data={"words": given.pop(0)}))
    monkeypatch.setattr(Slow, "prompt", lambda self, task: [Message("user", "write")])
    env = toys.env()
    with pytest.raises(EnvError, match="expected a dict of JSON values: a set has no order"):
        await env.areset(seed=0)
    await env.areset(seed=0)
    assert env.task.data == {"words": {"1": ["a", {"b": [1, None, "NaN"]}]}}
    await env.aclose()
    assert toys.app.sessions.episodes == 0


async def test_a_step_that_is_given_up_ends_there_too(toys: ToyServer) -> None:
    env = toys.env()
    await env.areset(seed=0)
    working, there, began = asyncio.ensure_future(env.astep(call("nap"))), toys.toys.made[-1], time.monotonic()
    while not there.toolbox.waiting:
        await asyncio.sleep(0.01)
    env.cut(StopReason.MAX_EPISODE_TIME)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    [cut] = env.trajectory.turns  # a rollout stores the positions of its tokens on it
    await env.aend(StopReason.MAX_EPISODE_TIME)
    assert time.monotonic() - began < 20  # less than the tool's timeout
    assert there.log == ["setup", "teardown"] and not there.is_open
    assert env.trajectory.stop is there.trajectory.stop is StopReason.MAX_EPISODE_TIME
    assert env.trajectory.turns[0] is cut and env.trajectory.messages == there.trajectory.messages
    assert toys.app.sessions.episodes == 0


async def test_the_end_brings_the_state_of_the_end(toys: ToyServer) -> None:
    env = toys.env()
    await env.areset(seed=0)
    await env.astep(call("write", text="a"))
    env.trajectory.messages.append(Message("assistant", "a turn that was cut"))  # as a rollout does: the server never gets it
    toys.toys.made[-1].notes.append("late")
    await env.aend(StopReason.MAX_TURNS)
    record = env.trajectory
    assert (record.state, record.truncated, record.terminated) == ({"notes": ["a", "late"]}, True, False)
    assert record.messages[-1].content == "a turn that was cut" and len(record.messages) == 4


# -- snapshots, teachers, the contract -------------------------------------------------------------------


async def test_forks_and_snapshots_are_the_servers(toys: ToyServer) -> None:
    env = toys.env()
    await env.areset(seed=0)
    await env.astep(call("write", text="a"))
    saved = pickle.loads(pickle.dumps(env.snapshot().parts["_env_record"])), env.snapshot()
    other = env.fork()
    await env.astep(call("write", text="b"))
    await other.astep(call("write", text="c"))
    assert env.trajectory.state == {"notes": ["a", "b"]} and other.trajectory.state == {"notes": ["a", "c"]}
    env.restore(saved[1])
    assert row_of(env.trajectory) == row_of(saved[0])
    await env.astep(call("write", text="d"))
    assert env.trajectory.state == {"notes": ["a", "d"]} and len(env.trajectory.turns) == 2
    await env.aclose()
    env.restore(saved[1])  # also when that episode is over
    await env.astep(call("write", text="e"))
    assert env.trajectory.state == {"notes": ["a", "e"]}
    for one in (env, other):
        await one.aclose()
    assert toys.app.sessions.episodes == 0


def test_the_limits_that_the_command_shows_are_those_that_a_server_has() -> None:
    assert SessionLimits() == SessionLimits(commands.EPISODES, commands.IDLE, commands.BODY)


@proof
def test_it_fulfills_the_contract(key_value: Running) -> None:
    """The checks of `agentrl env check`, but for those that plant a tool, which is not here."""
    from agentrl.config.schema import RewardConfig
    from agentrl.env.catalog import find_spec, make_scorer

    ref = remote(key_value)
    scorer = make_scorer(find_spec(ref, None), RewardConfig(), ref)
    names = ["contract", "same seed", "splits apart", "gold scores most", "instances apart", "fork"]
    found = check_all(Subject(ref.build, scorer, 2, 5, pickle.dumps(ref)), names)
    assert {finding.check: (finding.ok, finding.ok or finding.evidence) for finding in found} == dict.fromkeys(
        names, (True, True)
    )


def record_of(server: Running | None, seed: int, **teacher: float) -> Trajectory:
    from agentrl.render import make_renderer
    from agentrl.rollout.warm_start import transcript
    from agentrl.trainer.pretrained import packaged_tokenizer

    ref = EnvRef("key_value", {"calls": 2}, at=None if server is None else server.address())
    return asyncio.run(transcript(ref.build(), make_renderer(packaged_tokenizer(4096)), seed, teacher=teacher))


def test_a_teacher_there_gives_the_transcripts_of_one_here(key_value: Running) -> None:
    turns = []
    for seed in range(4):
        here, there = (record_of(server, seed, malformed=0.3) for server in (None, key_value))
        assert row_of(here) == row_of(there)
        assert here.ledgers == there.ledgers and here.sampled_tokens > 0
        turns.append(len(here.turns))
    assert len(set(turns)) > 1  # with malformed = 0.3 some calls are written twice: the same ones
    with pytest.raises(ConfigError, match="stap"):
        record_of(key_value, 0, stap=0.4)


def test_an_address_that_is_not_this_machines_is_no_fault_of_the_port() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match=rf"^--host {host}: no address of this machine: "):
            open_socket(host, 0)


async def test_a_fault_of_an_environment_that_openenv_serves_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    face, talk = OpenEnvFace(Notes, "toy", "", SessionLimits(), None), AsyncMock()
    talk.receive_text.side_effect = ["{}", TimeoutError]
    session: Any = SimpleNamespace(answer=AsyncMock(side_effect=ZeroDivisionError("by 0")))
    await face._converse(talk, session)
    assert "EXECUTION_ERROR" in talk.send_text.await_args.args[0] and "Traceback" in caplog.text
