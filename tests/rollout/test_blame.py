"""Whose time it was: what the policy used up is scored, what the infrastructure lost is unscored and tried again."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import Context, compile_spec
from agentrl.rollout.collector import Collector
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.episode import Limits, Policy, score_group
from agentrl.utils import event_loop as deadline
from agentrl.utils.errors import StalledError
from tests.players import collector_of, run_tasks
from tests.rollout.conftest import FaultyEngine

ENV = '''
"""A room with slow things in it."""
import asyncio

from agentrl.env import Message, Task, ToolEnv
from agentrl.env import tool
from agentrl.utils.errors import ToolError


async def for_ever():
    await asyncio.sleep(3600)


class Room(ToolEnv):
    id = "test/Room-v0"
    summary = "room"

    def __init__(self, *, slow: str = "", user_s: float = 0.0, **base):
        super().__init__(**base)
        self.slow, self.user_s = slow, user_s

    def make_task(self, rng_seed, split):
        return Task(f"room/{split}/{rng_seed}", rng_seed, split)

    def prompt(self, task):
        return [Message("user", "begin")]

    async def setup(self, task):
        self.ran, self.concluded = 0, False
        if self.slow == "setup":
            await for_ever()
        raised = {"cancelled setup": asyncio.CancelledError(), "exit": SystemExit(3), "refusal": ToolError("no such room")}
        if self.slow in raised:
            raise raised[self.slow]

    async def teardown(self):
        if self.slow == "teardown":
            await for_ever()
        if self.slow == "broken teardown":
            raise OSError("the room is on fire")
        if self.slow == "broken cancel" and self.trajectory.stop.value == "cancelled":
            raise OSError("the room is on fire")

    async def conclude(self):
        self.concluded = True

    def state(self):
        return {"ran": self.ran, "concluded": self.concluded}

    @tool(timeout=0.3, late="policy")
    async def run(self, code: str) -> str:
        """run what the policy wrote"""
        self.ran += 1
        return await for_ever() if code == "loop" else "ok"

    @tool(timeout=30, late="policy")
    async def work(self, code: str) -> str:
        """the same, with more time"""
        self.ran += 1
        return await for_ever()

    @tool(timeout=0.3)
    async def ask(self) -> str:
        """ask a server that is dead"""
        return await for_ever()

    @tool(timeout=0.2, on_timeout="answer")
    async def told(self) -> str:
        """too slow, and says so"""
        return await for_ever()

    @tool(parallel=False)
    async def wait(self, seconds: float) -> str:
        """take a while"""
        await asyncio.sleep(seconds)
        return "ok"

    async def user_reply(self, message):
        await asyncio.sleep(self.user_s)
        return None if "bye" in message.content else [Message("user", "go on")]
'''
DONE = {"agentrl_reward": 1, "name": "done", "root": {"use": "episode.stopped"}}
TOKEN = 0.01


class Actor(FaultyEngine):
    """Each member of a group plays its part, a step of the part a turn. It tells how many tokens its requests have.

    Parts: "bye" ends the episode; "think" says bye and samples on up to the limit; "silent" samples three tokens and then
    nothing; ("ponder", n) samples n tokens, ("slow", n, s) with s seconds for each; ("queue", s) waits s seconds for a place;
    ("call", name, arguments, name, arguments, ...) calls tools; "lost" is cancelled by the engine. A token takes 10 ms.
    """

    def __init__(self, renderer: Any, parts: dict[int, Sequence[Any]]) -> None:
        super().__init__(renderer.stop_token_ids[0])
        self.renderer, self.parts = renderer, parts
        self.seen: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.asked: list[tuple[str, Sampling]] = []

    def progress(self, request_key: str) -> int | None:
        return self.seen.get(request_key)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.keys.append(request_key)
        self.asked.append((request_key, sampling))
        turn = self.turns.get(request_key, 0)
        self.turns[request_key] = turn + 1
        member = int(request_key.split(".m")[1].split(".")[0])
        part = self.parts[member]
        step = part[min(turn, len(part) - 1)]
        self.seen[request_key] = 0
        try:
            return await self._play(step, request_key, sampling.max_tokens)
        finally:
            del self.seen[request_key]

    async def _play(self, step: Any, key: str, most: int) -> Generation:
        if step == "lost":
            raise asyncio.CancelledError
        if step[0] == "queue":
            await asyncio.sleep(step[1])
        if step in ("think", "silent") or step[0] in ("ponder", "slow"):
            ids = self.renderer.assistant(Message("assistant", "bye"))[:-1] if step == "think" else []
            while not (step[0] in ("ponder", "slow") and len(ids) == step[1]):
                await self.open.wait()
                await asyncio.sleep(step[2] if step[0] == "slow" else TOKEN)
                if step != "silent" or len(ids) < 3:
                    ids.append(270)
                self.seen[key] = len(ids)
                if len(ids) == most:
                    return self._generation(ids, "length")
            return self._generation([*ids, self.stop], "stop")
        named = zip(step[1::2], step[2::2], strict=True) if step[0] == "call" else ()
        calls = tuple(ToolCall(name, arguments, id=f"c{at}" if at else "c") for at, (name, arguments) in enumerate(named))
        message = Message("assistant", "" if calls else "bye", calls)
        ids = self.renderer.assistant(message)
        return self._generation(ids[:most], "stop" if len(ids) <= most else "length")

    def _generation(self, ids: list[int], finish: Any) -> Generation:
        return Generation(ids, [-1.0] * len(ids), [self.version] * len(ids), finish)


@pytest.fixture
def room(here: Path) -> Callable[..., EnvRef]:
    (here / "envs" / "room").mkdir(parents=True)
    (here / "envs" / "room" / "env.py").write_text(ENV)
    return lambda **params: EnvRef("room", params)


def collecting(env: EnvRef, engine: FaultyEngine, renderer: Renderer, spec: Any = None, **config: Any) -> Collector:
    settings = RolloutConfig(**{"groups": 1, "min_survivors": 2, **config})
    scorer = spec if spec is not None else compile_spec(DONE)
    return collector_of(env, Policy(engine, renderer), scorer, settings, context=4000, seed=0)


async def play(
    env: EnvRef, renderer: Renderer, parts: dict[int, Sequence[Any]], spec: Any = None, meanwhile: Any = None,
    kind: type[Actor] = Actor, **config: Any,
) -> tuple[list[Trajectory], Actor]:  # fmt: skip
    """One group, whose members play these parts."""
    engine = kind(renderer, parts)
    collect = collecting(env, engine, renderer, spec, **{"group_size": len(parts), **config})
    also = asyncio.create_task(meanwhile(collect)) if meanwhile else None
    try:
        [group] = await asyncio.wait_for(collect.collect(), 60)
    finally:
        await collect.close()
        if also is not None:
            await also
    return group.trajectories, engine


RULE = {  # why the episode ended, and who is to blame; infrastructure's are not scored, and tried again
    **dict.fromkeys(["done", "max_turns", "max_tokens", "context_full"]),
    **dict.fromkeys(["max_tool_time", "max_episode_time", "agent_failed"], "policy"),
    **dict.fromkeys(["tool_timeout", "episode_timeout", "engine_timeout", "env_error"], "infrastructure"),
    **dict.fromkeys(["engine_error", "agent_error", "cancelled"], "infrastructure"),
}


def test_the_rule_names_every_stop() -> None:
    assert {stop.value: stop.blame for stop in StopReason} == RULE
    assert all(stop.infrastructure == (stop.blame == "infrastructure") for stop in StopReason)


ENDS: list[tuple[str, list[Any], str, float | None]] = [
    # Who uses the time, and how; the end, and the score of a spec that pays for stopping.
    ("nobody", ["bye"], "done", 1.0),
    ("the policy's code in one call", [("call", "run", {"code": "loop"})], "max_tool_time", 0.0),
    ("the policy's code in all calls", [("call", "work", {"code": "loop"})], "max_episode_time", 0.0),
    ("a tool that hangs", [("call", "ask", {})], "tool_timeout", None),
    ("a slow environment", [("call", "wait", {"seconds": 0.25})], "episode_timeout", None),
    ("a tool whose lateness is an answer", [("call", "told", {}), "bye"], "done", 1.0),
    ("endless tokens", ["think"], "max_tokens", 0.0),
    ("a slow engine", [("slow", 6, 0.3), ("slow", 6, 0.3), "bye"], "done", 1.0),
    ("a busy engine", [("queue", 1.0), "bye"], "done", 1.0),
    ("a silent engine", ["silent"], "engine_timeout", None),
    ("an engine that never answers", [("queue", 60)], "engine_timeout", None),
]


async def test_members_are_scored_by_whose_fault_their_timeout_was(room: Any, renderer: Renderer, caplog: Any) -> None:
    """A limit of 1 s for each: two turns of a slow engine take 3.6 s, and are as good as quick ones."""
    parts: dict[int, Sequence[Any]] = {member: part for member, (_, part, _, _) in enumerate(ENDS)}
    limits = {"turn_timeout": 1.0, "episode_timeout": 1.0, "max_turn_tokens": 60, "max_turns": 50}
    with caplog.at_level(logging.WARNING):
        members, engine = await play(room(), renderer, parts, **limits)
    retried = {int(key.split(".")[1][1:]) for key in engine.keys if key.endswith(".a1")}
    for at, (member, (who, _, stop, reward)) in enumerate(zip(members, ENDS, strict=True)):
        lost = RULE[stop] == "infrastructure"
        assert (member.stop.value, member.reward) == (stop, reward), (who, member.error)
        assert (member.cause and member.cause["blame"]) == RULE[stop], who
        assert (member.reward is None, at in retried) == (lost, lost), who
    assert members[4].cause is not None and members[4].cause["infrastructure_s"] >= 0.9 > members[4].cause["policy_s"]
    assert members[6].truncated and not members[6].terminated
    error = members[9].error or ""
    assert "no token came for 1 s (rollout.turn_timeout), last on turn 0 at the engine (3 tokens after " in error
    assert re.search(r": [\d.]+ tokens/s\)$", error), error
    [said] = [record.getMessage() for record in caplog.records if "the engine is too slow" in record.getMessage()]
    assert "tokens/s" in said and "Raise rollout.turn_timeout" in said


async def test_a_cut_episode_keeps_what_was_sampled_and_where(room: Any, renderer: Renderer) -> None:
    parts = {0: ["think"], 1: [("call", "run", {"code": "loop"})]}
    (thinker, looper), _engine = await play(room(), renderer, parts, max_turn_tokens=60)
    [ledger] = thinker.ledgers
    assert ledger.token_ids[ledger.sampled].tolist()[-50:] == [270] * 50
    [turn] = thinker.turns
    assert (turn.ledger, turn.end, turn.sampled_tokens, turn.finish) == (0, len(ledger) - 1, 60, "length")
    assert thinker.truncated and not thinker.terminated and thinker.cause is None
    [turn] = looper.turns
    assert turn.results == [] and turn.end == len(looper.ledgers[0]) - 1 > 0
    assert looper.state == {"ran": 1, "concluded": True} and looper.error == "tool run: no answer within 0.3 s"
    assert Trajectory.from_json(looper.to_json()).cause == looper.cause == {"blame": "policy"}
    old = looper.to_json()
    del old["cause"]
    assert Trajectory.from_json(old).cause is None


async def test_a_run_whose_engine_is_silent_ends_with_its_speed_and_the_key(room: Any, renderer: Renderer) -> None:
    """After the first update, when the engine has been at work before: both attempts at the two of a group, and of the next."""
    parts: dict[int, Sequence[Any]] = {0: ["bye"], 1: ["bye"]}
    engine = Actor(renderer, parts)

    says = r"the engine is too slow: the last 8 attempts .*came for 0\.3 s \(rollout\.turn_timeout\).*tokens/s.*Raise rollout"
    with pytest.raises(StalledError, match=says):
        collect = collecting(room(), engine, renderer, group_size=2, turn_timeout=0.3, retries=1)
        try:
            collect.trained(await collect.collect())
            parts.update({0: ["silent"], 1: ["silent"]})
            await collect.collect()
        finally:
            await collect.close()
    assert len(engine.keys) == 2 + 8


class Mute(Actor):
    """An engine that cannot tell how far its requests are."""

    def progress(self, request_key: str) -> int | None:
        return None


@pytest.mark.parametrize(
    ("kind", "members", "tokens", "limit"), [(Mute, 16, 20, {"turn_timeout": 0.6}), (Actor, 2, 30, {"stall_timeout": 0.5})]
)
async def test_nothing_is_late_while_the_loop_is_blocked(
    room: Any, renderer: Renderer, kind: type[Actor], members: int, tokens: int, limit: dict[str, float]
) -> None:
    async def block(collect: Collector) -> None:
        await asyncio.sleep(0.1)
        time.sleep(1.0)

    parts: dict[int, Sequence[Any]] = {member: [("ponder", tokens), "bye"] for member in range(members)}
    found, engine = await play(room(), renderer, parts, meanwhile=block, kind=kind, **limit)
    assert [m.stop.value for m in found] == ["done"] * members and len(engine.keys) == 2 * members


async def test_who_used_an_episodes_time_decides(room: Any, renderer: Renderer) -> None:
    """Member 0 samples for 1.2 s, member 1 waits for a slow tool, member 2 is cut within a tool whose time is the policy's, and
    member 3 uses half of the limit on either: scored, unscored, 0, scored; and the state of the cut call is there."""
    told, wait = ("call", "told", {}), ("call", "wait", {"seconds": 0.25})
    parts = {
        0: [("ponder", 30)] * 4 + ["bye"],
        1: [wait],
        2: [("call", "work", {"code": "loop"})],
        3: [told, told, wait, wait, "bye"],
    }
    members, _engine = await play(room(), renderer, parts, episode_timeout=0.8, retries=0)
    assert [m.stop.value for m in members] == ["done", "episode_timeout", "max_episode_time", "done"]
    assert [m.reward for m in members] == [1.0, None, 0.0, 1.0]
    for member, who in ((1, "infrastructure"), (2, "policy")):
        cause = members[member].cause
        assert cause is not None and cause["blame"] == who
        assert 0.7 <= cause[f"{who}_s"] <= 1.6 and cause[f"{who}_s"] > 2 * min(cause["policy_s"], cause["infrastructure_s"])
    assert members[2].state == {"ran": 1, "concluded": True} and members[2].turns[0].end > 0
    assert members[1].state is None


async def test_a_harmless_call_in_the_same_turn_does_not_take_the_blame(room: Any, renderer: Renderer) -> None:
    """A quick call does not excuse an endless loop next to it; slower tools of the infrastructure do."""
    quick, slow = ("wait", {"seconds": 0.01}), ("wait", {"seconds": 0.4})
    parts = {
        0: [("call", *quick, "work", {"code": "loop"})],
        1: [("call", "told", {}, *quick)],  # 0.2 s a turn, and it is told so
        2: [("call", "told", {}, *slow)],
        3: ["bye"],
    }
    members, _engine = await play(room(), renderer, parts, episode_timeout=1.5, retries=0, max_turns=50)
    assert [m.stop.value for m in members] == ["max_episode_time", "max_episode_time", "episode_timeout", "done"]
    assert [m.reward for m in members] == [0.0, 0.0, None, 1.0]
    for member, who in ((0, "policy"), (1, "policy"), (2, "infrastructure")):
        cause = members[member].cause
        assert cause is not None and cause["blame"] == who and 1.4 <= cause[f"{who}_s"] <= 2.0
    assert members[2].cause is not None and members[2].cause["policy_s"] >= 0.2


async def test_waiting_for_a_place_is_no_time_of_an_episode(room: Any, renderer: Renderer) -> None:
    """Four members of 0.3 s, one at a time, with 0.6 s each."""
    wait = ("call", "wait", {"seconds": 0.3})
    members, engine = await play(room(), renderer, {key: [wait, "bye"] for key in range(4)}, max_episodes=1, episode_timeout=0.6)
    assert [m.stop.value for m in members] == ["done"] * 4 and len(engine.keys) == 8


async def test_an_episode_longer_than_the_stall_timeout_that_moves_is_no_stall(room: Any, renderer: Renderer) -> None:
    """0.8 s of one turn's tokens, then five tool calls of 0.15 s, with a stall timeout of 0.5 s."""
    part = [("ponder", 80), *[("call", "wait", {"seconds": 0.15})] * 5, "bye"]
    members, _ = await play(room(), renderer, {0: part, 1: part}, stall_timeout=0.5)
    assert [m.stop.value for m in members] == ["done", "done"]


@pytest.mark.parametrize(("part", "says"), [
    (("queue", 60), r"turn 0 at the engine \(0 tokens after \d s: 0 tokens/s\)"),
    (("call", "work", {"code": "loop"}), r"tool work \(c\w*\), which has been running for \d s"),
])  # fmt: skip
async def test_a_stall_says_which_episode_waits_for_what_since_when(room: Any, renderer: Renderer, part: Any, says: str) -> None:
    with pytest.raises(StalledError, match=rf"episode g0\.m0\.a0 for \d s on {says}") as stalled:
        await play(room(), renderer, {0: [part], 1: ["bye"]}, stall_timeout=0.5)
    stall = "no token, tool call or episode came back for 0.5 s (rollout.stall_timeout); update 0 waits for group 0"
    assert stall in str(stalled.value)


SETUP = "env_error: RuntimeError: the setup of environment test/Room-v0 .*"
FAULTS: dict[str, tuple[str, Any, str]] = {
    # What is slow or broken of the room, what the policy does, and what is said of it.
    "a setup that hangs": (
        "setup", "bye", r"env_error: environment test/Room-v0: the setup of environment test/Room-v0 did not end within 0\.1 s "
        r"\(rollout\.env_timeout\)"),
    "a setup that cancels itself": ("cancelled setup", "bye", f"{SETUP}was cancelled from inside"),
    "a setup that exits": ("exit", "bye", rf"{SETUP}sys\.exit\(3\)"),
    "a setup that refuses as a tool does": ("refusal", "bye", "env_error: ToolError: no such room"),  # it ended the run
    "a request that the engine cancels": ("", "lost", "groups failed.*engine_error: turn 0.* was cancelled from inside"),
    "a teardown that breaks after the environment's own end": (
        "broken teardown", "bye", "env_error: OSError: the room is on fire"),
    "a teardown that breaks": (
        "broken teardown", ("call", "wait", {"seconds": 0.01}),
        "env_error: environment test/Room-v0: its end failed: OSError: the room is on fire"),
}  # fmt: skip


@pytest.mark.parametrize(("slow", "step", "says"), FAULTS.values(), ids=FAULTS)
@pytest.mark.usefixtures("patient")
async def test_a_fault_around_an_episode_is_named_and_no_stall(
    room: Any, renderer: Renderer, slow: str, step: Any, says: str
) -> None:
    more = {"env_timeout": 0.1} if slow == "setup" else {}
    with pytest.raises(StalledError, match=says):
        await play(room(slow=slow), renderer, {0: [step], 1: [step]}, stall_timeout=3.0, retries=0, max_turns=1, **more)


async def test_a_teardown_that_hangs_is_let_go_and_the_episode_counts(room: Any, renderer: Renderer, caplog: Any) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.ERROR):
        members, _ = await play(room(slow="teardown"), renderer, {0: ["bye"], 1: ["think"]}, env_timeout=0.5, max_turn_tokens=20)
    assert [m.reward for m in members] == [1.0, 0.0] and time.monotonic() - began < 30
    assert "the teardown of environment test/Room-v0: not finished within 0.5 s; it is abandoned" in caplog.text


async def test_scoring_that_hangs_is_unscored_and_tried_again(room: Any, renderer: Renderer) -> None:
    """The first two episodes' functions hang; the spec's time is over after 1 s, and the second attempts are scored."""
    release, calls = threading.Event(), []

    def mark(view: Any, args: Any) -> float:
        calls.append(view)
        if len(calls) <= 2:
            release.wait(30)
        return 0.5

    spec = {"agentrl_reward": 1, "name": "slow", "root": {"use": "python", "args": {"name": "mark"}}}
    scorer = compile_spec(spec, context=Context(python={"mark": mark}), timeout=1.0)
    members, engine = await play(room(), renderer, {0: ["bye"], 1: ["bye"]}, spec=scorer)
    release.set()
    assert [m.reward for m in members] == [0.5, 0.5]
    assert sorted(engine.keys) == ["g0.m0.a0", "g0.m0.a1", "g0.m1.a0", "g0.m1.a1"]


@pytest.mark.usefixtures("patient")
async def test_a_request_that_is_given_up_does_not_run_on_beside_the_next_attempt(
    room: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: list[list[str]] = []
    generate = Actor.generate

    async def watched(self: Actor, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        beside.append(list(self.seen))
        return await generate(self, token_ids, sampling, request_key)

    monkeypatch.setattr(Actor, "generate", watched)
    with pytest.raises(StalledError, match=r"engine_timeout: no token came for 0\.1 s"):
        await play(room(), renderer, {0: ["silent"], 1: ["silent"]}, turn_timeout=0.1, retries=1, max_episodes=1)
    assert len(beside) >= 4 and not any(beside)


async def test_a_cancelled_member_whose_teardown_breaks_ends_nothing_else(room: Any, renderer: Renderer) -> None:
    """Oversampling cancels the thinker once two members are back; what its teardown raises is logged, not the group's end."""
    parts = {0: ["bye"], 1: ["bye"], 2: ["think"], 3: ["think"]}
    members, engine = await play(room(slow="broken cancel"), renderer, parts, group_size=2, oversample_members=2.0)
    assert [m.reward for m in members] == [1.0, 1.0] and len(engine.keys) == 4


async def test_an_evaluation_does_not_wait_for_a_lost_request_for_ever(room: Any, renderer: Renderer) -> None:
    """A request that is queued for ever ends unscored once the engine has nothing else to do."""
    engine = Actor(renderer, {0: [("queue", 60)], 1: [("ponder", 80), "bye"]})
    limits = Limits.of(RolloutConfig(turn_timeout=0.4), 4000)
    began = time.monotonic()
    lost, fine = await run_tasks(
        room(), Policy(engine, renderer), compile_spec(DONE), limits, [(0, 0), (0, 1)], seed=0, max_episodes=2
    )
    assert (lost.stop, lost.reward, fine.reward) == (StopReason.ENGINE_TIMEOUT, None, 1.0)
    assert lost.error is not None and "no token came for 0.4 s (rollout.turn_timeout), last on turn 0" in lost.error
    assert 1.1 < time.monotonic() - began < 30  # 0.8 s of the other's tokens are moves


async def test_a_group_whose_comparison_hangs_is_unscored() -> None:
    async def late(trajectories: Any) -> Any:
        raise deadline.LateError("reward spec best: no end within 5 s")

    members = [Trajectory("test/Room-v0", Task("t", 0), reward=1.0, metrics={"best": 1.0}) for _ in range(2)]
    scorer: Any = SimpleNamespace(name="best", ascore_group=late, ids=["best"])
    await score_group(members, scorer)
    for member in members:
        assert (member.stop, member.reward, member.metrics) == (StopReason.ENV_ERROR, None, {"best": None})
        assert member.error == "reward spec best: no end within 5 s" and member.cause == {"blame": "infrastructure"}


def test_the_longest_wait_is_named_first_whatever_process_it_is_in() -> None:
    watch = Watch()
    watch.remote["worker 1"] = ([("e9", "the tool", 50.0)], 0, time.monotonic())
    with watch.waits("e1", lambda: "the engine"):
        assert watch.waiting(1) == "episode e9 for 50 s on the tool (in worker 1); and 1 more"
