"""The tau2 suite, on a small benchmark in its layout; and, if AGENTRL_TAU2_SOURCE names a checkout, against tau2's verdicts."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import JudgeConfig, ToolsConfig
from agentrl.contrib.judges.client import Judge
from agentrl.contrib.judges.leaf import Verdict, VerdictRequest
from agentrl.contrib.suites.benchmarks import import_in_place
from agentrl.contrib.toolkit.branches import changed_texts
from agentrl.data.trajectory import StopReason, Task
from agentrl.env import Message, ToolCall
from agentrl.env.catalog import EnvRef, find_env, find_spec
from agentrl.env.official import Played
from agentrl.env.users import ScriptedUser, UserModel
from agentrl.reward import Context, compile_spec
from agentrl.utils.errors import ConfigError, DependencyError, TaskDataError
from agentrl.utils.search_path import load_module
from tests.conftest import proof
from tests.contrib.suites.tau2_source import TASKS, write_source

ROOT = Path(__file__).resolve().parents[3]
FAR = "[far_plug]out[PERSONA:None]"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The small benchmark; afterwards no other module of tests finds its `tau2` imported."""
    yield write_source(tmp_path_factory.mktemp("tau2-bench"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tau2"]:
        del sys.modules[name]


class Says(Judge):
    def __init__(self, score: float) -> None:
        super().__init__(JudgeConfig())
        self.score, self.asked = score, list[str]()

    def ask(self, key: str, request: VerdictRequest) -> Verdict:
        self.asked.append(request.messages[1]["content"])
        return Verdict({"score": self.score, "reason": ""})


def build(source: Path, **params: Any) -> Any:
    return EnvRef("tau2", {"source": str(source), "domain": "retail", "full": True, **params}).build(scorer=None)


def task_of(env: Any, name: str) -> Task:
    rows = [env.make_task(seed, "all") for seed in range(env.task_count("all"))]
    return next(task for task in rows if task.id == f"retail/{name}")


def play(env: Any, name: str, turns: list[Message], user: ScriptedUser | None = None, judge: Judge | None = None) -> float | None:
    """The episode's value by the suite's spec."""
    task = task_of(env, name)
    env.reset(options={"task": task, **({"user": user} if user else {})})
    for turn in turns:
        if env.step(turn)[2]:
            break
    else:
        asyncio.run(env.aend(StopReason.MAX_TURNS))
    ref = EnvRef("tau2", {"source": str(env.source), "domain": "retail", "full": True})
    context = Context(replay_env=lambda _: ref.build(scorer=None), services={"judge": judge or Says(1.0)})
    return compile_spec(find_spec(ref, "tau2"), context=context).score(env.trajectory).value


def call(name: str, /, **arguments: Any) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


def say(text: str) -> Message:
    return Message("assistant", text)


# -- tasks -----------------------------------------------------------------------------------------


def test_splits_are_the_benchmarks_own_and_what_is_in_no_base_set_is_apart(source: Path) -> None:
    env = build(source, full=False)
    ids = {split: [env.make_task(n, split).id for n in range(env.task_count(split))] for split in ("train", "heldout")}
    assert ids == {"train": ["retail/switch", f"retail/{FAR}", "retail/transfer"], "heldout": ["retail/nothing", "retail/polite"]}
    full = build(source)
    assert [full.make_task(0, "rest").id, full.task_count("rest"), full.task_count("all")] == ["retail/history", 2, 7]
    with pytest.raises(TaskDataError, match="no tasks of split 'rest'"):
        env.make_task(0, "rest")
    whole = build(source, domain="all", full=False)
    assert whole.task_count("all") == 4 * 5
    assert {whole.family(whole.make_task(n, "all")) for n in range(20)} >= {"mock", "retail", "telecom/far_plug"}


def test_tools_of_a_set_are_offered_beside_the_domains(source: Path) -> None:
    alone, env = (
        build(source),
        EnvRef("tau2", {"source": str(source), "domain": "retail"}, tools=ToolsConfig(sets=["notes"])).build(),
    )
    for one in (env, alone):
        one.reset(options={"task": task_of(one, "switch")})
    assert env.toolbox.names == (*alone.toolbox.names, "write_note", "read_notes") and len(alone.toolbox.names) > 1


def test_a_task_is_the_same_whenever_it_is_read(source: Path) -> None:
    """Messages of a history get the time at which they are read, unless the task says one."""
    read = [task_of(build(source, max_steps=200 + number), "history").data for number in range(2)]
    assert read[0] == read[1] and "timestamp" not in str(read[0])


def test_the_package_is_not_run_and_what_is_missing_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pyproject\.toml is missing.*\nTo get it: git clone"):
        build(tmp_path)
    other = write_source(tmp_path / "other")
    with pytest.raises(ConfigError, match="this process has imported it from"):
        build(other).task_count("all")
    (source / "data/tau2/domains/airline/tasks.json").rename(source / "gone")
    with pytest.raises(ConfigError, match=r"airline/tasks\.json is missing"):
        build(source, domain="airline").task_count("all")
    (source / "gone").rename(source / "data/tau2/domains/airline/tasks.json")
    with pytest.raises(ConfigError, match="domain = 'retial'; did you mean 'retail'"):
        build(source, domain="retial")


def test_what_does_not_load_says_why(tmp_path: Path) -> None:
    pack = tmp_path / "toypack_of_tests"
    pack.mkdir()
    (pack / "newer.py").write_text("x = 'a' if else\n")
    (pack / "needs.py").write_text("import no_such_package_here\n")
    name = "toypack_of_tests"
    with pytest.raises(ConfigError, match=r"newer does not load on Python 3\.\d+"):
        import_in_place(f"{name}.newer", pack, extra="toy")
    with pytest.raises(DependencyError, match=r"needs no_such_package_here: pip install 'agentrl\[toy\]'"):
        import_in_place(f"{name}.needs", pack, extra="toy")
    with pytest.raises(DependencyError, match=r"needs no_such_package_here: pip install no_such_package_here$"):
        import_in_place(f"{name}.needs", pack)
    with pytest.raises(ConfigError, match=f"has no {name}.absent"):
        import_in_place(f"{name}.absent", pack, extra="toy")
    with pytest.raises(ConfigError, match="assigns no text to TEXT"):
        load_module(ROOT / "envs/tau2/domains.py").text_constant(pack / "needs.py", "TEXT")
    del sys.modules[name]


# -- the conversation ------------------------------------------------------------------------------


def test_the_opening_has_their_texts_and_the_customer_speaks_first(source: Path) -> None:
    env = build(source)
    opening, _ = env.reset(options={"task": task_of(env, "switch")})
    assert [(m.role, m.content) for m in opening] == [
        ("system", "<how>Be useful.</how>\n<policy>Rules of retail.</policy>"),
        ("assistant", "House of Lamps."),
        ("user", "Your desk lamp is to be on."),
    ]
    opening, _ = env.reset(options={"task": task_of(env, "history")})
    assert [m.role for m in opening] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert (opening[2].tool_calls[0].name, opening[2].tool_calls[0].id, opening[3].tool_call_id) == ("find_lamp", "h1", "h1")
    assert opening[-1].content == "Go on about the desk lamp."
    assert env.world.tools.db.lamps["hall"].on


def test_a_model_as_customer_gets_their_guidelines_its_tools_and_their_stop_words(source: Path) -> None:
    heard: list[Any] = []
    answers = [Message("user", "It is dark."), Message("user", "", (ToolCall("look", {}),)), Message("user", "ok ###TRANSFER###")]

    async def complete(messages: Any) -> Message:
        heard.append(messages)
        return answers.pop(0)

    env = build(source, user="some/model", user_args={"complete": complete})
    env.reset(options={"task": task_of(env, FAR)})
    assert heard[0][0] == {"role": "system", "content": "Play a customer with tools.|Your lamp is dark."}
    assert [tool["function"]["name"] for tool in env.user.tools] == ["look", "plug"]
    over = env.step(say("Is it plugged in?"))[2]
    assert over and env.trajectory.state["ended"] == "user_stop" and env.trajectory.user_calls[0].result.content == "out"
    assert env.trajectory.parting == "ok"


def test_the_customers_model_is_named_so_that_it_is_asked_before_a_run(source: Path) -> None:
    options = {"api_base": "http://127.0.0.1:9/v1"}
    assert list(build(source, user="some/model", user_args=options).user_models()) == [UserModel("some/model", options)]
    assert list(build(source).user_models()) == []


def test_tools_are_shown_as_published_and_answer_in_their_own_words(source: Path) -> None:
    env = build(source)
    env.reset(options={"task": task_of(env, "switch")})
    shown = {tool["function"]["name"]: tool["function"] for tool in env.trajectory.tools}
    assert list(shown) == ["find_lamp", "switch", "transfer_to_human_agents"]
    assert not any(tool.options.parallel for tool in env.toolbox), "the outcome of a turn's calls is their order's"
    assert shown["find_lamp"]["parameters"]["properties"] == {"name": {"type": "string", "title": "Name"}}
    asked = [
        ("find_lamp", {"name": "desk"}, '{"room": "study", "on": false, "watts": 5.0}'),
        ("find_lamp", {"name": "dask"}, "Error: Lamp dask not found"),
        ("find_lamp", {"nam": "desk"}, "Error: Agents.find_lamp() got an unexpected keyword argument 'nam'"),
        ("find_lamp", {}, "Error: Agents.find_lamp() missing 1 required positional argument: 'name'"),
        ("switch", {"name": "desk", "on": "yes"}, '{"room": "study", "on": "yes", "watts": 5.0}'),
        ("plug", {"put_in": True}, "Error: Tool 'plug' not found."),
    ]
    for name, arguments, text in asked:
        assert env.step(call(name, **arguments))[0][0].content == text


def test_episodes_do_not_see_each_others_databases(source: Path) -> None:
    one, two = build(source), build(source)
    for env in (one, two):
        env.reset(options={"task": task_of(env, "switch")})
    one.step(call("switch", name="desk", on=True))
    assert two.step(call("find_lamp", name="desk"))[0][0].content == '{"room": "study", "on": false, "watts": 5.0}'
    fork = one.fork()
    fork.step(call("switch", name="bed", on=True))
    assert list(one.state()["changes"]["agent"]) == ["/lamps/desk/on"]
    assert set(fork.state()["changes"]["agent"]) == {"/lamps/bed/on", "/lamps/desk/on"}
    one.reset(options={"task": task_of(one, "switch")})
    assert one.step(call("find_lamp", name="desk"))[0][0].content.count("false") == 1


# -- scoring ---------------------------------------------------------------------------------------

ON = call("switch", name="desk", on=True)
TOLD = say("It is in The Study; 1,200 hours are left.")
CASES = [
    ("switch", [ON, TOLD], 1.0, "what the gold reads in vain need not be read"),
    (
        "switch",
        [ON, Message("assistant", "the study, 1200", (ToolCall("find_lamp", {"name": "bed"}),)), say("Bye")],
        1.0,
        "said beside",
    ),
    ("switch", [ON, say("It is in the study.")], 0.0, "one thing not said"),
    ("switch", [TOLD], 0.0, "not switched"),
    ("switch", [ON, call("switch", name="hall", on=True), TOLD], 0.0, "one more"),
    ("switch", [ON, call("switch", name="hall", on=True), call("switch", name="hall", on=False), TOLD], 1.0, "taken back"),
    ("switch", [call("switch", name="desk", on="yes"), TOLD], 0.0, "a value of another type"),
    ("switch", [ON], 0.0, "cut before the customer leaves"),
    ("switch", [ON, TOLD, TOLD], 1.0, "nothing after the end"),
    ("nothing", [say("No.")], 1.0, "doing nothing is right"),
    ("nothing", [call("transfer_to_human_agents", summary="x"), say("Bye")], 1.0, "nothing changed"),
    ("nothing", [ON, say("No.")], 0.0, "something was done"),
    (
        "transfer",
        [call("transfer_to_human_agents", summary="other"), call("find_lamp", name="desk"), say("-")],
        1.0,
        "one for two",
    ),
    ("transfer", [call("transfer_to_human_agents"), call("find_lamp"), say("-")], 1.0, "fewer arguments than the gold's"),
    ("transfer", [call("transfer_to_human_agents", summary="x"), call("find_lamp", name="bed"), say("-")], 0.0, "another lamp"),
    ("transfer", [call("find_lamp", name="desk"), say("-")], 0.0, "no transfer"),
    ("history", [ON, say("Done.")], 1.0, "begun before"),
    ("refused", [ON, say("Done.")], 1.0, "a gold call that its tool refuses decides nothing"),
    ("refused", [call("switch", name="dask", on=True), ON, say("Done.")], 1.0, "nor does making it"),
    ("refused", [call("switch", name="dask", on=True), say("Done.")], 0.0, "what it does not refuse does"),
    ("history", [call("switch", name="hall", on=False), ON, say("Done.")], 0.0, "what was done before is undone"),
]


@pytest.mark.parametrize(("name", "turns", "value", "why"), CASES, ids=[f"{case[0]}: {case[3]}" for case in CASES])
def test_verdicts_by_hand(source: Path, name: str, turns: list[Message], value: float, why: str) -> None:
    assert play(build(source), name, turns) == value


def test_the_customers_own_calls_decide_assertions(source: Path) -> None:
    plug, lines = ToolCall("plug", {"put_in": True}), "Your lamp is dark."
    env = build(source)
    assert play(env, FAR, [ON, say("Plug it in."), say("Bye")], ScriptedUser([lines, plug, "Done."])) == 1.0
    assert env.trajectory.state["unmet"] == []
    assert play(env, FAR, [ON, say("Plug it in."), say("Bye")], ScriptedUser([lines, "No."])) == 0.0
    assert [one["func_name"] for one in env.trajectory.state["unmet"]] == ["assert_plugged"]
    assert play(env, FAR, [say("Plug it in."), say("Bye")], ScriptedUser([lines, plug, "Done."])) == 0.0
    # Gold as a script: the agent asks by the tools' names, and only then the customer acts.
    task = task_of(env, FAR)
    assert [turn.content for turn in env.gold_turns(task)] == ["", "Please use plug", "That is all."]
    assert play(env, FAR, env.gold_turns(task)) == 1.0
    assert play(env, FAR, [ON, say("Please do something."), say("Bye")]) == 0.0


def test_a_judge_is_asked_where_the_task_says_so_and_decides(source: Path) -> None:
    env = build(source)
    yes, no = Says(1.0), Says(0.5)
    assert play(env, "polite", [say("You are welcome.")], judge=yes) == 1.0
    assert play(env, "polite", [say("You are welcome.")], judge=no) == 0.0
    assert '["The agent is kind"]' in yes.asked[0] and "You are welcome." in yes.asked[0]
    assert play(env, "nothing", [say("No.")], judge=no) == 1.0 and len(no.asked) == 1


def test_their_limits_end_an_episode_with_nothing(source: Path) -> None:
    env = build(source, max_errors=3)
    assert play(env, "nothing", [call("find_lamp", name="x"), call("none"), say("No.")]) == 1.0
    assert play(env, "nothing", [call("find_lamp", name="x"), call("none"), call("find_lamp", nam="x"), say("No.")]) == 0.0
    assert env.trajectory.state["ended"] == "too_many_errors" and len(env.trajectory.turns) == 3
    look = call("find_lamp", name="desk")
    # The customer's words 1, a call and its answer 2, the agent's words and the customer's leave 2.
    assert play(build(source, max_steps=6), "nothing", [look, say("No.")]) == 1.0
    env = build(source, max_steps=5)
    assert play(env, "nothing", [look, say("No.")]) == 0.0 and env.trajectory.state["ended"] == "max_steps"
    assert play(env, "nothing", [say(" ")]) == 0.0 and env.trajectory.state["ended"] == "agent_error"


def test_an_assertion_that_is_none_does_not_hold(source: Path) -> None:
    env, seen = build(source), task_of(build(source), FAR)
    broken = [{"env_type": "user", "func_name": "assert_plugged"}, *seen.gold["assertions"]]
    env.reset(options={"task": Task(seen.id, 0, "all", seen.data, {**seen.gold, "assertions": broken})})
    assert len(env.state()["unmet"]) == 3


def test_the_official_table_is_pass_hat_k_by_domain_and_the_mean_of_domains(source: Path) -> None:
    def played(domain: str, task: str, sample: int, success: bool | None) -> Played:
        return Played(f"{domain}/{task}", domain, {"domain": domain}, sample, None, success, StopReason.DONE, 1, 1)

    episodes = [played("retail", "a", n, n < 2) for n in range(3)] + [played("retail", "b", n, True) for n in range(3)]
    episodes += [played("mock", "a", 0, False), played("mock", "b", 0, None)]
    env = build(source)
    rows = {row.name: (row.value, row.n) for row in type(env).official(episodes)}
    assert rows["retail pass^1"] == (pytest.approx((2 / 3 + 1) / 2), 2)
    assert rows["retail pass^2"] == (pytest.approx((1 / 3 + 1) / 2), 2) and rows["retail pass^3"][0] == pytest.approx(0.5)
    assert rows["mock pass^1"] == (0.0, 1)
    assert rows["mean of domains pass^1"][0] == pytest.approx((2 / 3 + 1) / 4)


def test_a_record_of_changes_is_equal_where_their_hashes_are(source: Path) -> None:
    domains = load_module(Path(str(find_env("tau2").path)).with_name("domains.py"))
    here = domains.domain(source, "retail")
    one, two = here.begin(None).tools.db, here.begin(None).tools.db
    was = here.pristine.tools.db
    assert changed_texts(was, one) == changed_texts(was, two) == {}
    one.lamps["desk"].watts, two.lamps["desk"].watts = 6, 6.0  # two texts of one number: tau2's hash tells them apart
    assert changed_texts(was, one) != changed_texts(was, two)
    one.lamps["desk"].watts = 6.0
    assert changed_texts(was, one) == changed_texts(was, two)
    del one.lamps["hall"]
    assert changed_texts(was, one)["/lamps/hall"] == "deleted" and "/lamps/hall" not in changed_texts(was, two)
    assert was.lamps["desk"].watts == 5.0 and len(TASKS) == 7


@proof
def test_verdicts_are_tau2s_own() -> None:
    """Some tasks of each domain against tau2's own evaluator; `benchmarks/parity/tau2.py` has them all."""
    where, python = os.environ.get("AGENTRL_TAU2_SOURCE"), os.environ.get("AGENTRL_TAU2_PYTHON", sys.executable)
    if not where:
        pytest.skip("AGENTRL_TAU2_SOURCE does not name a checkout of tau2-bench (and AGENTRL_TAU2_PYTHON a Python for it)")
    command = [sys.executable, "benchmarks/parity/tau2.py", "--source", where, "--python", python, "--tasks", "4"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
