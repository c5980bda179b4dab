"""The python environment: problems, scoring, its files. Its sandbox is attacked in tests/contrib/sandboxes/test_jail.py."""

import io
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentrl.env import Message, ToolCall
from agentrl.env.catalog import find_env, make_env
from agentrl.env.spaces import run_sync
from agentrl.utils.search_path import load_module
from tests.shelf.conversation_probes import play

FOLDER = Path(str(find_env("python").path)).parent


def call(code: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("run", {"code": code}),))


# -- tasks and scoring -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_reference_solution_prints_the_answer_and_scores_one(level: int, split: str) -> None:
    env = make_env("python", level=level)
    seen = set()
    for seed in range(3):
        env.reset(seed=seed, options={"split": split})
        task, turns = env.task, env.gold_turns(env.task)
        assert play(env, list(turns)) == (1.0, True)
        assert env.trajectory.turns[0].results[0].content == str(task.gold["answer"])
        seen.add(task.data["family"])
    assert len(seen) > 1


def test_every_family_is_right_where_its_files_hold_the_data() -> None:
    """All nine families, checked against their own solution run in this process."""
    problems = load_module(FOLDER / "problems.py")
    families = {family.__name__ for group in problems.FAMILIES.values() for family in group}
    env = make_env("python")
    left = dict.fromkeys(families, 2)
    for seed in range(200):
        task = env.make_task(seed, "train")
        if left[task.data["family"]] > 0:
            left[task.data["family"]] -= 1
            with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(io.StringIO()) as out:
                for name, text in task.data["files"].items():
                    Path(name).write_text(text)
                exec(task.gold["solution"], {"__name__": "__main__"})
            assert out.getvalue().strip() == str(task.gold["answer"])
    assert not any(left.values())


def test_only_the_final_answer_counts_not_what_was_printed() -> None:
    env = make_env("python", level=1)
    env.reset(seed=1)
    gold, answer = env.task.gold["solution"], env.task.gold["answer"]
    assert play(env, [call(gold), ""]) == (0.0, True)
    env.reset(seed=1)
    assert play(env, [f"It is {answer}, no, {answer + 1}."]) == (0.0, True)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@example("\ud800")
@given(st.text(max_size=40) | st.sampled_from(["\0", "(" * 300, "1;" * 2000, "x: = 1", "ab\r\ncd"]))
def test_any_text_is_answered(code: str) -> None:
    env = make_env("python")
    env.reset(seed=0)
    result = run_sync(env.toolbox.call(ToolCall("run", {"code": code}, id="c")))
    assert result.error is None and result.content
    result.content.encode()


def test_files_stay_between_runs_and_forks_part_ways() -> None:
    env = make_env("python")
    env.reset(seed=0)
    env.step(call("open('a.txt', 'w').write('one')"))
    replay_env, saved = env.fork(), env.snapshot()
    replay_env.step(call("open('a.txt', 'w').write('three'); import os; os.mkdir('d'); open('d/b', 'w')"))
    assert env.step(call("print(open('a.txt').read())"))[0][0].content == "one"
    assert replay_env.step(call("print(open('a.txt').read())"))[0][0].content == "three"
    assert replay_env.state()["files"]["d/b"] == 0 and "d/b" not in env.state()["files"]
    env.step(call("import os; os.remove('a.txt')"))
    assert "a.txt" not in env.state()["files"]
    env.restore(saved)
    assert env.state()["files"]["a.txt"] == 3


def test_the_next_program_finds_what_was_kept_and_nothing_else() -> None:
    env = make_env("python")
    env.reset(seed=1)
    names = sorted([*env.task.data["files"], *(f"f{number:02}" for number in range(60))])
    made = "import os\nfor i in range(60): open(f'f{i:02}', 'w')\nos.mkdir('empty'); os.makedirs('a/b'); x = open('a/b/c', 'w')\n"
    said = env.step(call(made))[0][0].content
    assert said == f"[files not kept: {', '.join(names[32:52])}]"
    listed = env.step(call("import os; sorted(os.listdir('.'))"))[0][0].content
    assert listed == repr(names[:32]) and list(env.state()["files"]) == names[:32]
