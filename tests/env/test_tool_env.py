"""The episode: record, ends, faults, tear-down, and the Gymnasium face."""

import asyncio
import json
import math
from typing import Annotated, Any

import gymnasium
import numpy as np
import pytest

from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.env import Hidden, Message, Task, ToolCall, ToolEnv, tool
from agentrl.env.base import read_action
from agentrl.env.catalog import make_env
from agentrl.env.users import ScriptedUser
from agentrl.env.wrappers import TurnLimit
from agentrl.render.template import make_renderer
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import ConfigError, EnvError, HookError, TaskDataError, ToolError, ToolSchemaError, ToolTimeoutError
from agentrl.utils.threads import background
from tests.env.toyenvs import Constant, Notes, call
from tests.players import Script


def test_an_episode_and_its_record() -> None:
    env = Notes()
    observation, info = env.reset(seed=3)
    assert [m.role for m in observation] == ["user"] and info["task_id"] == "train/3"
    words = env.task.data["words"]
    for n, word in enumerate(words):
        observation, reward, terminated, truncated, _ = env.step(call("write", text=word))
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert observation == [Message("tool", str(n + 1), tool_call_id=f"call_{n}", name="write")]
    observation, _, terminated, truncated, info = env.step("done")
    assert (observation, terminated, truncated, info["stop"]) == ([], True, False, "done")
    record = env.trajectory
    assert record.stop is StopReason.DONE and record.state == {"notes": words}
    assert [m.role for m in record.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [turn.index for turn in record.turns] == [0, 1, 2]
    assert [c.id for _, c, r in record.calls() if r is not None] == ["call_0", "call_1"]
    assert [t["function"]["name"] for t in record.tools] == ["write", "hang", "quit"]
    assert Trajectory.from_json(json.loads(json.dumps(record.to_json()))) == record


class Begun(Notes):
    """Opens with a turn of two calls, whose results have neither names nor the calls' order."""

    def prompt(self, task: Task) -> list[Message]:
        calls = (ToolCall("write", {"text": "a"}, id="x"), ToolCall("wrote", {}, id="y"))
        results = [Message("tool", "second", tool_call_id="y"), Message("tool", "first", tool_call_id="x")]
        return [Message("user", "go"), Message("assistant", "", calls), *results]


def test_results_in_an_opening_have_the_names_of_their_calls() -> None:
    """A chat template that writes no ids showed the model one as another's."""
    env = Begun()
    observation, _ = env.reset(seed=0)
    shown = [Message("tool", "first", tool_call_id="x", name="write"), Message("tool", "second", tool_call_id="y", name="wrote")]
    assert observation[2:] == shown and env.trajectory.messages == observation


def test_text_actions_are_parsed_and_malformed_ones_are_answered() -> None:
    env = Notes()
    env.reset(seed=0)
    good = '<tool_call>\n{"name": "write", "arguments": {"text": "a"}}\n</tool_call>'
    assert env.step("thinking " + good)[0][0].content == "1"
    assert env.trajectory.turns[0].message.content == "thinking"
    bad = '<tool_call>\n{"name": "write", "arguments": {"text": \n</tool_call>'
    for action in (bad, Message("assistant", bad)):
        observation, _, terminated, _, _ = env.step(action)
        assert json.loads(observation[0].content)["error"] == "malformed_call" and not terminated
    assert sum(call.arguments is None for _, call, _ in env.trajectory.calls()) == 2
    assert len({c.id for _, c, _ in env.trajectory.calls()}) == 3


def test_parallel_calls_get_their_own_answers_in_order() -> None:
    env = Notes()
    env.reset(seed=0)
    calls = (ToolCall("write", {"text": "a"}, id="x"), ToolCall("write", {"text": "no"}, id="x"), ToolCall("wrote", {}))
    observation = env.step(Message("assistant", tool_calls=calls))[0]
    assert [m.tool_call_id for m in observation] == ["x", "call_1", "call_2"]
    assert [r.error for r in env.trajectory.turns[0].results] == [None, "tool_error", "unknown_tool"]


def test_a_tool_may_end_the_episode() -> None:
    env = Notes()
    env.reset(seed=0)
    observation, _, terminated, _, info = env.step(call("quit"))
    assert terminated and observation[0].content == "bye" and info["stop"] == "done"
    with pytest.raises(EnvError, match="reset"):
        env.step("again")


@pytest.mark.parametrize(
    ("action", "error", "stop"),
    [(call("write", text="boom"), EnvError, StopReason.ENV_ERROR), (call("hang"), ToolTimeoutError, StopReason.TOOL_TIMEOUT)],
)
def test_a_fault_is_a_typed_outcome_and_tears_down(action: Message, error: type, stop: StopReason) -> None:
    scorer = Constant(0.0)
    env = Notes(scorer=scorer)
    env.reset(seed=0)
    with pytest.raises(error):
        env.step(action)
    record = env.trajectory
    assert (record.stop, record.stop.infrastructure, record.reward, record.state, scorer.seen) == (stop, True, None, None, [])
    assert env.log == ["setup", "teardown"]


async def test_cancelling_a_turn_tears_down() -> None:
    env = Notes()
    await env.areset(seed=0)
    env.toolbox.replace(env.toolbox["hang"].with_options(timeout=30))
    task = asyncio.create_task(env.astep(call("hang")))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.trajectory.stop is StopReason.CANCELLED and env.log == ["setup", "teardown"]


async def test_teardown_also_after_a_failed_setup_and_only_once() -> None:
    class Failing(Notes):
        async def setup(self, task: Task) -> None:
            self.log.append("setup")
            raise RuntimeError("no database")

    env = Failing()
    with pytest.raises(RuntimeError, match="no database"):
        await env.areset(seed=0)
    await env.aclose()
    assert env.log == ["setup", "teardown"] and env.trajectory.stop is StopReason.ENV_ERROR
    steady = Notes()
    await steady.areset(seed=0)
    await steady.areset(seed=1)
    await asyncio.gather(steady.aclose(), steady.aclose())
    await steady.aclose()
    assert steady.log == ["setup", "teardown"] * 2


async def test_the_state_is_taken_before_teardown() -> None:
    class Closing(Notes):
        async def teardown(self) -> None:
            self.notes = ["gone"]

    env = Closing()
    await env.areset(seed=0)
    await env.astep(call("write", text="kept"))
    await env.aend(StopReason.MAX_TURNS)
    record = env.trajectory
    assert record.state == {"notes": ["kept"]} and record.truncated and not record.terminated


def test_rewards_of_the_gymnasium_face() -> None:
    for value, expected in ((0.75, 0.75), (None, math.nan)):
        scorer = Constant(value)
        env = Notes(scorer=scorer)
        env.reset(seed=0)
        assert env.step(call("write", text="a"))[1] == 0.0
        reward = env.step("done")[1]
        assert reward == expected or (math.isnan(reward) and math.isnan(expected))
        assert env.trajectory.reward == value and scorer.seen == [env.trajectory]


def test_misuse_is_refused() -> None:
    env = Notes()
    with pytest.raises(EnvError, match="reset"):
        env.step("x")
    with pytest.raises(ValueError, match="splitt"):
        env.reset(options={"splitt": "train"})
    env.reset(seed=0)
    with pytest.raises(TypeError, match="role assistant"):
        env.step(Message("user", "x"))
    with pytest.raises(TypeError):
        env.step(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="render_mode"):
        Notes(render_mode="human")


async def test_step_inside_a_running_loop_runs_beside_it_and_inside_of_agentrls_own_says_what_to_do() -> None:
    assert Notes().reset(seed=0)[1] == Notes().reset(seed=0)[1]  # as in a notebook's cell

    async def in_the_background() -> None:
        Notes().reset(seed=0)  # it would wait for itself

    with pytest.raises(RuntimeError, match="astep"):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(in_the_background(), background().loop))


def test_reset_without_seed_draws_the_next_task_reproducibly() -> None:
    one, two = Notes(), Notes()
    first = [one.reset(seed=5)[1]["task_id"], *(one.reset()[1]["task_id"] for _ in range(3))]
    second = [two.reset(seed=5)[1]["task_id"], *(two.reset()[1]["task_id"] for _ in range(3))]
    assert first == second and len(set(first)) == 4


def test_an_episode_that_is_closed_midway_is_cancelled_and_one_that_ended_is_not() -> None:
    env = Notes()
    for turn, stop, over in ((call("write", text="a"), StopReason.CANCELLED, False), (call("quit"), StopReason.DONE, True)):
        env.reset(seed=0)
        env.step(turn)
        env.close()
        made = env.trajectory
        assert (made.stop, made.terminated, made.truncated, made.state) == (stop, over, False, {"notes": []} if over else None)


def test_what_a_text_only_thinks_of_is_neither_called_nor_said() -> None:
    """The decoded text of a model that reasons: a call in its thoughts was made, and they were its answer."""
    made = '<tool_call>{"name": "write", "arguments": {"text": "a"}}</tool_call>'
    for text, thought, said, names in (
        (f"<think>{made}?</think>\n\nIt is 7.", f"{made}?", "It is 7.", []),
        (f"<think>so</think>\n{made}", "so", "", ["write"]),
        ("7", None, "7", []),
    ):
        message, count = read_action(text, 0)
        assert (message.reasoning, message.content, [call.name for call in message.tool_calls]) == (thought, said, names)
        assert count == len(names)


@pytest.mark.parametrize("given", [("call_1", "call_1"), ("call_2", "", "call_2"), ("", "call_0"), ("a", "a", "call_1")])
def test_each_call_of_a_turn_has_an_id_of_its_own(given: tuple[str, ...]) -> None:
    """Results are found by id: two calls of one id had the second one's result both."""
    calls = tuple(ToolCall("write", {"text": str(n)}, id=one) for n, one in enumerate(given))
    made = read_action(Message("assistant", "", calls), 0)[0].tool_calls
    assert len({call.id for call in made}) == len(given) and "" not in {call.id for call in made}
    assert all(call.id == one for n, (call, one) in enumerate(zip(made, given, strict=True)) if one and one not in given[:n])


@pytest.mark.filterwarnings("ignore:.*passive.*")
def test_an_episode_cut_from_outside_is_not_judged_one_cut_from_inside_is() -> None:
    """Gymnasium's TimeLimit only sets `truncated`: the reward is the step's own, as for every environment."""
    task = make_env("key_value", calls=2)
    task.reset(seed=3)
    turns = task.gold_turns(task.task)[:1]
    outside = gymnasium.make("agentrl.env.gym:KeyValue-v0", calls=2, max_episode_steps=1)
    outside.reset(seed=3)
    assert outside.step(turns[0])[1:4] == (0.0, False, True)
    core = outside.unwrapped
    assert isinstance(core, ToolEnv) and core.is_open and core.trajectory.reward is None
    outside.close()
    assert not core.is_open
    inside = TurnLimit(make_env("key_value", calls=2), turns=1)
    inside.reset(seed=3)
    assert inside.step(turns[0])[1:4] == (0.0, False, True)
    assert inside.trajectory.reward == 0.0 and inside.trajectory.stop is StopReason.MAX_TURNS


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vector_environments(kind: str) -> None:
    """The settings that docs/environments.md names: messages are objects, so no shared memory."""
    makers = [lambda: make_env("key_value", scorer=None, calls=2)] * 3
    sync, vectors = kind == "sync", gymnasium.vector
    vector: Any = vectors.SyncVectorEnv(makers, copy=False) if sync else vectors.AsyncVectorEnv(makers, shared_memory=False)
    try:
        observations, _ = vector.reset(seed=[1, 2, 3])
        assert list(observations) == [makers[0]().reset(seed=seed)[0] for seed in (1, 2, 3)]
        observations, rewards, terminated, _, _ = vector.step(("<tool_call>{}</tool_call>", "5", "6"))
        assert list(terminated) == [False, True, True] and np.all(rewards == 0)
        assert "malformed_call" in observations[0][0].content
    finally:
        vector.close()


def test_action_samples_are_valid_calls() -> None:
    env = Notes()
    env.action_space.seed(0)
    for _ in range(20):
        action = env.action_space.sample()
        assert env.action_space.contains(action)
        env.reset(seed=0)
        if "hang" not in action and "boom" not in action:
            env.step(action)
            assert [r.error for r in env.trajectory.turns[0].results] == [None]
    assert env.action_space.contains("<tool_call> anything") and not env.action_space.contains(3)
    assert not env.action_space.contains(Message("user", "x"))


def test_hidden_arguments_come_from_the_task() -> None:
    class Private(Notes):
        def hidden(self, task: Task) -> dict[str, Any]:
            return {"owner": task.data["words"][0]}

        @tool
        async def mine(self, text: str, owner: Annotated[str, Hidden()]) -> str:
            return f"{owner}: {text}"

    env = Private()
    for seed in (1, 2):
        env.reset(seed=seed)
        shown = next(t for t in env.trajectory.tools if t["function"]["name"] == "mine")
        assert list(shown["function"]["parameters"]["properties"]) == ["text"]
        observation = env.step(call("mine", text="x"))[0]
        assert observation[0].content == f"{env.task.data['words'][0]}: x"
        assert "unexpected_argument" in env.step(call("mine", text="x", owner="eve"))[0][0].content


async def later(self: Any, *args: Any) -> Any:
    return []


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(("hook", "answer", "said"), [
    ("gold_turns", "hi", "returned 'hi', expected a list (each a Message)"),
    ("gold_turns", ["hi"], "returned ['hi'], expected a list (each a Message)"),
    ("gold_turns", None, "returned None, expected a list (each a Message)"),
    ("gold_turns", later, "returned a coroutine, expected a list (each a Message)"),
    ("hidden", None, "returned None, expected a dict"),
    ("horizon", "3", "returned '3', expected a whole number or None"), ("family", 3, "returned 3, expected a text"),
    ("user_models", None, "returned None, expected a list (each a UserModel)"),
    ("gold_user", "bob", "returned 'bob', expected a User or None"),
    ("state", {"seen": {1}}, "is no JSON value: a set has no order ({1})"),
    ("state", object(), "is no JSON value: a object has no JSON form"),
    ("state", CIRCLE, "is no JSON value: it contains itself, or is nested too deep"),
])  # fmt: skip
def test_a_hook_that_answers_with_another_type_is_named(hook: str, answer: Any, said: str) -> None:
    """Whoever asks it: a horizon of None was taken from wrong gold turns, and a set failed when the episode was stored."""
    odd: Any = type("Odd", (Notes,), {hook: answer if answer is later else lambda self, *args: answer})()
    with pytest.raises(HookError) as error:
        getattr(odd, hook)(*([] if hook in ("state", "user_models") else [odd.make_task(0, "train")]))
    assert f"{hook} {said}. Correct it at {__file__}:" in str(error.value)
    with pytest.raises(EnvError, match=hook):
        if hook in ("family", "user_models", "gold_user"):  # no episode asks them
            raise error.value
        odd.reset(seed=0)
        odd.step("done")


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, BaseException, ToolError])
def test_a_state_that_raises_is_the_environments_fault_wherever_it_is_read(kind: Any) -> None:
    """It is read with the record: a policy's first prompt ended the whole run."""

    def broken(self: Any) -> Any:
        raise kind("the disk is gone")

    odd: Any = type("Odd", (Notes,), {"state": broken})()
    odd.reset(seed=0)
    with pytest.raises(HookError, match=f"state raised {kind.__name__}: the disk is gone \\({__file__}:"):
        _ = odd.trajectory


def test_a_reply_of_the_user_that_is_no_list_of_messages_is_named() -> None:
    async def wordy(self: Any, message: Message) -> Any:
        return "hi"

    for reply, said in ((lambda *_: [], "is not async"), (wordy, r"returned 'hi', expected a list \(each a Message\)")):
        odd: Any = type("Odd", (Notes,), {"user_reply": reply})()
        odd.reset(seed=0)
        with pytest.raises(EnvError, match=f"user_reply {said}"):
            odd.step("done")


@pytest.mark.parametrize(
    "answer, fits",
    [(1, False), (([], 0.0, True, False), False), (("no", 0.0, True, False, {}), False), (([], None, True, False, {}), False),
     (([], np.float32(0), np.True_, np.False_, {}), True), ([[], 0, True, False, {}], True)],
)  # fmt: skip
async def test_a_step_of_an_authors_own_that_answers_something_else_is_an_env_error(answer: Any, fits: bool) -> None:
    """It ended the run with a ValueError of the loop over turns."""

    class Odd(Notes):
        id = "tests/Odd-v0"

        async def astep(self, action: Any) -> Any:
            return answer

    renderer = make_renderer(packaged_tokenizer(4096))
    policy = Policy(Script([renderer.assistant(Message("assistant", "hi"))]), renderer)
    made = await run_episode(Odd(), policy, EpisodeSpec(3, "train", 0, 0, "r"), Limits(4, 64, 2000, 60, 60, 4096), None)
    assert made.stop is (StopReason.DONE if fits else StopReason.ENV_ERROR)
    assert fits or f"tests/Odd-v0: astep returned {answer!r}, expected (a list (each a Message), a number" in (made.error or "")


class Blocking:
    """A user that is no coroutine function."""

    def reply(self, conversation: Any) -> str:
        return f"again {len(conversation)}"


def test_a_user_may_answer_without_awaiting_and_one_text_is_no_list_of_lines() -> None:
    odd = Notes()
    odd.reset(seed=0)
    odd.user = Blocking()  # type: ignore[assignment]
    assert odd.step("hello")[0] == [Message("user", "again 2")]
    with pytest.raises(ConfigError, match=r"ScriptedUser: lines = 'hello' is one text\. Write \['hello'\]"):
        ScriptedUser("hello")  # it said one letter after the other


@pytest.mark.parametrize("name", ["reset", "step"])
def test_an_override_that_no_run_would_call_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Odd\.{name}: a run calls a{name} alone.*`async def a{name}` \(.*test_tool_env"):
        type("Odd", (Notes,), {name: lambda self, *args: None, "__module__": __name__})


@pytest.mark.parametrize(
    ("name", "value"), [("state", {}), ("task", "t"), ("horizon", 5), ("prompt", "You are"), ("user", "Bob")]
)
def test_an_attribute_in_place_of_one_of_the_contract_is_named(name: str, value: Any) -> None:
    """It was "'dict' object is not callable", with no line of the environment."""

    class Odd(Notes):
        async def setup(self, task: Task) -> None:
            setattr(self, name, value)

    line = Odd.setup.__code__.co_firstlineno + 1
    with pytest.raises(HookError, match=rf"Odd: self\.{name} = .*Choose another name for it \(.*test_tool_env\.py:{line}\)"):
        Odd().reset(seed=0)


def test_an_authors_own_names_are_not_the_contracts() -> None:
    """The last messages replaced `_last`, a list of calls ended the step, and `_ended` the episode."""

    class Odd(Notes):
        async def setup(self, task: Task) -> None:
            self._last, self._calls, self._ended, self._open = "none", [""], True, False

        @tool
        def look(self) -> str:
            """look"""
            self._calls.append(self._last)
            self._last = "look"
            return ",".join(self._calls)

    odd = Odd()
    odd.reset(seed=0)
    assert [odd.step(call("look"))[0][0].content for _ in range(2)] == [",none", ",none,look"]


def test_numbers_of_numpy_in_a_task_or_a_state_are_those_of_json() -> None:
    """No answer equals them, so that a right one was paid 0, and the episode could not be stored."""
    odd: Any = type("Odd", (Notes,), {"state": lambda self: {1: np.int64(3), "all": (np.float32(0.5), np.arange(2))}})()
    odd.reset(seed=0)
    assert odd.state() == {"1": 3, "all": [0.5, [0, 1]]} and type(odd.state()["1"]) is int
    numbered: Any = (7, np.int64(3))
    task = Task(*numbered)
    assert (task.id, task.seed) == ("7", 3) and type(task.seed) is int
    with pytest.raises(TypeError, match="seed = '3'; expected a text and a whole number"):
        Task("t", "3")  # type: ignore[arg-type]
    task = Task("t", 0, "train", {"a": np.bool_(True)}, {"answer": np.int64(4)})
    assert (task.data, task.gold) == ({"a": True}, {"answer": 4}) and type(task.gold["answer"]) is int
    assert Task("t", 0, "train", {"a": map(int, "12")}).data == {"a": [1, 2]}
    same = {"a": [1, {"b": None}]}
    assert Task("t", 0, "train", same).data is same  # of JSON already
    # Equal to themselves, and null once stored.
    assert Task("t", 0, "train", {"a": math.inf, "b": 10**5000}).data == {"a": "Infinity", "b": "an integer of about 5000 digits"}
    assert Task("t", 0, "train", {"\ud800": 1}).data == {"\ud800": 1}  # as a policy may write a key
    with pytest.raises(TypeError, match=r"task 't': gold = .*a set has no order"):
        Task("t", 0, "train", {}, {"answer": {1, 2}})


@pytest.mark.parametrize(("split", "near"), [("heldot", "did you mean 'heldout'"), ("x", "its `splits` are train, heldout")])
def test_a_split_that_the_class_does_not_declare_is_refused(split: str, near: str) -> None:
    """An environment that ignores its split played other tasks than those that were asked for."""
    careless: Any = type("Careless", (Notes,), {"make_task": lambda self, seed, split: Task(f"{seed}", seed, split)})()
    for ask in (lambda: careless.make_task(0, split), lambda: careless.reset(seed=0, options={"split": split})):
        with pytest.raises(TaskDataError, match=f"no split '{split}'; {near}"):
            ask()
    assert careless.make_task(0, "heldout").split == "heldout"


def test_a_task_of_another_split_than_the_asked_one_is_refused() -> None:
    """It was played, and a training task counted in the held-out score."""
    odd: Any = type("Odd", (Notes,), {"make_task": lambda self, seed, split: Task(f"{seed}", seed)})()
    assert odd.make_task(0, "train").split == "train"
    wrong = r"asked for split 'heldout', returned a task of split 'train'\. Pass the split on, .*test_tool_env\.py:"
    for ask in (lambda: odd.make_task(0, split="heldout"), lambda: odd.reset(seed=0, options={"split": "heldout"})):
        with pytest.raises(HookError, match=wrong):
            ask()


def test_an_override_of_a_tool_that_is_none_is_refused() -> None:
    """The environment had no such tool, without a word."""
    silent = type("Silent", (Notes,), {"write": None})
    assert "write" not in silent(scorer=None).toolbox
    odd = type("Odd", (Notes,), {"write": lambda self, text: 1})
    with pytest.raises(ToolSchemaError, match=r"Odd\.write: it overrides a tool, and is not marked as one\. Put @tool above it"):
        odd()


def test_hooks_of_a_mixin_are_checked_too() -> None:
    """The mixin is no environment, so nothing looked at its hooks."""

    class Mixin:
        def make_task(self, seed: int, split: str) -> Task:
            return Task(f"{seed}", seed, split)

        def gold_turns(self, task: Task) -> Any:
            return 3

    odd: Any = type("Odd", (Mixin, Notes), {})()
    with pytest.raises(HookError, match=r"gold_turns returned 3, expected a list .*test_tool_env\.py:"):
        odd.gold_turns(odd.make_task(0, "train"))
    with pytest.raises(TaskDataError, match="no split 'tset'"):
        odd.make_task(0, "tset")
