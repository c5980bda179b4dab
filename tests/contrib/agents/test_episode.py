"""An agent's episode: what the policy sampled, what was called, what ends it, and who is to blame."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from agentrl.config.schema import AgentConfig
from agentrl.contrib.agents.record import Episode
from agentrl.data.trajectory import Message, StopReason, Trajectory
from agentrl.env import tool
from agentrl.rollout.engine import Generation
from agentrl.run.evaluate import make_report
from agentrl.utils.errors import AgentrlError
from agentrl.utils.spans import TracePlace, TraceSpan, add_listener, at
from tests.contrib.agents.parts import (
    FUNCTION,
    LIMITS,
    RENDERER,
    Dice,
    Script,
    Store,
    call,
    client_of,
    conversation,
    native,
    plain_agent,
    play,
    says,
    told,
)
from tests.lazily import openai

TURNS = [says("", call("get", key="tea")), says("both", call("get", key="rice"), call("put", key="tea", value="4")),
         says("", call("get", key="nothing")), says("There are 3."), says("None.")]  # fmt: skip


@pytest.mark.parametrize("limit", [{}, {"max_episode_tokens": 125}, {"context": 130}, {"max_turns": 2}], ids=str)
def test_an_agent_that_does_what_the_built_in_loop_does_has_the_same_episodes_to_the_digit(limit: dict[str, int]) -> None:
    """Also where limits cut them."""
    how: dict[str, Any] = {"members": 12, "limits": replace(LIMITS, **limit)}
    by_agent, by_loop = play(Dice(TURNS), FUNCTION, **how), native(Dice(TURNS), **how)
    assert len({t.stop for t in by_loop}) > 1 and (limit or len({t.reward for t in by_loop}) > 2)  # several kinds of ends
    for mine, theirs in zip(by_agent, by_loop, strict=True):
        assert mine.ledgers == theirs.ledgers
        assert told(mine) == told(theirs)
        assert conversation(mine) == conversation(theirs)
        assert (mine.stop, mine.error, mine.reward, mine.success) == (theirs.stop, theirs.error, theirs.reward, theirs.success)
        assert (mine.terminated, mine.truncated, mine.state) == (theirs.terminated, theirs.truncated, theirs.state)
        assert (mine.task, mine.seed, mine.member, mine.tools) == (theirs.task, theirs.seed, theirs.member, theirs.tools)


def test_the_spans_of_an_agent_s_episode_are_those_of_the_built_in_loop_but_for_the_turns() -> None:
    """Its requests and calls come in tasks of the servers, and belong to the episode all the same."""
    found: list[TraceSpan] = []
    leave = add_listener(found.append)

    def spans_of(player: Any, *agent: Any) -> list[tuple[str, str, int]]:
        found.clear()
        with at(TracePlace(7, 1, "g0", True)):
            player(Script([says("", call("get", key="tea")), says("There are 3.")]), *agent)
        assert {one.trace for one in found} == {7} and {one.track for one in found} == {"g0", "g0.m0.a0"}
        inside = {one.id: one.kind for one in found}
        kept = [one for one in found if one.kind in ("generation", "tool", "scoring")]
        assert all(inside.get(one.parent, "") in ("", "turn", "environment") for one in kept)
        return sorted((one.kind, one.name, int(one.values.get("output_tokens") or 0)) for one in kept)

    by_agent, by_loop = spans_of(play, FUNCTION), spans_of(native)
    leave()
    assert by_agent == by_loop and [kind for kind, _, _ in by_loop] == ["generation", "generation", "scoring", "tool"]


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    return (await client.chat.completions.create(model="policy", messages=messages, **more)).choices[0].message


async def asks(episode: Episode, *conversations: list[Any], **more: Any) -> Any:
    """Ask for a turn in each conversation, by default the episode's own; the last answer."""
    async with client_of(episode) as client:
        for messages in conversations or (episode.messages,):
            said = await ask(client, messages, **more)
    return said


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def one(*turns: Message, program: Any = plain_agent, env: type[Store] = Store, limits: Any = LIMITS, **agent: Any) -> Trajectory:
    config = AgentConfig(**{"python": FUNCTION.python, **agent})
    (trajectory,) = play(Script(turns), config, program=program, env=env, limits=limits)
    return trajectory


# -- calls ---------------------------------------------------------------------------------------------


def test_calls_side_by_side_keep_to_the_rules_of_the_tools_and_their_order() -> None:
    async def hasty(episode: Episode) -> None:
        calls = [one.function for one in (await asks(episode, tools=episode.tools)).tool_calls]
        await asyncio.gather(*(episode.call(one.name, json.loads(one.arguments)) for one in reversed(calls)))

    puts = [call("put", key=key, value="1") for key in "ab"]  # `put` fails if another one runs beside it
    calls = says("", *puts, call("get", key="tea"), call("get", key="milk"))
    trajectory = one(calls, program=hasty, limits=replace(LIMITS, max_turn_tokens=200))
    assert (trajectory.stop, trajectory.error) == (StopReason.DONE, None)
    (turn,) = trajectory.turns
    assert [(r.name, r.content) for r in turn.results] == [("put", "done"), ("put", "done"), ("get", "3"), ("get", "2")]
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["done", "done", "3", "2"]
    assert sorted(trajectory.state["put"]) == [["a", "1"], ["b", "1"]]


def test_a_call_that_the_policy_did_not_sample_belongs_to_the_turn_after_which_it_was_made() -> None:
    async def coder(episode: Episode) -> None:
        await episode.call("get", {"key": "milk"})  # before any turn: in one of the agent's own
        await asks(episode)
        await episode.call("get", {"key": "tea"})
        await asks(episode, [user("and now?")])

    trajectory = one(says("get('tea')"), says("It is 3."), program=coder)
    made = [[(c.name, c.arguments) for c in turn.message.tool_calls] for turn in trajectory.turns]
    assert made == [[("get", {"key": "milk"})], [("get", {"key": "tea"})], []]
    assert [[result.content for result in turn.results] for turn in trajectory.turns] == [["2"], ["3"], []]
    assert [made.name for _, made, _ in trajectory.calls()] == ["get", "get"]
    assert [m.role for m in trajectory.messages] == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    assert [ledger.turns[ledger.sampled].max() for ledger in trajectory.ledgers] == [1, 2]


def test_a_call_finds_its_turn_by_its_arguments_then_by_its_name_and_an_unmade_one_stays_open() -> None:
    async def picky(episode: Episode) -> None:
        await asks(episode, tools=episode.tools)
        await episode.call("get", {"key": "milk"})
        await episode.call("get", {"key": "sugar"})  # of the policy's, but with other arguments

    trajectory = one(says("", call("get", key="tea"), call("get", key="milk"), call("put", key="a", value="1")), program=picky)
    (turn,) = trajectory.turns
    answers = {r.call_id: (r.content, r.error) for r in turn.results}
    first, second, third = (c.id for c in turn.message.tool_calls)
    assert answers[second] == ("2", None) and answers[first][1] == "tool_error" and third not in answers
    assert trajectory.state["put"] == []


def test_the_calls_of_tools_of_the_agent_s_own_are_read_from_its_requests() -> None:
    async def own(episode: Episode) -> None:
        assert episode.tools == [] and episode.mcp_url is None
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
        message = await asks(episode, tools=tools)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "three"}
        await asks(episode, [*episode.messages, message.model_dump(exclude_none=True), result, user("go on")], tools=tools)

    trajectory = one(says("", call("look")), says("There are 3."), program=own, tools="own")
    assert [(r.name, r.content, r.error) for r in trajectory.turns[0].results] == [("look", "three", None)]
    assert conversation(trajectory)[2:] == [
        ("assistant", "", [("look", {})], None),
        ("tool", "three", [], "look"),
        ("user", "go on", [], None),
        ("assistant", "There are 3.", [], None),
    ]
    assert len(trajectory.ledgers) == 1 and trajectory.reward == 1.0


def test_a_malformed_call_is_in_the_record_as_one() -> None:
    trajectory = one(says('<tool_call>{"name": "get", "arguments": {"key": </tool_call>'))
    assert [result.error for result in trajectory.turns[0].results] == ["malformed_call"]
    assert trajectory.stop is StopReason.DONE


# -- ledgers -------------------------------------------------------------------------------------------


def test_sub_agents_side_by_side_are_ledgers_of_their_own_and_every_token_is_trained_once() -> None:
    async def team(episode: Episode) -> None:
        async with client_of(episode) as client:
            first = await ask(client, episode.messages)
            messages = [*episode.messages, {"role": "assistant", "content": first.content}]
            await asyncio.gather(*(ask(client, [user(f"part {number}")]) for number in range(3)))
            await ask(client, [*messages, user("sum up")])

    def tokens(trajectory: Trajectory) -> list[int]:
        return sorted(t for ledger in trajectory.ledgers for t in ledger.token_ids[ledger.sampled].tolist())

    turns = [says(word) for word in ("one", "two", "three", "four", "five")]
    trajectory = one(*turns, program=team, limits=replace(LIMITS, max_turns=8))
    assert len(trajectory.ledgers) == 4 and [turn.ledger for turn in trajectory.turns][0::4] == [0, 0]
    assert tokens(trajectory) == sorted(t for turn in turns for t in RENDERER.assistant(turn))
    for turn in trajectory.turns:
        ledger = trajectory.ledgers[turn.ledger]
        assert ledger.sampled[turn.end] and (ledger.turns[turn.end] == turn.index)
    # Whatever the order in which sub-agents come, what each samples is the same; members and seeds differ.
    dice = [says(str(number)) for number in range(50)]
    limits = replace(LIMITS, max_turns=8)
    engines = Dice(dice), Dice(dice, slow=lambda number: 0.02)
    runs = [play(engine, FUNCTION, program=team, members=2, limits=limits) for engine in engines]
    assert [tokens(t) for t in runs[0]] == [tokens(t) for t in runs[1]] and tokens(runs[0][0]) != tokens(runs[0][1])


def test_the_run_s_sampling_is_used_whatever_the_agent_asks_for() -> None:
    async def own_ways(episode: Episode) -> None:
        await asks(episode, temperature=0.1, top_p=0.5, seed=1, max_tokens=9)

    engine = Dice([says("3")])
    trajectories = play(engine, FUNCTION, program=own_ways, members=2, temperature=0.7, top_p=0.9, top_k=20)
    asked = [sampling for _, sampling, _ in engine.asked]
    assert {(s.temperature, s.top_p, s.top_k, s.max_tokens) for s in asked} == {(0.7, 0.9, 20, 9)}
    assert len({s.seed for s in asked}) == 2 and 1 not in {s.seed for s in asked}
    assert trajectories[0].agent["other_sampling"] == {"temperature": 1, "top_p": 1}


# -- its last word -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "reward"), [("last_message", 0.5), ("output", 1.0)])
def test_the_last_word_is_the_policy_s_or_the_agent_s(answer: str, reward: float) -> None:
    async def returns(episode: Episode) -> str:
        await asks(episode)
        return "It is 3."

    trajectory = one(says("I do not know."), program=returns, answer=answer)
    assert trajectory.reward == reward
    assert [turn.ledger for turn in trajectory.turns] == ([0] if answer == "last_message" else [0, -1])
    assert make_report([trajectory], 1)["tokens"] == trajectory.sampled_tokens > 0


# -- what ends it, and whose fault that is -------------------------------------------------------------


def raises(fault: BaseException) -> Any:
    async def program(episode: Episode) -> None:
        await asks(episode)
        raise fault

    return program


loses_a_file = raises(ValueError("no such file"))
NO_FILE = "the agent failed (ValueError: no such file)"


async def idles(episode: Episode) -> None:
    await asks(episode)
    await asyncio.sleep(60)


async def thinks_between(episode: Episode) -> None:
    for number in range(4):
        await asks(episode, [user(f"part {number}")])
        await asyncio.sleep(0.25)


async def asks_too_much(episode: Episode) -> None:
    await asks(episode, [user("word " * 3000)])


async def never_asks(episode: Episode) -> str:
    return "3"


async def fails_first(episode: Episode) -> None:
    raise ValueError("no such file")


async def leaves(episode: Episode) -> None:
    await episode.call("leave", {})
    await asyncio.sleep(60)


@pytest.mark.parametrize(("program", "agent", "stop", "reward", "error"), [
    (loses_a_file, {}, StopReason.AGENT_ERROR, None, NO_FILE),
    (loses_a_file, {"blame": "policy"}, StopReason.AGENT_FAILED, 1.0, NO_FILE),
    (raises(GeneratorExit("gone")), {}, StopReason.AGENT_ERROR, None, "the agent failed (GeneratorExit: gone)"),
    (idles, {"idle_timeout": 0.2}, StopReason.AGENT_ERROR, None, "no request, tool call or end for 0.2 s"),
    (idles, {"idle_timeout": 0.2, "blame": "policy"}, StopReason.AGENT_ERROR, None, "no request, tool call or end for 0.2 s"),
    (thinks_between, {"idle_timeout": 0.7}, StopReason.DONE, 1.0, None),
    (never_asks, {}, StopReason.AGENT_ERROR, None, "without a turn of the policy; does it use OPENAI_BASE_URL?; its output: 3"),
    (fails_first, {"blame": "policy"}, StopReason.AGENT_ERROR, None, NO_FILE),
    (asks_too_much, {"blame": "policy"}, StopReason.AGENT_ERROR, None, "before the policy's first turn; a prompt of "),
    (leaves, {}, StopReason.AGENT_ERROR, None, "ended (done) before the policy's first turn"),
    ("broken", {}, StopReason.ENV_ERROR, None, "tool broken failed: ValueError: out of order"),
    ("think", {}, StopReason.MAX_TOOL_TIME, 0.5, "tool think: no answer within 0.05 s"),
    ("leave", {}, StopReason.DONE, 0.5, None),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_what_ends_an_episode_is_why_it_ended(
    program: Any, agent: dict[str, Any], stop: StopReason, reward: float | None, error: str | None
) -> None:
    if isinstance(program, str):
        name = program

        async def program(episode: Episode) -> None:
            await asks(episode)
            await episode.call(name, {})
            await asyncio.sleep(60)

    turns = 4 if program is thinks_between else 1
    trajectory = one(*[says("There are 3.")] * turns, program=program, **agent)
    assert (trajectory.stop, trajectory.reward) == (stop, reward)
    assert (trajectory.error is None) if error is None else (error in (trajectory.error or ""))
    silent = program in (never_asks, fails_first, asks_too_much, leaves)
    assert sum(turn.sampled_tokens > 0 for turn in trajectory.turns) == sum(map(bool, trajectory.ledgers)) == turns * (not silent)


def test_an_engine_that_fails_is_the_reason_even_if_the_agent_ends_well() -> None:
    async def forgives(episode: Episode) -> str:
        await asks(episode)
        with pytest.raises(openai.APIStatusError) as problem:
            await asks(episode, [user("again")])
        assert problem.value.status_code == 503
        return "3"

    (trajectory,) = play(Dice([says("3")], fails=1), FUNCTION, program=forgives)
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENGINE_ERROR, None)
    assert "the replica went away" in (trajectory.error or "") and len(trajectory.turns) == 1


@pytest.mark.parametrize("limit", ["turn_timeout", "episode_timeout", "client"])
def test_the_seconds_of_a_slow_engine_are_never_the_policys(limit: str) -> None:
    """A turn of 2 s: unscored if the engine's limit or the agent's own client ends it; the episode's limit does not count it."""

    async def hurried(episode: Episode) -> str:
        async with client_of(episode) as client:
            await ask(client, episode.messages)
            patience = {"timeout": 0.2, "max_retries": 0} if limit == "client" else {}
            return str((await ask(client.with_options(**patience), [user("again")])).content)

    engine = Dice([says("There are 3.")], slow=lambda number: 2.0 if number > 1 else 0.0)
    agent = AgentConfig(python=FUNCTION.python, blame="policy")
    limits = LIMITS if limit == "client" else replace(LIMITS, **{limit: 1.0})
    (trajectory,) = play(engine, agent, program=hurried, limits=limits)
    stops = {"turn_timeout": "engine_timeout", "episode_timeout": "done", "client": "agent_error"}
    assert (trajectory.stop.value, trajectory.reward is None) == (stops[limit], limit != "episode_timeout"), trajectory.error
    if limit == "client":
        assert "while it waited for the engine" in (trajectory.error or "")


@pytest.mark.parametrize("drops", [3, 99])
def test_requests_that_an_agent_s_client_gives_up_are_no_turns(drops: int) -> None:
    """A client with a time limit asks a slow engine again and again; that costs the policy none of its 2 turns."""

    async def impatient(episode: Episode) -> None:
        async with client_of(episode) as client:
            answers = 0
            while answers < 2:
                with suppress(openai.APITimeoutError):
                    answers += bool(await ask(client.with_options(timeout=0.3), [user(f"question {answers}")]))

    engine = Dice([says("There are 3.")], slow=lambda number: 9.0 if 2 <= number <= drops + 1 else 0.0)
    (trajectory,) = play(engine, FUNCTION, program=impatient, limits=replace(LIMITS, max_turns=2))
    stop, turns = (StopReason.DONE, 2) if drops == 3 else (StopReason.AGENT_ERROR, 1)
    assert (trajectory.stop, len(trajectory.turns)) == (stop, turns), trajectory.error
    assert drops == 3 or "dropped 8 requests" in (trajectory.error or "")


class Waits(Store):
    @tool
    async def wait(self) -> str:
        """takes long"""
        await asyncio.sleep(0.2)
        return "ok"

    @tool(timeout=9, late="policy")
    async def think(self) -> str:
        """takes long, as the policy wants it"""
        return await self.wait()


def test_calls_side_by_side_take_the_seconds_of_one() -> None:
    async def hasty(episode: Episode) -> None:
        await asks(episode)
        await asyncio.gather(*(episode.call("wait", {}) for _ in range(20)))

    trajectory = one(says("There are 3."), program=hasty, env=Waits, limits=replace(LIMITS, episode_timeout=2.0))
    assert (trajectory.stop, len(trajectory.turns[0].results)) == (StopReason.DONE, 20), trajectory.error


@pytest.mark.parametrize("name", ["wait", "think"])
def test_a_tool_that_an_agent_gives_up_is_the_policy_s_fault_only_if_its_time_is(name: str) -> None:
    async def impatient(episode: Episode) -> None:
        await asks(episode)
        with suppress(TimeoutError):
            await asyncio.wait_for(episode.call(name, {}), 0.02)
        await asyncio.wait_for(episode.call("put", {"key": "a", "value": "1"}), 0.02)

    trajectory = one(says("There are 3."), program=impatient, env=Waits, blame="policy")
    assert trajectory.stop is (StopReason.AGENT_ERROR if name == "wait" else StopReason.AGENT_FAILED), trajectory.error


def test_calls_that_were_under_way_at_the_end_are_done_before_it() -> None:
    """Whether a call next to them ended the episode, or the agent did not wait for them."""

    async def hasty(episode: Episode) -> None:
        await asks(episode)
        with suppress(TimeoutError):
            await asyncio.wait_for(episode.call("wait", {}), 0.02)
        await asyncio.gather(episode.call("wait", {}), episode.call("leave", {}))

    trajectory = one(says("There are 3."), program=hasty, env=Waits)
    assert (trajectory.stop, trajectory.state, trajectory.error) == (StopReason.DONE, {"put": []}, None)
    assert sorted(result.name for result in trajectory.turns[0].results) == ["leave", "wait", "wait"]


def test_a_prompt_that_is_too_long_is_refused_and_ends_the_episode() -> None:
    seen: list[tuple[int, str]] = []

    async def talks(episode: Episode) -> None:
        await asks(episode)
        try:
            await asks_too_much(episode)
        except openai.APIStatusError as problem:
            seen.append((problem.status_code, str(problem.code)))
            raise

    trajectory = one(says("There are 3."), program=talks)
    assert (trajectory.stop, trajectory.reward, trajectory.truncated) == (StopReason.MAX_TOKENS, 1.0, True)
    assert seen in ([], [(400, "context_length_exceeded")])  # told, if it is still there to hear it


def test_the_agent_s_own_time_is_nobody_s_fault_but_counts() -> None:
    trajectory = one(says("There are 3."), program=idles, limits=replace(LIMITS, episode_timeout=0.4))
    assert (trajectory.stop, trajectory.reward) == (StopReason.EPISODE_TIMEOUT, None)
    assert trajectory.cause is not None and trajectory.cause["infrastructure_s"] >= 0.4
    assert trajectory.timings["agent_s"] > 0.2


# -- users ---------------------------------------------------------------------------------------------


class Talks(Store):
    lines = ("in the blue box?", "thanks")


def test_an_environment_s_user_talks_with_an_agent_that_says_so() -> None:
    async def polite(episode: Episode) -> None:
        messages: list[Any] = list(episode.messages)
        replies: list[str] | None = []
        while replies is not None:
            said = (await asks(episode, messages)).content
            replies = await episode.say(said)
            messages += [{"role": "assistant", "content": said}, *map(user, replies or [])]

    talks = [says("Where?"), says("There are 3."), says("Welcome.")]
    trajectory = one(*talks, program=polite, env=Talks, user=True)
    assert trajectory.stop is StopReason.DONE
    assert [(m.role, m.content) for m in trajectory.messages[2:]] == [
        ("assistant", "Where?"), ("user", "in the blue box?"), ("assistant", "There are 3."), ("user", "thanks"),
        ("assistant", "Welcome."),
    ]  # fmt: skip
    assert len(trajectory.turns) == 3 and len(trajectory.ledgers) == 1
    refused = one(*talks, program=polite, env=Talks)
    assert refused.stop is StopReason.AGENT_ERROR and "agent.user" in (refused.error or "")


class Acts(Store):
    lines = (*[call("look")] * 2, "in the blue box?", *[call("look")] * 3)  # type: ignore[assignment]
    user_call_limit = 2

    @tool(by="user")
    async def look(self) -> str:
        """look into the box"""
        return "blue"


def test_a_user_s_own_calls_are_recorded_and_too_many_cut_the_episode_of_an_agent_too() -> None:
    async def polite(episode: Episode) -> None:
        first = await asks(episode)
        assert await episode.say(first.content) == ["in the blue box?"]
        more = [{"role": "assistant", "content": first.content}, user("in the blue box?")]
        await episode.say((await asks(episode, [*episode.messages, *more])).content)

    cut = one(says("Where?"), says("Look again."), program=polite, env=Acts, user=True)
    assert cut.stop is StopReason.MAX_TURNS and "3 calls in one answer" in (cut.error or "")
    assert [(made.turn, made.step, made.result and made.result.content) for made in cut.user_calls] == [
        (0, 0, "blue"), (0, 1, "blue"), (1, 0, "blue"), (1, 1, "blue"),
    ]  # fmt: skip
    assert cut.reward is not None


# -- secrets -------------------------------------------------------------------------------------------


def test_a_session_reads_neither_tools_nor_model_of_another() -> None:
    served: list[Episode] = []
    both = asyncio.Barrier(2)  # at the start both episodes are open, and none ends before the other one has tried its served

    async def nosy(episode: Episode) -> None:
        served.append(episode)
        await both.wait()
        (other,) = (one for one in served if one is not episode)
        tools = [str(one.mcp_url) for one in (episode, other)]
        try:
            async with client_of(episode) as client:
                await ask(client, episode.messages)
                with pytest.raises(openai.AuthenticationError):
                    await ask(client.with_options(base_url=other.openai_base_url), episode.messages)
            assert episode.api_key not in tools[1] and tools[0] != tools[1]
            async with httpx.AsyncClient(verify=False) as web:
                guess = tools[0].replace(tools[0].split("/")[4], "g0.m0.a0")
                codes = [(await web.post(url, json={})).status_code for url in (guess, tools[0])]
                assert codes[0] == 404 and codes[1] != 404
        finally:
            await both.wait()

    ends = [(t.stop, t.error) for t in play(Dice([says("3")]), FUNCTION, program=nosy, members=2)]
    assert ends == [(StopReason.DONE, None)] * 2


def test_routers_are_replayed_from_where_a_ledger_knows_them() -> None:
    starts: list[int | None] = []

    class Routed(Script):
        """Tells as experts of a token the number of its place."""

        async def generate(self, token_ids: Any, sampling: Any, request_key: str) -> Generation:
            got = await super().generate(token_ids, sampling, request_key)
            starts.append(sampling.experts_from)
            if sampling.experts_from is None:
                return got
            places = np.arange(sampling.experts_from, len(token_ids) + len(got.token_ids) - 1, dtype=np.int16)
            return replace(got, experts=places.reshape(-1, 1, 1))

    turns = [says("", call("get", key="tea")), says("There are 3.")]
    (trajectory,) = play(Routed(turns), FUNCTION, router_replay=True)
    (ledger,) = trajectory.ledgers
    assert ledger.experts is not None and ledger.experts.reshape(-1).tolist() == list(range(len(ledger) - 1))
    assert starts == [0, trajectory.turns[0].end], "those of the first turn are known but for its last token"
    play(Routed(turns), FUNCTION)
    assert starts[2:] == [None, None]


def test_what_an_agent_did_not_wait_for_is_done_before_the_end_and_nothing_after_it() -> None:
    refused: list[str] = []

    async def hasty(episode: Episode) -> None:
        await asks(episode)
        tasks.append(asyncio.create_task(episode.call("put", {"key": "tea", "value": "4"})))
        await asyncio.sleep(0.002)
        tasks.append(asyncio.create_task(later(episode)))

    async def later(episode: Episode) -> None:
        try:
            await episode.call("get", {"key": "tea"})
        except AgentrlError as over:
            refused.append(str(over))

    tasks: list[asyncio.Task[Any]] = []
    trajectory = one(says("There are 3."), program=hasty)
    assert (trajectory.stop, trajectory.reward, trajectory.error) == (StopReason.DONE, 0.0, None)  # it put something
    assert trajectory.state == {"put": [["tea", "4"]]}
    assert [(r.name, r.content) for turn in trajectory.turns for r in turn.results] == [("put", "done")]
    assert refused == ["the episode is over"]
