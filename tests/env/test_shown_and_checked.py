"""An environment whose tools check, answer and refuse as a benchmark does, and all that meets such tools."""

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cli.env import _tool_lines
from agentrl.contrib.remote_envs import wire
from agentrl.contrib.remote_envs.server import EnvOffer
from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, Tool, Toolbox, ToolCall, ToolEnv
from agentrl.env.address import EnvRequest
from agentrl.env.call_options import MAX_OUTPUT, Options, Problem
from agentrl.env.catalog import EnvRef
from agentrl.env.check import check_all
from agentrl.env.check_tools import Subject
from agentrl.env.wrappers import ToolFaults
from agentrl.reward import compile_spec

AMOUNT = {"type": "dict", "properties": {"amount": {"type": "float"}}, "required": ["amount"]}


def _pay(env: "Bank", /, amount: float) -> str:
    env.paid.append(amount)
    return "paid " * 400


class Bank(ToolEnv):
    """One tool with a schema that is no JSON Schema, called as Python would."""

    id = "tests/Bank-v0"
    max_output = 100

    def make_task(self, rng_seed: int, split: str) -> Task:
        owed = rng_seed % 7 + 1
        return Task(f"{split}/{rng_seed}", rng_seed, split, {"owed": owed}, {"state": {"paid": [owed]}})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", f"pay {task.data['owed']}")]

    async def setup(self, task: Task) -> None:
        self.paid: list[Any] = []
        made = Tool.from_schema("pay", "pay it", AMOUNT, _pay, Options(check="lenient", inline=True))
        self.toolbox.add(Tool(made.function, made.name, made.options, method=True, explicit=made.signature))

    def state(self) -> Json:
        return {"paid": list(self.paid)}

    def error_text(self, call: ToolCall, problem: Problem) -> str:
        return f"Error: {call.name} not found" if problem.kind == "unknown_tool" else f"Error: {problem.message}"

    def gold_turns(self, task: Task) -> list[Message]:
        return [pay(amount=task.data["owed"]), Message("assistant", "done")]


def pay(**arguments: Json) -> Message:
    return Message("assistant", tool_calls=(ToolCall("pay", arguments, id="c0"),))


SPEC = {"agentrl_reward": 1, "name": "bank", "root": {"use": "state.match", "args": {"expect": {"$": "/task/gold/state"}}}}


def answers(env: ToolEnv, *turns: Message) -> list[str]:
    env.reset(seed=3)
    said = [env.step(turn)[0][0].content for turn in turns]
    env.close()
    return said


def test_a_benchmarks_words_and_its_limit_which_wrappers_forks_and_snapshots_keep() -> None:
    alone = long, missing = answers(Bank(), pay(amount=5), pay())
    assert answers(Bank(), Message("assistant", tool_calls=(ToolCall("pai", {}),))) == ["Error: pai not found"]
    assert long.startswith("paid paid") and long.endswith("of 2000 characters]") and 360 < len(long) <= 400
    assert missing == "Error: _pay() missing 1 required positional argument: 'amount'"
    assert answers(ToolFaults(Bank(), rate=0.0), pay(amount=5), pay()) == alone
    faulty = answers(ToolFaults(Bank(), rate=1.0, message="down"), pay(amount=5))
    assert faulty == ["Error: down"]
    env = Bank()
    env.reset(seed=3)
    snapshot = env.snapshot()
    for copy in (env.fork(), Bank()):
        copy.reset(seed=9)
        copy.restore(snapshot)
        assert [copy.step(turn)[0][0].content for turn in (pay(amount=5), pay())] == alone
        copy.close()
    env.close()


def test_env_check_passes_an_environment_that_checks_leniently_and_words_errors_itself() -> None:
    wanted = ["contract", "gold scores most", "fuzzed calls", "instances apart", "fork", "hang", "crash", "teardown"]
    found = check_all(Subject(Bank, compile_spec(SPEC), tasks=4, fuzz=60), wanted)
    assert {item.check: item.evidence for item in found if item.ok is not True} == {}


def test_the_limit_of_a_config_goes_before_the_class_and_reaches_a_server_and_a_twin() -> None:
    ref = EnvRef("key_value", max_output=64)
    assert [made.build().toolbox.max_output for made in (ref, pickle.loads(pickle.dumps(ref)))] == [64, 64]
    assert EnvRef("key_value").build().toolbox.max_output == MAX_OUTPUT == 2048
    asked = EnvRequest.of(json.loads(wire.dumps(ref._request.row())))
    assert asked.max_output == 64
    assert EnvOffer(EnvRef("key_value")).build(asked).toolbox.max_output == 64
    assert EnvOffer(ref).build(EnvRequest("key_value")).toolbox.max_output == 64  # the server's own, if the client has none
    with pytest.raises(ValueError, match=r"max_output: Input should be a valid integer.*, got 'x'"):
        EnvRequest.of({"id": "key_value", "max_output": "x"})
    env = Scored()
    env.toolbox.max_output = 64
    twin: Any = env.scorer.replay_env(env.make_task(0, "train"))  # type: ignore[union-attr]
    assert twin.toolbox.max_output == 64


class Scored(Bank):
    reward = "exact_calls"


def test_a_remote_tool_has_the_options_of_the_servers() -> None:
    env = Bank()
    env.reset(seed=3)
    made = wire.tools_of(json.loads(wire.dumps(wire.toolbox_row(env.toolbox)["rows"])), "there")["pay"]
    env.close()
    assert (made.options.check, made.options.max_output) == ("lenient", None)
    assert made.schema["function"]["parameters"] == AMOUNT


def test_env_show_tells_how_a_tool_differs() -> None:
    class Box(list[Any]):
        max_output = MAX_OUTPUT

    options = Options(timeout=3), Options(check="lenient", error="Error: {message}", max_output=9)
    tools = Box(SimpleNamespace(schema={"function": {}}, options=one) for one in options)
    shown: Any = SimpleNamespace(toolbox=tools)
    assert _tool_lines(shown) == ["  {}", "  {}", "    check='lenient', error='Error: {message}', max_output=9"]


async def test_a_call_that_an_open_schema_allows_and_the_function_does_not_take_is_the_policys_mistake():
    """It was a fault of the environment: a wrong argument left the episode unscored."""
    open_schema = {"type": "object", "properties": {"n": {"type": ["integer", "null"]}, "x": {"type": "number"}}}
    box = Toolbox([Tool.from_schema("count", "", open_schema, lambda n, x=0.5: [len(range(n)), x])])
    assert (await box.call(ToolCall("count", {"n": 3.0, "x": 2.0}))).value == [3, 2.0]
    assert type((await box.call(ToolCall("count", {"n": 3, "x": 2.0}))).value[1]) is float
    for arguments, error in (({"n": 3, "z": 1}, "unexpected_argument"), ({}, "missing_argument"), ({"n": 3.5}, "wrong_type")):
        assert (await box.call(ToolCall("count", arguments))).error == error
