"""Agents that are commands and URLs: their processes and words, the tools as real MCP clients see them, and what is refused."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import AgentConfig
from agentrl.contrib.agents import programs
from agentrl.contrib.agents.episode import Harness
from agentrl.contrib.agents.programs import AgentProcess, Command, Output, program_of
from agentrl.contrib.agents.record import Episode
from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.episode import Policy
from agentrl.utils.errors import ConfigError, ResourceError
from tests.contrib.agents.parts import (
    FUNCTION,
    LIMITS,
    RENDERER,
    SPEC,
    Dice,
    Script,
    Store,
    call,
    native,
    play,
    says,
    spec_of,
    told,
)
from tests.contrib.agents.test_episode import TURNS, asks, one
from tests.rollout.loopback import Loopback
from tests.waits import runs, until

AGENT = [sys.executable, "-S", str(Path(__file__).parent / "agent_over_http.py")]


def test_a_command_plays_the_built_in_loop_s_episodes_and_its_output_is_kept() -> None:
    by_agent, by_loop = play(Dice(TURNS), AgentConfig(command=AGENT), members=5), native(Dice(TURNS), members=5)
    for mine, theirs in zip(by_agent, by_loop, strict=True):
        assert (mine.stop, mine.ledgers, told(mine)) == (theirs.stop, theirs.ledgers, told(theirs)), mine.error
        if mine.stop is StopReason.DONE:
            assert mine.agent is not None and mine.agent["exit_code"] == 0
            assert mine.agent["stdout"] == theirs.turns[-1].message.content + "\n"
            assert (mine.agent["stderr"], mine.agent["requests"]) == ("", len(mine.turns))
    row = json.loads(json.dumps(by_agent[0].to_json()))
    assert Trajectory.from_json(row).agent == by_agent[0].agent
    assert "agent" not in by_loop[0].to_json() and Trajectory.from_json(by_loop[0].to_json()).agent is None


@pytest.mark.parametrize(("blame", "stop", "reward"), [
    ("infrastructure", StopReason.AGENT_ERROR, None), ("policy", StopReason.AGENT_FAILED, 1.0),
])  # fmt: skip
def test_an_exit_code_is_a_fault_with_its_words_or_the_policy_s_if_the_run_says_so(
    blame: Any, stop: StopReason, reward: float | None
) -> None:
    (trajectory,) = play(Script([says("There are 3.")]), AgentConfig(command=[*AGENT, "3"], blame=blame))
    assert (trajectory.stop, trajectory.reward) == (stop, reward)
    assert not trajectory.truncated, "no budget ended it, so algorithm.truncated does not mask what the policy is blamed for"
    assert trajectory.error == "the agent failed (exit code 3: cannot save)"
    assert trajectory.cause == {"blame": blame} and trajectory.agent is not None
    assert trajectory.agent["stderr"] == "cannot save\n"


def test_a_command_gets_the_variables_that_it_is_given_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)  # else the agent gets NO_PROXY (tests/test_proxies.py)
    for name, value in {"SECRET": "1", "PASSED": "2", "OPENAI_API_KEY": "the driver's"}.items():
        monkeypatch.setenv(name, value)
    code = "import json, os; print(json.dumps(dict(os.environ))); open(os.environ['AGENTRL_TASK_FILE']).read()"
    config = AgentConfig(command=[sys.executable, "-S", "-c", code], pass_env=["PASSED"], env={"GIVEN": "3"})
    (trajectory,) = play(Script([]), config)
    assert "without a turn of the policy" in (trajectory.error or "") and trajectory.agent is not None
    seen = json.loads(trajectory.agent["stdout"])
    always = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ"}
    assert set(seen) - always == {
        "PASSED", "GIVEN", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "AGENTRL_MODEL",
        "AGENTRL_PROMPT", "AGENTRL_TASK", "AGENTRL_TASK_FILE", "AGENTRL_FOLDER", "AGENTRL_MCP_URL",
    }  # fmt: skip
    assert (seen["PASSED"], seen["GIVEN"]) == ("2", "3") and seen["OPENAI_API_KEY"] != "the driver's"
    assert "answer" not in seen["AGENTRL_TASK"] and not Path(seen["AGENTRL_FOLDER"]).exists()


def test_an_agent_that_is_cut_short_or_cancelled_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    code = f"import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, file=open({str(note)!r}, 'w'))"
    config = AgentConfig(command=[sys.executable, "-S", "-c", f"{code}; print('so far', flush=True); time.sleep(600)"])

    def sleeper() -> int:
        while not note.exists() or not note.read_text():
            time.sleep(0.01)
        return int(note.read_text())

    (trajectory,) = play(Script([]), config.model_copy(update={"idle_timeout": 4.0}))
    assert trajectory.stop is StopReason.AGENT_ERROR and trajectory.agent is not None and "so far" in trajectory.agent["stdout"]
    assert not runs(sleeper())
    note.unlink()

    async def cancelled() -> None:
        harness = Harness(config)
        episode = harness.play(Store(), Policy(Script([]), RENDERER), spec_of(), LIMITS, SPEC, Watch())
        task = asyncio.create_task(episode)
        await asyncio.to_thread(sleeper)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not runs(sleeper())
        await harness.close()

    asyncio.run(cancelled())


def test_what_an_agent_that_is_cancelled_had_sampled_is_told() -> None:
    async def cancelled() -> int:
        answered, harness, watch = asyncio.Event(), Harness(FUNCTION), Watch()

        async def hangs(episode: Episode) -> None:
            await asks(episode)
            answered.set()
            await asyncio.sleep(600)

        harness._program._function = hangs  # type: ignore[union-attr]
        policy = Policy(Script([says("Let me see.")]), RENDERER)
        task = asyncio.create_task(harness.play(Store(), policy, spec_of(), LIMITS, SPEC, watch))
        await answered.wait()
        task.cancel()
        await asyncio.wait([task])
        await harness.close()
        return watch.cut

    assert asyncio.run(cancelled()) == len(RENDERER.assistant(says("Let me see.")))


def test_concurrency_bounds_the_agents_that_run_at_once() -> None:
    running, most = 0, 0

    async def counts(episode: Episode) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1

    play(Script([]), FUNCTION.model_copy(update={"concurrency": 2}), program=counts, members=6)
    assert most == 2


# -- a URL ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "body", "stop", "error"), [
    (200, {"answer": "It is 3."}, StopReason.DONE, None),
    (200, [1], StopReason.AGENT_FAILED, "expected a JSON object"),
    (500, {"why": "no disk"}, StopReason.AGENT_FAILED, 'HTTP 500: {"why": "no disk"}'),
    (503, {"why": "restarts"}, StopReason.AGENT_ERROR, 'HTTP 503: {"why": "restarts"}'),
    (None, None, StopReason.AGENT_ERROR, "RemoteProtocolError"),
    (200, {"answer": "3".ljust(1986)}, StopReason.DONE, None),
    (200, {"answer": "3".ljust(1987)}, StopReason.AGENT_FAILED, "the answer has more than 2000 bytes"),
])  # fmt: skip
async def test_a_url_gets_everything_in_a_post_and_answers_when_it_is_done(
    status: int | None, body: Any, stop: StopReason, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is gone, or a proxy that says so, is never the policy's failure."""
    import httpx

    monkeypatch.setattr(programs, "MAX_ANSWER", 2000)

    def agent(given: dict[str, Any], _: int) -> Any:
        ask = {"model": given["model"], "messages": given["messages"], "tools": given["tools"]}
        heads = {"Authorization": f"Bearer {given['api_key']}"}
        answer = httpx.post(f"{given['openai_base_url']}/chat/completions", json=ask, headers=heads, verify=False)
        assert answer.status_code == 200 and given["mcp_url"].endswith("/mcp") and given["user_url"] is None
        return None if status is None else {"raw": json.dumps(body), "status": status}

    with Loopback(agent) as server:
        harness = Harness(AgentConfig(url=server.url, answer="output", blame="policy"))
        policy = Policy(Script([says("I do not know.")]), RENDERER)
        trajectory = await harness.play(Store(), policy, spec_of(), LIMITS, SPEC, Watch())
        await harness.close()
    assert trajectory.stop is stop and (error is None or error in (trajectory.error or ""))
    assert trajectory.reward == {StopReason.DONE: 1.0, StopReason.AGENT_FAILED: 0.5}.get(stop)
    assert trajectory.agent is not None and trajectory.agent.get("status") == status


# -- tools by a real MCP client ------------------------------------------------------------------------


def test_a_real_mcp_client_lists_and_calls_the_environment_s_tools() -> None:
    from mcp import Client

    seen: list[Any] = []

    async def through_mcp(episode: Episode) -> None:
        await asks(episode, tools=episode.tools)
        async with Client(str(episode.mcp_url)) as tools:
            seen.append([tool.name for tool in (await tools.list_tools()).tools])
            for key in ("tea", "gold"):
                answer = await tools.call_tool("get", {"key": key})
                seen.append((answer.content[0].text, answer.is_error))
            answer = await tools.call_tool("get", {"wrong": 1})
            seen.append(answer.is_error)

    turn = says("", call("get", key="tea"), call("get", key="gold"))
    (trajectory,) = play(Script([turn]), FUNCTION, program=through_mcp)
    assert trajectory.stop is StopReason.DONE, trajectory.error
    assert seen[0] == ["get", "put", "leave", "broken", "think"]
    assert seen[1] == ("3", False) and seen[2][1] is True and "there is no gold" in seen[2][0] and seen[3] is True
    assert trajectory.turns[0].results[0].content == "3"
    assert [r.error for r in trajectory.turns[0].results] == [None, "tool_error", "unexpected_argument"]


# -- refused before a run ------------------------------------------------------------------------------


@pytest.mark.parametrize(("agent", "said"), [
    ({}, "exactly one of agent.command, agent.python and agent.url, got none"),
    ({"command": ["sh"], "url": "http://a"}, "got agent.command and agent.url"),
    ({"command": ["no-such-agent"]}, "agent.command: 'no-such-agent' is neither a program on PATH"),
    ({"python": "tests.contrib.agents.parts"}, "not of the form 'module:function'"),
    ({"python": "tests.contrib.agents.parts:plain_agen"}, "has no function 'plain_agen'; it has: "),
    ({"python": "tests.contrib.agents.parts:play"}, "expected an async function"),
    ({"url": "ftp://a"}, "expected http://"),
    ({"url": "http://a", "env": {"A": "b"}}, "agent.env = {'A': 'b'} is read with agent.command alone"),
    ({"command": ["sh"], "pass_env": ["NOT_SET_HERE"]}, "agent.pass_env: NOT_SET_HERE is not set"),
    ({"command": ["sh"], "env": {"OPENAI_API_KEY": "x"}}, "OPENAI_API_KEY is set for each episode"),
], ids=str)  # fmt: skip
def test_an_agent_that_is_not_there_is_refused_by_name(agent: dict[str, Any], said: str) -> None:
    assert "NOT_SET_HERE" not in os.environ
    with pytest.raises(ConfigError) as refused:
        program_of(AgentConfig(**agent))
    assert said in str(refused.value)


def test_an_agent_reaches_the_run_on_the_host_that_it_is_told() -> None:
    seen: list[str] = []

    async def looks(episode: Episode) -> None:
        seen.extend([episode.openai_base_url, str(episode.mcp_url)])

    play(Script([]), FUNCTION.model_copy(update={"host": "127.0.0.2"}), program=looks)
    assert [url.split("/")[2].split(":")[0] for url in seen] == ["127.0.0.2", "127.0.0.2"]
    with pytest.raises(ResourceError, match=r"cannot listen on 192\.0\.2\.1"):
        play(Script([]), FUNCTION.model_copy(update={"host": "192.0.2.1"}))


ENV = {"PATH": os.environ["PATH"]}

# A child, a grandchild that left the process group and the session by a double fork, and one that ignores SIGTERM.
HIDES = """
import os, signal, subprocess, sys, time
def sleeper(kind):
    return subprocess.Popen([sys.executable, "-S", "-c",
        "import os, signal, sys, time\\n"
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" if kind == "deaf" else "")
        + ("if os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n" if kind == "detached" else "")
        + f"open(sys.argv[1] + '.{kind}', 'w').write(str(os.getpid()))\\ntime.sleep(600)", sys.argv[1]])
kinds = ["plain", "detached", "deaf"]
started = [sleeper(kind) for kind in kinds]
while not all(os.path.exists(f"{sys.argv[1]}.{kind}") and open(f"{sys.argv[1]}.{kind}").read() for kind in kinds):
    time.sleep(0.01)
print("ready", flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
"""


def pids(note: Path) -> list[int]:
    return [int(file.read_text()) for file in note.parent.glob(f"{note.name}.*")]


def end_surely(found: list[int]) -> None:
    """So that a red test leaves nothing behind either."""
    for pid in filter(runs, found):
        os.kill(pid, signal.SIGKILL)


def ended(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_a_command_that_is_not_there_ends_with_127_and_its_name() -> None:
    async def body() -> tuple[int, str]:
        process = await AgentProcess.start(["no-such-agent"], ENV)
        return await process.wait(), process.stderr.text()

    assert ended(body()) == (127, "no-such-agent: No such file or directory\n")


@pytest.mark.parametrize("how", ["it ends", "it is ended", "its starter is killed"])
def test_no_process_of_a_command_outlives_it(how: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = [sys.executable, "-S", "-c", HIDES, str(note), "leave" if how == "it ends" else "stay"]

    async def body() -> None:
        process = await AgentProcess.start(command, ENV)
        while "ready" not in process.stdout.text():
            await asyncio.sleep(0.01)
        if how == "it is ended":
            assert len([pid for pid in pids(note) if runs(pid)]) == 3
        assert len(pids(note)) == 3
        ending = asyncio.create_task(process.end() if how == "it is ended" else process.wait())
        # The keeper's own end, seen without its output, which stays open for as long as anybody who was left holds it.
        while process._process.returncode is None:
            await asyncio.sleep(0.01)
        assert not any(map(runs, pids(note)))
        await ending

    try:
        if how == "its starter is killed":
            starter = textwrap.dedent(f"""
                import asyncio
                from agentrl.contrib.agents.programs import AgentProcess
                async def body():
                    process = await AgentProcess.start({command!r}, {ENV!r})
                    while "ready" not in process.stdout.text():
                        await asyncio.sleep(0.01)
                    print("ready", flush=True)
                    await process.wait()
                asyncio.run(body())
            """)
            driver = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE)
            assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            assert until(lambda: not any(map(runs, pids(note))), 1.0)
        else:
            ended(body())
    finally:
        end_surely(pids(note))


def test_of_a_long_output_the_beginning_and_the_end_are_kept() -> None:
    output = Output(head=4, tail=6)
    for piece in (b"ab", b"cdef", b"ghijklmnop"):
        output.add(piece)
    assert output.text() == "abcd\n[6 bytes left out]\nklmnop"
    short = Output(head=4, tail=6)
    short.add(b"abcdefghij")
    assert short.text() == "abcdefghij"


def test_a_start_that_is_cancelled_leaves_nothing_whatever_had_begun(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    # Away from the pipes, for whose end asyncio waits: one that is left is to be found below, and not to hang this test.
    command = ["sh", "-c", f"sleep 600 >/dev/null 2>&1 & echo $! >> '{note}'; wait"]

    def begun() -> list[int]:
        return [int(line) for line in note.read_text().split()] if note.exists() else []

    async def body() -> None:
        for delay in (0.0, 0.002, 0.01, 0.02, 0.03, 0.05):
            start = asyncio.create_task(AgentProcess.start(command, ENV))
            # Blocking, so that the command gets on while nobody here notices that it has started.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(delay * 4)
            start.cancel()
            await asyncio.wait([start], timeout=10)
            assert start.cancelled()
        # A start that nobody waits for gets to its end, since asyncio cannot cancel one halfway while its command runs.
        if halfway := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(halfway, timeout=2)
        try:
            assert until(lambda: not any(map(runs, begun())), 1.0)
        finally:
            end_surely(begun())

    ended(body())
    assert begun()


KEY = "agentrl-" + "0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"


@pytest.mark.parametrize("fails", [False, True])
def test_the_key_that_an_agent_tells_is_in_none_of_its_words(fails: bool) -> None:
    """A program that prints it, a function that answers it or raises it."""
    code = "import os, sys; k = os.environ['OPENAI_API_KEY']; print('out', k); print('err', k, file=sys.stderr)"
    command = [sys.executable, "-S", "-c", f"{code}; sys.exit({int(fails)})"]
    record: dict[str, Any] = {}
    episode = Episode("e", [], [], "http://127.0.0.1/v1", "http://127.0.0.1", None, KEY)  # type: ignore[arg-type]
    by_command = asyncio.run(Command(AgentConfig(command=command)).run(episode, record))
    assert (record["stdout"], record["stderr"]) == ("out [key]\n", "err [key]\n")
    assert by_command.output == "out [key]" and by_command.failure == ("exit code 1: err [key]" if fails else None)

    async def tells(episode: Episode) -> str:
        await asks(episode)
        if fails:
            raise ValueError("x" * 1960 + episode.api_key)  # an error is cut inside it
        return f"it is {episode.api_key}"

    trajectory = one(says("There are 3."), program=tells, answer="output")
    kept = json.dumps(trajectory.to_json())
    assert "agentrl-" not in kept and "[key]" in kept
    assert trajectory.stop is (StopReason.AGENT_ERROR if fails else StopReason.DONE)


@pytest.mark.parametrize("shift", range(0, len(KEY) + 1, 3))
def test_an_output_that_is_cut_inside_the_key_shows_no_part_of_it(shift: int) -> None:
    output = Output(100, 100)
    output.add(b"a" * (100 - shift) + KEY.encode() + b"b" * 300 + KEY.encode() + b"c" * (100 - shift))
    head, gap, tail = (output.text(KEY)).split("\n")
    assert "bytes left out" in gap
    for n in range(len(KEY) - 8):
        assert KEY[n : n + 9] not in head + tail


def test_lone_surrogates_of_an_agent_are_replaced_wherever_they_are_kept() -> None:
    async def odd(episode: Episode) -> str:
        await asks(episode)
        assert await episode.call("put", {"key": "a\ud800", "value": "b"}) == "done"
        return "3 \udfff"

    async def raises(episode: Episode) -> str:
        await odd(episode)
        raise ValueError("no \ud800")

    for program, answered in ((odd, True), (raises, False)):
        trajectory = one(says("There are 3."), program=program, answer="output")
        kept = json.dumps(trajectory.to_json(), ensure_ascii=False)
        kept.encode()
        assert "a\ufffd" in kept and (("3 \ufffd" in kept) if answered else ("ValueError: no \ufffd" in kept))
