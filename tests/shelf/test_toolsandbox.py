"""ToolSandbox as a suite: on a stand-in of its code always, on its checkout if AGENTRL_TOOLSANDBOX_SOURCE names it (and
AGENTRL_TOOLSANDBOX_PYTHON an interpreter with its packages)."""

import asyncio
import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.env import subject_of
from agentrl.config.schema import ToolsConfig
from agentrl.data.trajectory import StopReason, ToolResult
from agentrl.env import Message, ToolCall
from agentrl.env.catalog import EnvRef, find_env
from agentrl.env.check import check_fork
from agentrl.env.official import Played
from agentrl.env.users import UserModel
from agentrl.utils.errors import ConfigError

SOURCE = os.environ.get("AGENTRL_TOOLSANDBOX_SOURCE")
PYTHON = os.environ.get("AGENTRL_TOOLSANDBOX_PYTHON")
HERE = Path(__file__).resolve().parent
SEEDS = {"lamp_on": 0, "lamp_on_3": 1, "twice": 2, "nothing": 3}


def call(*calls: tuple[str, dict[str, Any]]) -> Message:
    return Message("assistant", "", tuple(ToolCall(name, arguments) for name, arguments in calls))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(find_env("toolsandbox").load(), "script", HERE / "toolsandbox_standin.py")
    for name in ("common/evaluation.py", "scenarios/__init__.py", "tools/__init__.py"):
        (tmp_path / "tool_sandbox" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tool_sandbox" / name).touch()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.0.1"\n')
    return tmp_path


def built(source: Path, **params: Any) -> Any:
    return find_env("toolsandbox").load()(source=str(source), **params)


@pytest.fixture
def env(source: Path) -> Iterator[Any]:
    made = built(source)
    yield made
    made.close()
    made.inside.close()


def begun(env: Any, name: str) -> Any:
    env.reset(seed=SEEDS[name], options={"split": "all"})
    assert env.task.data["name"] == name
    return env


def results(env: Any) -> list[ToolResult]:
    return [result for turn in env.trajectory.turns for result in turn.results]


def test_scenarios_that_need_the_network_are_left_out_with_their_count(
    env: Any, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (env.task_count("all"), env.version) == (4, "0.0.1")
    assert "1 of 5 scenarios need RapidAPI and are left out" in caplog.text
    whole = built(source, network=True)
    assert whole.task_count("all") == 5 and whole.make_task(3, "all").id == "toolsandbox/weather"
    # Scenarios that only tools or their names differ in are one family, so none of it is held out alone.
    assert {env.make_task(seed, "all").data["family"] for seed in (0, 1)} == {"lamp_on"}
    with pytest.raises(ConfigError, match=r"parallel = 6; expected a number within 1..5"):
        built(source, parallel=6)
    (source / "tool_sandbox" / "tools" / "__init__.py").unlink()
    with pytest.raises(ConfigError, match=r"tool_sandbox/tools/__init__.py is missing"):
        type(env).check_source(source)


def test_an_interpreter_without_the_benchmarks_packages_is_refused_with_what_helps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import polars_of_no_package")
    monkeypatch.setattr(find_env("toolsandbox").load(), "script", broken)
    with pytest.raises(ConfigError, match=r"(?s)No module named 'polars_of_no_package'.*\.venv.*README"):
        built(source, processes=3).task_count("all")


def test_gold_ends_the_episode_with_full_similarity_and_silence_is_paid_where_it_is_right(env: Any) -> None:
    for name in SEEDS:
        turns = begun(env, name).gold_turns(env.task)
        ends = [env.step(turn)[1:3] for turn in turns]
        assert ends == [(0.0, False)] * (len(turns) - 1) + [(1.0, True)], name
        assert env.trajectory.success is True
    paid = {}
    for name in SEEDS:
        begun(env, name)
        while not env.step("")[2]:
            pass
        paid[name] = env.trajectory.reward
    assert paid == {"lamp_on": 0.0, "lamp_on_3": 0.0, "twice": 0.0, "nothing": 1.0}
    begun(env, "nothing").step(call(("lamp", {"on": True})))
    assert env.step("Done.")[1] == 0.0 and env.trajectory.state["verdict"]["minefield_similarity"] == 1.0


def test_wrong_arguments_reach_the_benchmarks_code_and_its_own_words_come_back(env: Any) -> None:
    begun(env, "lamp_on").step(call(("lamp", {"off": "yes"}), ("find", {"name": 5})))
    assert [(result.content, result.error) for result in results(env)] == [("ValueError: no", None), ("[5]", None)]
    env.step("The lamp is on, I think.")
    # Half: what is said is right, and the lamp is off. A milestone that was not reached at all is no success.
    assert (env.trajectory.reward, env.trajectory.success) == (0.5, False)


def test_a_call_that_the_benchmarks_runner_would_die_of_is_scored_0(env: Any) -> None:
    gold = begun(env, "lamp_on").gold_turns(env.task)
    env.step(call(("no_such_tool", {})))
    assert env.step(gold[0])[2] is True, "the next turn is the last one: theirs would not have come to it"
    assert (env.trajectory.reward, env.trajectory.success) == (0.0, False)
    assert env.trajectory.state["verdict"]["stopped"] == "unknown_tool 'no_such_tool'"
    begun(env, "lamp_on")
    env.step(Message("assistant", "", (ToolCall("lamp", None, error="no JSON"),)))
    assert env.step("The lamp is on.")[1:3] == (0.0, True)


def test_all_calls_of_a_turn_are_made_at_once_and_too_many_are_refused(source: Path) -> None:
    env = built(source, parallel=3)
    begun(env, "lamp_on").step(call(("find", {"name": "a"}), ("find", {"name": "b"}), ("find", {"name": "a"})))
    assert [result.content for result in results(env)] == ["['a']", "['b']", "['a']"]
    env.step(call(*[("find", {"name": str(number)}) for number in range(4)]))
    assert [result.error for result in results(env)][3:] == ["tool_error"] * 4
    assert "4 calls in one turn; at most 3" in results(env)[3].content
    assert env.step("The lamp is off.")[2] is True
    assert env.trajectory.state["verdict"]["turn_count"] == 4, "the refused ones never reached the benchmark"


def test_calls_of_a_set_in_the_same_turn_are_not_the_benchmarks(source: Path) -> None:
    env: Any = EnvRef("toolsandbox", {"source": str(source)}, tools=ToolsConfig(sets=["notes"])).build()
    note = ("write_note", {"title": "t", "text": "x"})
    begun(env, "lamp_on").step(call(("find", {"name": "a"}), note, ("find", {"name": "b"})))
    assert [result.content for result in results(env)] == ["['a']", "noted", "['b']"]
    env.step("The lamp is off.")
    assert env.trajectory.state["verdict"]["turn_count"] == 3, "the note never reached the benchmark"


def test_a_call_in_no_turn_is_made_by_itself_and_leaves_nothing_to_the_next(env: Any) -> None:
    begun(env, "lamp_on")

    async def alone(*names: str) -> list[str]:
        return [(await env.toolbox.call(ToolCall("find", {"name": name}, id="x"))).content for name in names]

    assert asyncio.run(alone("a", "a", "b")) == ["['a']", "['a']", "['b']"]
    env.step(call(("find", {"name": "a"})))
    assert asyncio.run(alone("a")) == ["['a']"]
    env.step("The lamp is off.")
    assert env.trajectory.state["verdict"]["turn_count"] == 6


def test_the_benchmarks_most_messages_end_the_episode_before_the_last_calls_are_made(env: Any) -> None:
    begun(env, "lamp_on")
    for _ in range(5):
        env.step(call(("find", {"name": "a"})))
    assert env.step(call(("lamp", {"on": True})))[1:3] == (0.0, True)
    assert results(env)[-1].content == "" and env.trajectory.state["verdict"]["databases"] == {"lamp": False}


def test_episodes_at_the_same_time_have_nothing_in_common(source: Path) -> None:
    """One process plays all of them, turn by turn in a mixed order; a fork and its parent go apart."""
    envs = [built(source, processes=1) for _ in range(8)]

    async def play(env: Any, number: int) -> tuple[float, str]:
        await env.areset(seed=SEEDS["lamp_on"], options={"split": "all"})
        await env.astep(call(("find", {"name": str(number)})))
        await env.astep(call(("lamp", {"on": number % 2 == 0})))
        _, reward, *_ = await env.astep("The lamp is on.")
        return float(reward), env.trajectory.turns[0].results[0].content

    async def together() -> list[tuple[float, str]]:
        return list(await asyncio.gather(*(play(env, number) for number, env in enumerate(envs))))

    # Half for what is said; the other half only if the lamp is on, which it is in every second episode.
    assert asyncio.run(together()) == [(1.0 if number % 2 == 0 else 0.5, f"['{number}']") for number in range(8)]
    env = begun(envs[0], "lamp_on")
    fork = env.fork()
    fork.step(call(("lamp", {"on": True})))
    assert copy.deepcopy(env.inside) is env.inside, "what copies an environment whole, as a wrapper does, copies no process"
    checked = check_fork(subject_of(EnvRef("toolsandbox", {"source": str(source)}), None, 1))
    assert checked == "1 episodes forked halfway and restored"
    assert [one.step("The lamp is on.")[1] for one in (env, fork)] == [0.5, 1.0]


def test_a_model_plays_the_user_by_the_benchmarks_instruction_and_leaves_by_its_tool(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    answers = [Message("user", "Go on, please."), Message("user", "", (ToolCall("end_conversation", {}),))]

    async def complete(user: Any, messages: Any) -> Message:
        shown.append((list(messages), [one["function"]["name"] for one in user.tools]))
        return answers.pop(0)

    monkeypatch.setattr("agentrl.contrib.users.ModelUser._complete", complete)
    assert list(built(source).user_models()) == []
    options = {"complete": lambda messages: None}
    env = built(source, user="a/model", user_options=options)
    assert list(env.user_models()) == [UserModel("a/model", options)], "asked once before a run"
    assert begun(env, "lamp_on").step("Which lamp?")[0] == [Message("user", "Go on, please.")]
    assert env.step("I see.")[2] is True
    assert shown[1] == (
        [
            {"role": "system", "content": "play the user"}, {"role": "user", "content": "Which lamp?"},
            {"role": "assistant", "content": "Go on, please."}, {"role": "user", "content": "I see."},
        ],
        ["end_conversation"],
    )  # fmt: skip


def test_the_official_table_is_the_mean_by_category_and_a_scrambled_scenario_counts_once() -> None:
    def played(categories: list[str], value: float | None) -> Played:
        return Played(str(len(categories)), "f", {"categories": categories}, 0, value, None, StopReason.DONE, 1, 1)

    three = ["SINGLE_TOOL_CALL", "THREE_DISTRACTION_TOOLS"]
    episodes = [played(three, 1.0), played([*three, "TOOL_NAME_SCRAMBLED"], 0.0), played(["CANONICALIZATION"], None)]
    rows = {row.name: (row.value, row.n) for row in find_env("toolsandbox").load().official(episodes)}  # type: ignore[attr-defined]
    assert rows == {
        "ALL_CATEGORIES": (0.5, 2), "CANONICALIZATION": (None, 0), "SINGLE_TOOL_CALL": (0.5, 2),
        "THREE_DISTRACTION_TOOLS": (1.0, 1), "TOOL_NAME_SCRAMBLED": (0.0, 1),
    }  # fmt: skip


@pytest.mark.skipif(SOURCE is None, reason="AGENTRL_TOOLSANDBOX_SOURCE does not name a checkout of ToolSandbox")
def test_the_real_benchmark_gives_the_same_verdicts_and_the_same_episode_twice() -> None:
    script = HERE.parent.parent / "benchmarks" / "parity" / "toolsandbox.py"
    python = [] if PYTHON is None else ["--python", PYTHON]
    command = [sys.executable, str(script), "--source", str(SOURCE), *python, "--most", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    env = built(Path(str(SOURCE)), python=PYTHON)
    names = [env.make_task(seed, "all").data["name"] for seed in range(env.task_count("all"))]
    assert len(names) == 808
    seed = names.index("add_contact_with_name_and_phone_number")
    texts = []
    for _ in range(2):
        env.reset(seed=seed, options={"split": "all"})
        for turn in env.gold_turns(env.task):
            env.step(turn)
        # Among them the new contact's id, which their code draws at random.
        texts.append([result.content for result in results(env)])
        assert env.trajectory.reward == pytest.approx(1.0)
    assert texts[0] == texts[1]

    async def play(seed: int) -> tuple[float, list[str]]:
        one = built(Path(str(SOURCE)), python=PYTHON, processes=1)
        await one.areset(seed=seed, options={"split": "all"})
        for turn in one.gold_turns(one.task):
            await one.astep(turn)
        return float(one.trajectory.reward), [message.content for message in one.trajectory.messages]

    async def together(seeds: range) -> list[tuple[float, list[str]]]:
        return list(await asyncio.gather(*(play(seed) for seed in seeds)))

    # Twelve at a time in one process, whose context is one global variable, against each alone.
    assert asyncio.run(together(range(0, 36, 3))) == [asyncio.run(play(seed)) for seed in range(0, 36, 3)]
