"""bfcl: the leaderboard's tasks and classes in its layout (`bfcl_toy`); see benchmarks/parity/bfcl.py."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.load import config_from
from agentrl.config.schema import ToolsConfig
from agentrl.data.trajectory import StopReason
from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.catalog import EnvRef, find_env, make_env
from agentrl.env.official import Played
from agentrl.env.spaces import run_sync
from agentrl.run.compare import official
from agentrl.utils.errors import ConfigError, EnvError
from agentrl.utils.search_path import load_module

TOY = Path(__file__).parent / "bfcl_toy" / "bfcl_eval"
ROOT = Path(__file__).parents[3]
CALLS = load_module(Path(str(find_env("bfcl").path)).with_name("calls.py"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))


def toy(category: Any, **params: Any) -> ToolEnv:
    return make_env("bfcl", category=category, source=str(TOY), split="all", **params)


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def turn(*calls: ToolCall) -> Message:
    return Message("assistant", "" if calls else "done", calls)


def play(env: ToolEnv, *turns: Message, seed: int = 0) -> float:
    """The reward of the episode that these turns make; if they do not end it, it is cut."""
    env.reset(seed=seed)
    reward = 0.0
    for message in turns:
        reward = env.step(message)[1]
    if env.is_open:
        reward = run_sync(env.aend(StopReason.MAX_TURNS))
    return reward


@pytest.mark.parametrize("category", ["single_turn", "multi_turn", "memory_kv"])
def test_gold_is_paid_and_an_idle_agent_is_not(category: str) -> None:
    """Gold with more calls in a round than there may be steps, and gold that calls a function before it arrives, among it."""
    env = toy(category)
    for seed in range(env.task_count("all") or 0):
        env.reset(seed=seed)
        gold = env.gold_turns(env.task)
        assert play(env, *gold, seed=seed) == 1.0, env.task.id
        idle = play(env, *[turn() for _ in env.task.data["question"]], seed=seed)
        assert idle == (1.0 if env.task.data["category"] == "irrelevance" else 0.0), env.task.id


def test_a_call_of_a_single_turn_is_compared_by_its_languages_types() -> None:
    env = toy(["simple_python", "simple_java"])
    assert play(env, turn(call("pay", sum=3, note="T-e.a"))) == 1.0
    assert play(env, turn(call("pay", sum="3"))) == 0.0
    assert play(env, turn(call("pay", sum=3), call("pay", sum=3))) == 0.0
    assert play(env, turn(call("Box.fill", sizes="new ArrayList<>(Arrays.asList(1L, 2L))")), seed=1) == 1.0
    assert play(env, turn(call("Box.fill", sizes=[1, 2])), seed=1) == 0.0
    shown = env.trajectory.tools[0]["function"]
    assert shown["description"] == "Fill. (hint)"
    assert shown["parameters"]["properties"] == {"sizes": {"type": "string"}}


def test_calls_that_cannot_be_read_are_no_calls() -> None:
    bad = ToolCall("pay", None, raw="{", error="not JSON")
    env = toy(["irrelevance", "live_relevance"])
    assert [play(env, turn(bad)), play(env, turn(call("pay")))] == [1.0, 0.0]
    assert [play(env, turn(bad), seed=1), play(env, turn(call("pay")), seed=1)] == [0.0, 1.0]
    assert play(env, turn(call("pay"), bad), seed=1) == 0.0


PUT, INK = call("put", place=1, label="tea"), call("put", place=2, label="ink")
LOOK = call("look", place=1)


def test_each_round_needs_its_calls_its_state_and_its_answers() -> None:
    env = toy("multi_turn_base")
    right = [turn(PUT), turn(), turn(LOOK), turn(), turn(INK), turn()]
    assert play(env, *right) == 1.0
    assert play(env, turn(PUT, LOOK), turn(), turn(LOOK), turn(), turn(INK), turn()) == 1.0  # more calls do no harm
    assert play(env, turn(PUT), turn(), turn(), turn(LOOK, INK), turn()) == 0.0  # a round without its calls
    assert play(env, turn(PUT), turn(), turn(LOOK, INK), turn(), turn(INK), turn()) == 0.0  # the state is ahead
    assert play(env, turn(PUT), turn(), turn(call("look", place=3)), turn(), turn(INK), turn()) == 0.0  # other answers
    assert play(env, *right[:-1]) == 0.0  # cut


def test_a_call_answers_as_python_does_and_its_errors_are_read_as_they_are() -> None:
    env = toy("multi_turn_base")
    play(env, turn(PUT, LOOK, call("look", spot=1), call("fly"), call("_load_scenario"), call("put", place=1.0, label=7)))
    assert [result.content for result in env.trajectory.turns[0].results] == [
        '{"boxes": 1}',
        "tea",
        "Error during execution: Shelf.look() got an unexpected keyword argument 'spot'",
        "Error during execution: name 'fly' is not defined",
        "Error during execution: name '_load_scenario' is not defined",
        '{"boxes": 1}',
    ]
    assert CALLS.answer_of(SimpleNamespace(look=lambda: {"n": {2}}), "look", {}) == "{'n': {2}}", (
        "what is no JSON, as Python shows it"
    )
    assert env.trajectory.state["apis"] == {"Shelf": {"boxes": {"1 (int)": {"label": 7, "inside": None}}, "room": 2}}


def test_a_function_that_arrives_later_is_offered_then_and_runs_before() -> None:
    env = toy("multi_turn_miss_func")
    env.reset(seed=0)
    assert env.toolbox.names == ("put", "clear")
    assert env.step(turn(PUT, LOOK))[0][1].content == "tea"
    env.step(turn())
    assert env.step(turn())[0] == [Message("user", "There are more functions now.")]
    assert env.toolbox.names == ("put", "clear", "look")
    env.step(turn(LOOK))
    assert env.step(turn())[1] == 1.0


def test_tools_of_a_set_are_offered_beside_those_of_a_conversation() -> None:
    params = {"category": "multi_turn_miss_func", "source": str(TOY), "split": "all"}
    env = EnvRef("bfcl", params, tools=ToolsConfig(sets=["notes"])).build(scorer=None)
    env.reset(seed=0)
    assert env.toolbox.names == ("put", "clear", "write_note", "read_notes")
    for _ in range(2):
        env.step(turn())
    assert env.toolbox.names == ("put", "clear", "write_note", "read_notes", "look")
    assert env.step(turn(call("write_note", title="a", text="b")))[0][0].content == "noted"
    other = toy("multi_turn_miss_func")
    other.reset(seed=0)
    assert other.toolbox.names == ("put", "clear"), "tables are shared by episodes, and were not changed"


def test_too_many_steps_in_a_round_end_the_episode() -> None:
    env = toy("multi_turn_base")
    assert play(env, turn(PUT), *[turn(LOOK)] * 3) == 0.0  # the leaderboard's limit is 3 here: the fourth ends it
    assert env.trajectory.stop is StopReason.DONE
    assert env.trajectory.state["left"] == 2
    assert play(env, turn(PUT), turn(), turn(LOOK), turn(), turn(INK), *[turn(LOOK)] * 3) == 1.0  # in the last round it is judged


def test_memories_are_left_by_sessions_and_found_by_questions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"params\.memory"):
        toy("memory_kv_prereq")
    question = toy("memory_kv", memory=str(tmp_path))
    with pytest.raises(EnvError, match="play category memory_kv_prereq first"):
        question.reset(seed=0)
    sessions = toy("memory_kv_prereq", memory=str(tmp_path))
    assert play(sessions, turn(call("add", key="name", value="Ann")), turn(), turn()) == 1.0
    assert play(sessions, turn(call("add", key="town", value="Rome")), turn(), seed=1) == 1.0
    opening, _ = question.reset(seed=0)
    assert opening[0].content == 'You are a clerk. You remember: {"name": "Ann", "town": "Rome"}\n\nAnswer shortly.'
    assert [play(question, Message("assistant", text)) for text in ("In ROME.", "In Romes", "")] == [1.0, 0.0, 0.0]


def test_what_cannot_be_played_is_refused_by_name() -> None:
    for category, words in (
        ("web_search_base", "searches the web"),
        ("agentic", "web_search_base"),
        ("simple_jva", "simple_java"),
    ):
        with pytest.raises(ConfigError, match=words):
            toy(category)
    with pytest.raises(ConfigError, match=r"has no bfcl_eval\..*memory_vector"):
        make_env("bfcl", source=str(TOY), category="memory_kv").package.module("memory_vector")
    with pytest.raises(ConfigError, match=r"utils\.py is missing"):
        make_env("bfcl", source=str(TOY.parent))


def test_families_keep_variants_of_a_conversation_together() -> None:
    env = toy(["multi_turn", "memory_kv", "simple_python"])
    assert [env.family(env.make_task(seed, "all")) for seed in range(6)] == [
        *["multi_turn Shelf"] * 4, "memory clerk", "simple_python"]  # fmt: skip


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another copy of the package can be read: a process reads one alone."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        monkeypatch.delitem(sys.modules, name)


def _many(folder: Path, offered: list[tuple[str, list[str], str]]) -> Path:
    """The toy package with other tasks of simple_python: id, functions, prompt."""
    shutil.copytree(TOY, folder / "bfcl_eval")
    rows, answers = [], []
    for name, functions, text in offered:
        docs = [{"name": one, "description": "", "parameters": {"type": "dict", "properties": {}}} for one in functions]
        rows.append({"id": name, "question": [[{"role": "user", "content": text}]], "function": docs})
        answers.append({"id": name, "ground_truth": [{functions[0]: {}}]})
    for place, lines in (("BFCL_v4_simple_python.json", rows), ("possible_answer/BFCL_v4_simple_python.json", answers)):
        (folder / "bfcl_eval" / "data" / place).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "bfcl_eval"


CHAIN = [f"c{n}" for n in range(60)]
LONG = "one two three four five six seven"


@pytest.mark.usefixtures("other_package")
def test_tasks_are_held_out_inside_a_category_and_share_no_function_and_no_prompt_with_training(tmp_path: Path) -> None:
    alone = [(f"alone_{n}", [f"f{n}"], f"word{n}") for n in range(60)]
    pairs = [(f"pair_{n}_{k}", [f"g{n}", f"h{n}_{k}"], f"pair{n} of {k}") for n in range(30) for k in range(2)]
    alike = [(f"alike_{n}_{k}", [f"a{n}_{k}"], f"{k} {LONG} eight{n} {k}") for n in range(20) for k in range(2)]
    chain = [(f"chain_{n}", CHAIN[n : n + 2], f"link{n}") for n in range(59)]  # over a quarter of all: it trains
    tasks = [*alone, *pairs, *alike, *chain]
    source = _many(tmp_path, tasks)

    def held(**params: Any) -> dict[str, bool]:
        env = make_env("bfcl", source=str(source), holdout="tasks", **params)
        made = [env.make_task(seed, split) for split in ("train", "heldout") for seed in range(env.task_count(split) or 0)]
        assert len({task.id for task in made}) == len(made)
        return {task.id: task.split == "heldout" for task in made}

    found = held(category=["simple_python", "multi_turn"])
    assert not any(found[name] for name, _, _ in chain)
    assert all(found[f"pair_{n}_0"] == found[f"pair_{n}_1"] for n in range(30))
    assert all(found[f"alike_{n}_0"] == found[f"alike_{n}_1"] for n in range(20))
    assert 20 <= sum(found[name] for name, _, _ in alone) <= 40 and any(found[f"pair_{n}_0"] for n in range(30))
    assert all(held_out for name, held_out in found.items() if name.startswith("multi_turn"))
    assert held(category="simple_python").items() <= found.items(), "whatever part of the benchmark is chosen"
    other = make_env("bfcl", source=str(source), category="simple_python", split="heldout")
    assert other.task_count("heldout") in (0, len(tasks)), "by families the category is on one side"


@pytest.mark.usefixtures("other_package")
def test_a_report_has_the_split(tmp_path: Path) -> None:
    source = _many(tmp_path, [(f"t{n}", [f"f{n}"], f"word{n}") for n in range(40)])
    params = {"source": str(source), "holdout": "tasks", "category": ["simple_python", "multi_turn"]}
    env = make_env("bfcl", **params)
    config = config_from({"name": "x", "env": {"id": "bfcl", "params": params}, "model": {"path": "none"}}, [])
    env.reset(seed=0, options={"split": "heldout"})
    env.step(turn())
    table = official([config], {"bfcl": [env.trajectory]}, "heldout")["bfcl"]
    (sizes,) = table["splits"]
    assert table["holdout"] == "tasks" and set(sizes) == {"train", "heldout"}
    assert (
        sizes["train"]["kinds"] == {"simple_python": sizes["train"]["tasks"]}
        and sizes["heldout"]["kinds"]["multi_turn_base"] == 2
    )
    ids = sorted(env.make_task(seed, "train").id for seed in range(sizes["train"]["tasks"]))
    assert sizes["train"]["sha256"] == hashlib.sha256("\n".join(ids).encode()).hexdigest()


def _rows(lost: int = 0, **shares: tuple[int, int]) -> dict[str, tuple[float | None, int]]:
    """The table of so many successes of so many episodes in each category; `lost`: unscored ones of simple_python."""
    shares = {"simple_python": (0, 0), **shares}
    successes = [(name, i < right) for name, (right, n) in shares.items() for i in range(n)]
    episodes = [
        Played(f"{name}_{i}", name, {"category": name, "style": ""}, 0, None, success, StopReason.DONE, 1, 1)
        for i, (name, success) in enumerate([*successes, *[("simple_python", None)] * lost])
    ]
    table = type(toy("simple_python")).official(episodes)
    if lost:  # an outage is named beside the value that it may have moved
        (note,) = (row.note for row in table if row.name == "overall")
        assert note == f"{lost} of {len(episodes)} episodes unscored, in no mean"
    return {row.name: (row.value, row.n) for row in table}


def test_the_table_has_the_leaderboards_means_and_weights() -> None:
    whole = _rows(
        lost=3, simple_python=(4, 4), simple_java=(1, 2), simple_javascript=(0, 1), multiple=(1, 2), parallel=(2, 2),
        parallel_multiple=(0, 2), irrelevance=(1, 2), live_irrelevance=(4, 4), live_simple=(3, 3), live_multiple=(0, 5),
        live_parallel=(1, 1), live_parallel_multiple=(1, 1), multi_turn_base=(1, 2), multi_turn_miss_func=(0, 2),
        multi_turn_miss_param=(0, 2), multi_turn_long_context=(1, 2), memory_kv=(1, 2), memory_vector=(0, 2),
        memory_rec_sum=(1, 4), web_search_base=(1, 1), web_search_no_snippet=(0, 1),
    )  # fmt: skip
    assert whole["simple"] == (pytest.approx(0.5), 7)
    assert whole["non-live"] == (pytest.approx((0.5 + 0.5 + 1 + 0) / 4), 13)
    live = (1.0 * 258 + 0.0 * 1053 + 1.0 * 16 + 1.0 * 24) / (258 + 1053 + 16 + 24)  # the benchmark's tasks, not those played
    assert whole["live"] == (pytest.approx(live), 10)
    assert whole["hallucination"] == (pytest.approx(0.75), 6)
    assert whole["multi-turn"] == (pytest.approx(0.25), 8)
    assert whole["agentic"] == (pytest.approx((0.5 + (0.5 + 0 + 0.25) / 3) / 2), 10)
    assert "overall (unplayed: 0)" not in whole
    assert whole["overall"][0] == pytest.approx(0.1 * 0.5 + 0.1 * live + 0.1 * 0.75 + 0.3 * 0.25 + 0.4 * 0.375)


def test_what_was_not_played_has_no_mean_and_no_overall_accuracy_and_counts_as_nothing_in_a_row_that_says_so() -> None:
    part = _rows(simple_python=(2, 2), live_simple=(1, 1))
    assert (part["simple"], part["non-live"], part["live"]) == ((None, 2), (None, 2), (None, 1))
    live = 258 / (258 + 1053 + 16 + 24)
    assert part["overall"] == (None, 3)
    assert part["overall (unplayed: 0)"] == (pytest.approx(0.1 * (1 / 3) / 4 + 0.1 * live), 3)


def test_calls_in_python_are_read_with_names_for_what_has_a_place() -> None:
    def move(self: Any, what: str, to: int = 0, *, by: float = 1.0) -> None: ...

    assert CALLS.read_call("move('a', by=[1, -2.5], to=True)", lambda name: move) == (
        "move",
        {"what": "a", "by": [1, -2.5], "to": True},
    )
    for text in ("move(", "move", "x.move(1)", "move(open('a'))"):
        with pytest.raises(ValueError, match=r"call|malformed"):
            CALLS.read_call(text, lambda name: move)


def test_states_are_compared_as_python_compares_them() -> None:
    assert CALLS.public_state({True: 1.0, 1.5: {2, 1}, "1": (False,)}) == {"1 (int)": 1.0, "1.5 (float)": [1, 2], "1": [0]}


def test_a_part_of_the_comparison_with_the_leaderboards_own_checkers() -> None:
    apart = ROOT / ".integrations" / "bfcl"  # python .ci/integrations.py bfcl
    source = os.environ.get("AGENTRL_BFCL_SOURCE") or (str(apart / "bfcl_eval") if apart.is_dir() else "")
    if not source and PathFinder.find_spec("bfcl_eval") is None:  # on the path, whatever the tests above imported
        pytest.skip("bfcl_eval is neither installed, nor in AGENTRL_BFCL_SOURCE, nor put apart by .ci/integrations.py bfcl")
    asked = ["--tasks", "1", *(("--source", source) if source else ())]
    paths = os.pathsep.join([str(ROOT), *([str(Path(source).parent)] if source else [])])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "parity" / "bfcl.py"), *asked],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    total = json.loads(done.stdout.splitlines()[-1])
    assert total["episodes"] > 200
    assert total["unexplained"] == 0
