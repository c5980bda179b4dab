"""AppWorld as a suite: on a stand-in of its package always, on the package itself if AGENTRL_APPWORLD_PYTHON names its Python."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.contrib.suites.suite import SuiteEnv
from agentrl.data.trajectory import StopReason
from agentrl.env import Message, ToolCall
from agentrl.env.catalog import find_env
from agentrl.env.official import Played
from agentrl.utils.errors import ConfigError, EnvError

PYTHON = os.environ.get("AGENTRL_APPWORLD_PYTHON")
SOURCE = os.environ.get("AGENTRL_APPWORLD_SOURCE")
HERE = Path(__file__).resolve().parent
PERSON = {"first_name": "Ada", "last_name": "Moss", "email": "ada@example.com", "phone_number": "5550100100"}
TASKS = {
    "0aaaaaa_1": ("Note figs.", 1, {"figs are noted": "notes == ['figs']", "no answer": "answer is None"}, "figs"),
    "0aaaaaa_2": ("Note plums.", 1, {"plums are noted": "notes == ['plums']", "no answer": "answer is None"}, "plums"),
    "0bbbbbb_1": ("Note pears.", 3, {"pears are noted": "notes == ['pears']"}, "pears"),
}


def execute(code: str) -> Message:
    return Message("assistant", "", (ToolCall("execute", {"code": code}),))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root in AppWorld's layout, and its package replaced by the stand-in."""
    monkeypatch.setenv("PYTHONPATH", str(HERE / "appworld_standin"))
    data = tmp_path / "data"
    for folder in ("datasets", "base_dbs"):
        (data / folder).mkdir(parents=True)
    sets = {"train": "0aaaaaa_1\n0aaaaaa_2:tag\n", "dev": "0bbbbbb_1", "test_normal": "", "test_challenge": ""}
    for name, text in sets.items():
        (data / "datasets" / f"{name}.txt").write_text(text)
    for name, (instruction, difficulty, tests, word) in TASKS.items():
        truth = data / "tasks" / name / "ground_truth"
        truth.mkdir(parents=True)
        about = {"instruction": instruction, "supervisor": PERSON, "datetime": "2023-05-18T12:00:00", "db_version": "0.1.0"}
        (truth.parent / "specs.json").write_text(json.dumps(about))
        (truth / "metadata.json").write_text(json.dumps({"difficulty": difficulty}))
        (truth / "evaluation.py").write_text(json.dumps(tests))
        code = (
            f"def solution(apis, requester):\n    apis.notes.add({word!r})\n    apis.supervisor.complete_task()\nrequester = None"
        )
        (truth / "compiled_solution.py").write_text(code)
    return tmp_path


def built(root: Path, **params: Any) -> Any:
    return find_env("appworld").load()(source=str(root), **params)


@pytest.fixture
def env(root: Path) -> Iterator[Any]:
    made = built(root, processes=2)
    yield made
    made.close()


def test_tasks_splits_and_families_are_those_of_the_data(env: SuiteEnv, root: Path) -> None:
    assert {split: env.task_count(split) for split in env.splits} == {
        "train": 2, "heldout": 1, "test_normal": 0, "test_challenge": 0,
    }  # fmt: skip
    task = env.make_task(1, "train")
    assert (task.id, env.family(task)) == ("appworld/0aaaaaa_2", "0aaaaaa")
    assert (task.data["difficulty"], task.data["dataset"]) == (1, "train")
    system, user = env.prompt(task)
    assert "Ada Moss (ada@example.com, 5550100100)" in system.content and "2023-05-18" in system.content
    assert user.content == "Note plums." and env.version == "AppWorld data 0.1.0"
    (root / "data" / "datasets" / "train.txt").unlink()
    with pytest.raises(ConfigError, match=r"data/datasets/train.txt is missing\nTo get it: .*appworld download data"):
        type(env).locate.__func__(type("Fresh", (type(env),), {}), str(root))  # type: ignore[attr-defined]


def test_gold_is_paid_nothing_else_is_and_the_share_of_passed_tests_is_told(env: Any) -> None:
    for split, seed in (("train", 0), ("train", 1), ("heldout", 0)):
        env.reset(seed=seed, options={"split": split})
        (turn,) = env.gold_turns(env.task)
        assert env.step(turn)[1:3] == (1.0, True) and env.trajectory.success is True
    env.reset(seed=0)
    assert env.step("I cannot do that.")[1:3] == (0.0, True)
    # "no answer" holds of itself: half of the tests pass, and AppWorld gives nothing for it.
    assert env.trajectory.state["verdict"] == {
        "success": False, "tests": 2, "passes": ["no answer"], "failures": ["figs are noted"], "share": 0.5,
    }  # fmt: skip
    env.reset(seed=0)
    assert env.step(execute("apis.notes.add('fig')\nprint(apis.notes.show())"))[0][0].content == "['fig']\n"
    assert "NameError" in env.step(execute("figs"))[0][0].content
    assert env.step(execute("apis.supervisor.complete_task()"))[1:3] == (0.0, True)


def test_worlds_share_nothing_and_a_fork_goes_on_from_the_same_state(env: Any, root: Path) -> None:
    other = built(root, processes=2)
    for one, word in ((env, "figs"), (other, "plums")):
        one.reset(seed=0)
        one.step(execute(f"word = {word!r}\napis.notes.add(word)"))
    env.step(execute("apis.notes.add('and more')"))
    assert other.step(execute("print(word, apis.notes.show())"))[0][0].content == "plums ['plums']\n"
    other.close()
    fork = env.fork()
    assert fork.step(execute("apis.notes.add('only here')\nprint(apis.notes.show())"))[0][0].content == (
        "['figs', 'and more', 'only here']\n"
    )
    assert env.step(execute("print(apis.notes.show())"))[0][0].content == "['figs', 'and more']\n"
    fork.close()
    assert not (root / "experiments").exists(), "what AppWorld writes is not written to the user's folder"


async def test_more_episodes_than_processes_wait_and_a_world_that_dies_is_a_fault_of_its_own(root: Path) -> None:
    one, two = built(root, processes=1), built(root, processes=1)

    await one.areset(seed=0)
    waiting = asyncio.ensure_future(two.areset(seed=1))
    await asyncio.sleep(0.1)
    queued: str = two.queued
    assert not waiting.done() and one.queued == ""
    await one.aclose()
    await asyncio.wait_for(waiting, 20)
    assert two.queued == ""
    with pytest.raises(EnvError, match="exit code 3"):
        await two.astep(execute("die"))
    await one.areset(seed=0)
    await one.aclose()
    assert queued == "a process for its world (params.processes)"
    assert two.trajectory.stop is StopReason.ENV_ERROR


async def test_a_cancelled_step_leaves_no_answer_for_the_next_episode(root: Path) -> None:
    env = built(root, processes=1)

    began = time.monotonic()
    await env.areset(seed=0)
    step = asyncio.ensure_future(env.astep(execute("import time; time.sleep(30); print('late')")))
    await asyncio.sleep(0.3)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    await env.areset(seed=0)
    shown: str = (await env.astep(execute("print('in time')")))[0][0].content
    await env.aclose()
    assert shown == "in time\n"
    assert time.monotonic() - began < 20, "nor does the next one wait for what was abandoned"


def test_the_official_table_counts_tasks_and_whole_scenarios() -> None:
    def played(name: str, success: bool | None, level: int) -> Played:
        data = {"dataset": "dev", "difficulty": level}
        value = None if success is None else float(success)
        return Played(name, name[0], data, 0, value, success, StopReason.DONE, 1, 1)

    episodes = [played(name, name != "a3", 1) for name in ("a1", "a2", "a3", "d1")]
    episodes += [played(name, None if name == "c2" else True, 2) for name in ("b1", "b2", "b3", "c1", "c2", "c3")]
    rows = {row.name: (row.value, row.n) for row in find_env("appworld").load().official(episodes)}  # type: ignore[attr-defined]
    # By hand: eight of nine scored tasks; of the scenarios a fails, b passes, c is unscored, and of d one of three was played.
    assert rows == {
        "TGC dev": (pytest.approx(800 / 9), 9), "SGC dev": (50.0, 2),
        "TGC dev, level 1": (pytest.approx(300 / 4), 4), "SGC dev, level 1": (0.0, 1),
        "TGC dev, level 2": (100.0, 5), "SGC dev, level 2": (100.0, 1),
    }  # fmt: skip


@pytest.mark.skipif(PYTHON is None, reason="AGENTRL_APPWORLD_PYTHON does not name an interpreter with appworld installed")
def test_the_real_package_gives_the_same_verdicts(tmp_path: Path) -> None:
    """On tasks of ours in its layout, or on the data of AGENTRL_APPWORLD_SOURCE."""
    root = Path(SOURCE) if SOURCE else tmp_path
    if not SOURCE:
        subprocess.run([str(PYTHON), str(HERE / "appworld_tiny.py"), str(root)], check=True, capture_output=True)
    script = HERE.parent.parent / "benchmarks" / "parity" / "appworld.py"
    command = [sys.executable, str(script), "--source", str(root), "--python", str(PYTHON), "--most", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 different" in done.stdout
