"""What is kept of an agent's words: never its key, and nothing that UTF-8 cannot hold; and how much of them is read."""

import asyncio
import json
import sys
from typing import Any

import pytest

from agentrl.config.schema import AgentConfig
from agentrl.contrib.agents import programs
from agentrl.contrib.agents.programs import Command, Episode, Output, Remote
from agentrl.contrib.agents.record import Brief
from agentrl.data.trajectory import StopReason
from tests.contrib.agents.parts import FUNCTION, Script, play, says
from tests.contrib.agents.test_episode import asks

KEY = "agentrl-" + "0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"


def brief() -> Brief:
    return Brief("e", [], [], "http://127.0.0.1/v1", "http://127.0.0.1", KEY)


@pytest.mark.parametrize("fails", [False, True])
def test_the_key_that_an_agent_tells_is_in_none_of_its_words(fails: bool) -> None:
    """A program that prints it, a function that answers it or raises it."""
    code = "import os, sys; k = os.environ['OPENAI_API_KEY']; print('out', k); print('err', k, file=sys.stderr)"
    command = [sys.executable, "-S", "-c", f"{code}; sys.exit({int(fails)})"]
    record: dict[str, Any] = {}
    by_command = asyncio.run(Command(AgentConfig(command=command)).run(brief(), None, record))  # type: ignore[arg-type]
    assert (record["stdout"], record["stderr"]) == ("out [key]\n", "err [key]\n")
    assert by_command.output == "out [key]" and by_command.failure == ("exit code 1: err [key]" if fails else None)

    async def tells(episode: Episode) -> str:
        await asks(episode)
        if fails:
            raise ValueError("x" * 1960 + episode.api_key)  # an error is cut inside it
        return f"it is {episode.api_key}"

    agent = AgentConfig(python=FUNCTION.python, answer="output")
    (trajectory,) = play(Script([says("There are 3.")]), agent, program=tells)
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
        agent = AgentConfig(python=FUNCTION.python, answer="output")
        (trajectory,) = play(Script([says("There are 3.")]), agent, program=program)
        kept = json.dumps(trajectory.to_json(), ensure_ascii=False)
        kept.encode()
        assert "a\ufffd" in kept and (("3 \ufffd" in kept) if answered else ("ValueError: no \ufffd" in kept))


@pytest.mark.parametrize(("size", "read"), [(2000, True), (2001, False)])
async def test_no_more_of_a_url_s_answer_is_read_than_its_limit(size: int, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_ANSWER", 2000)
    body = json.dumps({"answer": "x" * (size - 14)}).encode()
    assert len(body) == size

    async def serve(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    agent = Remote(url)
    outcome = await agent.run(brief(), None, {})  # type: ignore[arg-type]
    await agent.close()
    server.close()
    assert outcome.failure == (None if read else f"{url}: the answer has more than 2000 bytes")
    assert (outcome.output is not None) is read
