"""Neighbours with their real packages, each in an interpreter that has it.

verifiers 0.3.1 needs mcp below 2 and openenv-core brings a web stack of its own, so neither belongs into one
environment with everything else. Name an interpreter that has the package and agentrl's core dependencies:
AGENTRL_VERIFIERS_PYTHON, AGENTRL_OPENENV_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import websockets.asyncio.server

from agentrl.contrib.remote_envs.openenv import OpenEnv, _calls
from agentrl.contrib.suites.verifiers import VerifiersEnv, _to_theirs, to_verifiers
from agentrl.contrib.toolkit.chat_forms import NO_PARAMETERS
from agentrl.data.images import Image
from agentrl.data.trajectory import Message, ToolCall
from agentrl.env import Tool, Toolbox
from agentrl.rollout.samplers import UniformSampler, pool_seeds
from agentrl.utils.errors import DependencyError, EnvError, TaskDataError

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def run(package: str, module: str) -> Any:
    variable = f"AGENTRL_{package.upper()}_PYTHON"
    python = os.environ.get(variable) or (sys.executable if find_spec(module) else "")
    if not python:
        pytest.skip(f"{package} is not installed here and {variable} names no interpreter that has it")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, str(HERE / f"{package}_script.py")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_verifiers_both_ways() -> None:
    report = run("verifiers", "verifiers")
    assert report["export"]["rewards"] == [1.0, 0.0]
    assert report["import"]["rewards"] == [1.0, 0.0]
    judged, forgot = (f"verifiers: its reward function {name} failed: " for name in ("judged", "forgot"))
    ends = report["import"]["ends"]
    assert ends["judged"] == judged + "RuntimeError: Judge model rate limit exceeded" and ends["forgot"].startswith(forgot)
    assert ends["thought"] == 1.0  # at a limit an episode is scored as far as it came


@pytest.mark.slow
def test_openenv_both_ways() -> None:
    report = run("openenv", "openenv")
    refused = "Server error: no argument 'txt'; did you mean 'text'? (code: VALIDATION_ERROR)"
    assert report["export"] == {"reward": 1.0, "done": True, "other": 0.0, "refused": refused}
    full = "Server error: Server at capacity: 1/1 sessions active (code: CAPACITY_REACHED)"
    assert report["token"] == {"reward": 1.0, "done": True, "refused": [True, True], "full": full, "gold": []}
    assert report["import"]["state"] == {"reward": 1.0, "steps": 2, "done": True}
    assert report["import"]["terminated"] and "ConnectionRefusedError" in report["import"]["unreachable"]
    assert [tool["function"]["name"] for tool in report["tools"]["tools"]] == ["add"]
    assert report["tools"]["answers"][0] == "5" and "wrong_type" in report["tools"]["answers"][1]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("verifiers") is None:
        for call in (lambda: VerifiersEnv(load="x"), lambda: to_verifiers(lambda: None, None)):  # type: ignore[arg-type,return-value]
            with pytest.raises(DependencyError, match=r"agentrl\[verifiers\]"):
                call()
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"agentrl\[openenv\]"):
        OpenEnv(url="http://x")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the package verifiers."""
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda name: object())
    monkeypatch.setattr("agentrl.contrib.suites.verifiers.no_client", object)


def their_env(rows: Any, held_out: Any = (), tools: Any = None, **more: Any) -> Any:
    rubric = SimpleNamespace(funcs=[], weights=[])
    return SimpleNamespace(get_dataset=lambda: rows, build_eval_dataset=lambda: held_out, tool_defs=tools, rubric=rubric, **more)


@pytest.mark.usefixtures("stand_in")
def test_without_an_eval_dataset_the_rows_of_a_verifiers_environment_are_divided() -> None:
    """Theirs takes the rows for training then, and so did the held-out tasks."""
    rows = [{"prompt": [{"role": "user", "content": str(n // 2)}], "answer": ""} for n in range(80)]  # each prompt twice
    env = VerifiersEnv(environment=their_env(rows, None))
    asked = {
        split: [env.prompt(env.make_task(seed, split))[0].content for seed in range(env.task_count(split) or 0)]
        for split in ("train", "heldout")
    }
    assert set(asked["train"]).isdisjoint(asked["heldout"]) and len(asked["train"]) + len(asked["heldout"]) == 80
    assert len(asked["heldout"]) >= 10 and env.make_task(0, "heldout").id == f"verifiers/heldout/{2 * int(asked['heldout'][0])}"
    with pytest.raises(TaskDataError, match="no tasks of split 'heldout'"):
        VerifiersEnv(environment=their_env(rows[:2], None)).make_task(0, "heldout")


@pytest.mark.usefixtures("stand_in")
async def test_a_row_of_a_verifiers_environment_may_have_tools_of_its_own() -> None:
    tools = [SimpleNamespace(name=name, description="", parameters=dict(NO_PARAMETERS)) for name in ("add", "double", "half")]

    async def begin(row: Any, **more: Any) -> Any:
        return {"tool_defs": tools[1:] if row["answer"] == "2" else tools[:1]}

    async def same(state: Any) -> None:
        return None

    rows = [{"prompt": [{"role": "user", "content": "double it"}], "answer": answer} for answer in ("2", "1")]
    env = VerifiersEnv(environment=their_env(rows, tools=tools[:1], init_state=begin, setup_state=same))
    for seed, names in ((0, ["double", "half"]), (1, ["add"]), (0, ["double", "half"])):
        await env.areset(seed=seed)
        assert [tool["function"]["name"] for tool in env.trajectory.tools] == names == list(env.toolbox.names)
    await env.aclose()


@pytest.mark.usefixtures("stand_in")
def test_the_rows_of_a_verifiers_environment_are_its_tasks_each_once_an_epoch() -> None:
    train, held_out = ([{"prompt": [{"role": "user", "content": f"{kind} {n}"}], "answer": str(n)} for n in range(size)]
                       for kind, size in (("train", 5), ("eval", 3)))  # fmt: skip
    env = VerifiersEnv(environment=their_env(train, held_out))
    assert (env.task_count("train"), env.task_count("heldout")) == (5, 3)
    for split, rows, kind in (("train", train, "train"), ("heldout", held_out, "eval")):
        tasks = [env.make_task(seed, split) for seed in range(2 * len(rows))]
        assert [task.id for task in tasks[: len(rows)]] == [f"verifiers/{split}/{n}" for n in range(len(rows))]
        assert [task.id for task in tasks[len(rows) :]] == [task.id for task in tasks[: len(rows)]]
        assert [env.prompt(task)[0].content for task in tasks[: len(rows)]] == [f"{kind} {n}" for n in range(len(rows))]
        assert [task.gold["answer"] for task in tasks[: len(rows)]] == [row["answer"] for row in rows]
    sampler = UniformSampler()
    sampler.use(pool_seeds(env, sampler.wants() or 0))
    epochs = [[sampler.choose(7, 5 * epoch + n).seed for n in range(5)] for epoch in range(3)]
    assert all(sorted(seeds) == [0, 1, 2, 3, 4] for seeds in epochs) and len({tuple(seeds) for seeds in epochs}) > 1


@pytest.mark.usefixtures("stand_in")
def test_images_of_a_verifiers_environment_are_shown_and_other_parts_refused() -> None:
    shown = Image.of(PIL.Image.new("RGB", (4, 3), "red"))
    part = {"type": "image_url", "text": None, "image_url": {"url": f"data:image/png;base64,{shown.data}"}}
    text = {"type": "text", "text": "which color?", "image_url": None}  # as a dataset gives it
    wrong = [
        {**part, "image_url": {"url": url}} for url in ("http://x/y.png", "data:image/png;base64,AAAA", "data:image/png;base64,?")
    ]
    wrong += [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {}, {"image_url": "http://x/z.png"}]
    rows = [{"prompt": [{"role": "user", "content": [text, one]}], "answer": "red"} for one in (part, *wrong)]
    env = VerifiersEnv(environment=their_env(rows))
    opening = env.prompt(env.make_task(0, "train"))
    assert opening == [Message("user", f"which color?\n{shown.line}", images=(shown,))]
    back = _to_theirs(opening[0])["content"]
    assert [one.get("text", one.get("image_url")) for one in back] == ["which color?\n", part["image_url"]]
    rows.append({"prompt": "which color?", "answer": "red"})
    with pytest.raises(TaskDataError, match="of train: its prompt is a text"):
        env.make_task(-1, "train")
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}  # OpenAI's layout
    rows.append({"prompt": [{"role": "assistant", "content": None, "tool_calls": [called]}], "answer": ""})
    assert env.prompt(env.make_task(-1, "train"))[0].tool_calls == (ToolCall("f", {"n": 1}, "a", '{"n": 1}'),)
    called["id"] = None  # theirs takes the name
    assert env.prompt(env.make_task(-1, "train"))[0].tool_calls == (ToolCall("f", {"n": 1}, "f", '{"n": 1}'),)
    for row, says in enumerate(
        ("'image_url' .http://x", "not taken: 3 bytes", "not taken: ", "'input_audio'", "None", "None .http://x/z"), 1
    ):
        with pytest.raises(TaskDataError, match=f"verifiers: row {row} of train: a message has .*{says}"):
            env.make_task(row, "train")


async def test_an_argument_of_an_openenv_tool_may_be_called_env() -> None:
    async def act(action: Any) -> str:
        return str(action["arguments"])

    deploy = replace(Tool.from_schema("deploy", "", {"type": "object"}, _calls("deploy")), method=True)
    box = Toolbox([deploy], owner=SimpleNamespace(act=act))
    assert (await box.call(ToolCall("deploy", {"env": "test"}))).content == "{'env': 'test'}"


async def test_an_openenv_server_that_ends_without_a_reward_gave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = []

    async def answer(env: OpenEnv, kind: str, data: Any) -> dict[str, Any]:
        return answers.pop(0)

    monkeypatch.setattr(OpenEnv, "_ask", answer)
    for rewards, done, sum_ in (([None, None], True, None), ([0.5, None], True, 0.5), ([0.0], True, 0.0), ([None], False, 0.0)):
        env = OpenEnv(url="http://x")
        answers += [{"reward": one, "done": done and number == len(rewards)} for number, one in enumerate(rewards, 1)]
        for _ in rewards:
            await env.act({})
        assert env.state() == {"reward": sum_, "steps": len(rewards), "done": done}


async def test_openenvs_protocol_from_both_of_our_sides() -> None:
    """Our client of their protocol on our server of it; each is tried with theirs above, where openenv-core is installed."""
    import asyncio

    from agentrl.env.catalog import EnvRef, find_reward
    from agentrl.reward import compile_spec, load_spec
    from agentrl.utils.errors import RemoteEnvError
    from tests.contrib.remote_envs.served import served

    here = EnvRef("key_value", {"calls": 2}).build()
    with served("key_value", calls=2) as server:
        place = f"{server.url}/openenv/{server.app.secret.player}"
        env = OpenEnv(url=place, name="theirs/KeyValue-v0", rules="Be brief.")
        observation, _ = await env.areset(seed=5)
        task = here.make_task(10, "train")  # the server's even seeds are for training
        assert [m.role for m in observation] == ["system", "user"] and task.data["goal"] in observation[1].content
        assert [tool["function"]["name"] for tool in env.trajectory.tools] == ["act"]
        for turn in here.gold_turns(task):
            calls = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
            act = Message("assistant", tool_calls=(ToolCall("act", {"text": turn.content, "tool_calls": calls}),))
            _, _, terminated, _, _ = await env.astep(act)
        score = compile_spec(load_spec(find_reward("openenv"))).score(env.trajectory)
        assert terminated and env.trajectory.state == {"reward": 1.0, "steps": 3, "done": True} and score.value == 1.0
        lost = OpenEnv(url=place)
        await lost.areset(seed=6)
        # What a player may ask for holds neither the state nor the gold of its task.
        assert (await lost._ask("state", {})).keys() == {"episode_id", "step_count", "env_id"}
        for wrong in ("/openenv/other", ""):
            with pytest.raises(RemoteEnvError, match=r"OpenEnv server .*: InvalidStatus: .*(403|404)"):
                await OpenEnv(url=server.url + wrong).areset(seed=0)
    await asyncio.sleep(0)
    with pytest.raises(RemoteEnvError, match="the connection ended"):
        await lost.astep(Message("assistant", tool_calls=(ToolCall("act", {"text": "x"}),)))
    assert lost.trajectory.stop.infrastructure and lost.trajectory.reward is None


@pytest.mark.parametrize("answer", [
    '{"type": "state", "data": {"step_count": 1}}', '{"type": "observation"}', '{"type": "observation", "data": {"reward": 0}}',
    '{"type": "observation", "data": {"observation": null, "done": true}}', "[1]", "null",
])  # fmt: skip
async def test_an_answer_that_is_no_observation_is_an_openenv_server_s_fault(answer: str) -> None:
    """It was read as a step without a reward, which is scored."""

    async def serve_one(socket: Any) -> None:
        async for message in socket:
            first = {"type": "observation", "data": {"observation": {"text": "go"}}}
            await socket.send(json.dumps(first) if json.loads(message)["type"] == "reset" else answer)

    def schema(connection: Any, request: Any) -> Any:
        return connection.respond(200, '{"action": {"type": "object"}}') if request.path == "/schema" else None

    async with websockets.asyncio.server.serve(serve_one, "127.0.0.1", 0, process_request=schema) as server:
        env = OpenEnv(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await env.areset(seed=0)
        assert env.socket.ping_timeout is None, "`timeout` alone says how long an answer may take; tunnels may drop pongs"
        with pytest.raises(EnvError, match=r"OpenEnv server http.*answers .* to step, expected an observation"):
            await env.astep(Message("assistant", tool_calls=(ToolCall("act", {}),)))
        assert env.trajectory.stop.infrastructure
        await env.aclose()


async def test_images_of_an_openenv_tool_are_shown_and_other_blocks_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Image.of(PIL.Image.new("RGB", (4, 3), "red"))
    text, image = {"type": "text", "text": "a plot:"}, {"type": "image", "data": shown.data}
    broken = {**image, "data": "AAAA"}

    async def answer(env: OpenEnv, kind: str, data: Any) -> dict[str, Any]:
        return {"observation": {"tool_name": "plot", "result": {"content": data["blocks"]}}}

    monkeypatch.setattr(OpenEnv, "_ask", answer)
    env = OpenEnv(url="http://x")
    assert await env.act({"blocks": [text, image]}) == ["a plot:", shown]
    assert await env.act({"blocks": [image]}) == [shown]
    assert await env.act({"blocks": [text, {"type": "audio", "data": "AAAA"}]}) == "a plot:\n[audio, not shown]"
    assert "not shown: 3 bytes that do not decode" in str(await env.act({"blocks": [broken]}))
