"""Environments, rewards and policies that are defined in Python and in no file of a shelf."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentrl
from agentrl.config.load import load_config
from agentrl.run.api.base import Both, config_of, run_blocking
from agentrl.run.assembly import RunStart
from agentrl.run.checks.size_checks import check_workers
from agentrl.run.digests import contents_of
from agentrl.utils.errors import CallbackError, CatalogError, ConfigError, RunFolderError
from agentrl.utils.search_path import give, pack_given, unpack
from agentrl.utils.threads import background
from tests.conftest import proof
from tests.python import Pick, share_of_low_ids, table

SPEC = {"agentrl_reward": 1, "name": "exact", "root": {"use": "text.equals", "args": {"expect": {"$": "/task/gold/answer"}}}}


def gold(env: agentrl.ToolEnv) -> float:
    """The reward of the gold solution."""
    env.reset(seed=1)
    steps = [env.step(turn) for turn in env.unwrapped.gold_turns(env.unwrapped.task)]  # type: ignore[attr-defined]
    return steps[-1][1]


def look_and_say(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
    """A policy that solves Pick."""
    assert [tool["function"]["name"] for tool in tools] == ["look"]
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    return {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}


async def guess(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> agentrl.Message:
    return agentrl.Message("assistant", "7")


def broken(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    raise ValueError("no idea")


def short_answer(view: Any, args: Any) -> tuple[float, str]:
    return (1.0, "short") if len(view.answer() or "") < 5 else (0.0, "long")


def test_a_made_environment_gives_gold_the_reward_1() -> None:
    assert gold(agentrl.make("key_value", calls=2)) == 1.0
    assert gold(agentrl.make(Pick, reward=SPEC)) == 1.0
    assert gold(agentrl.make(Pick, reward=short_answer, most=3)) == 1.0
    assert gold(agentrl.make(lambda_free_factory, reward=SPEC)) == 1.0
    own = type("Own", (Pick,), {"reward": SPEC})
    assert gold(agentrl.make(own)) == gold(own()) == 1.0
    with pytest.raises(CatalogError, match="no parameter 'mots'; did you mean 'most'"):
        agentrl.make(Pick, reward=SPEC, mots=3)
    with pytest.raises(ConfigError, match="it needs a name"):
        agentrl.make(lambda: Pick(), reward=SPEC)


def test_a_home_folder_is_one_in_python_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a folder named ~; an override `out` and the command line take it as well."""
    monkeypatch.setenv("HOME", str(here / "home"))
    agentrl.rollout(look_and_say, Pick, n=1, reward=SPEC, out="~/kept")
    assert agentrl.load_run("~/kept").path == here / "home" / "kept"
    assert [path.name for path in here.iterdir()] == ["home"]


def lambda_free_factory(most: int = 2) -> Pick:
    return Pick(most=most)


class OneId(Pick):
    """All tasks have the same id."""

    def make_task(self, rng_seed: int, split: str) -> Any:
        return replace(super().make_task(rng_seed, split), id="the task")


class OneSeed(Pick):
    def make_task(self, rng_seed: int, split: str) -> Any:
        return replace(super().make_task(rng_seed, split), seed=0)


def test_tasks_of_one_id_are_not_samples_of_one_task() -> None:
    """pass@2 was that of one task with six samples, 0.8."""
    said: dict[str, int] = {}

    def first_only(view: Any, args: Any) -> float:
        key = view.answer()
        said[key] = said.get(key, 0) + 1
        return float(said[key] == 1)

    found = agentrl.evaluate(look_and_say, OneId, n=3, k=2, reward=first_only).report
    assert found["tasks"] == 3
    assert [found[name]["mean"] for name in ("pass@1", "pass@2", "pass^2")] == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("trajectories.jsonl", "garbage"), ("trajectories.jsonl", "[]"), ("trajectories.jsonl", "{}"), ("eval.json", "{")],
)
def test_a_damaged_folder_of_an_evaluation_is_named(tmp_path: Path, name: str, text: str) -> None:
    agentrl.evaluate(look_and_say, Pick, n=2, reward=SPEC, out=tmp_path)
    (tmp_path / name).write_bytes(f"{text}\n".encode() + b"\xff\n")
    with pytest.raises(RunFolderError, match=rf"{name}(:1)?: (not an episode|damaged: .*use another --out)"):
        agentrl.evaluate(look_and_say, Pick, n=2, reward=SPEC, out=tmp_path)


def test_one_task_of_several_seeds_is_one() -> None:
    """Its samples say no more of the other tasks: an interval over as many tasks as seeds was too narrow."""

    class Few(Pick):
        def make_task(self, rng_seed: int, split: str) -> Any:
            return replace(super().make_task(rng_seed % 2, split), seed=rng_seed)

    found = agentrl.evaluate(look_and_say, Few, n=6, k=2, reward=SPEC).report
    assert (found["tasks"], found["episodes"], found["pass@1"]["low"]) == (2, 12, 0.0)


def test_a_task_with_the_seed_of_another_is_refused() -> None:
    """All episodes were played, and then it was a bare KeyError."""
    with pytest.raises(ConfigError, match=r"two tasks have seed 0\. Hand make_task's rng_seed on"):
        agentrl.evaluate(look_and_say, OneSeed, n=3, k=2, reward=SPEC)


def test_a_policy_is_evaluated_like_a_model() -> None:
    """All right with the tool, none right by guessing: 3 tasks, 2 samples each."""
    found = agentrl.evaluate(look_and_say, Pick, n=3, k=2, reward=SPEC)
    assert (found.success, found.reward, len(found.episodes)) == (1.0, 1.0, 6)
    assert found.report["pass^2"]["mean"] == 1.0 and repr(found) == "<EvalReport: success 1.000 over 3 tasks, 6 episodes>"
    assert [len(turn.message.tool_calls) for turn in found.episodes[0].turns] == [1, 0]
    assert agentrl.evaluate(guess, Pick, n=3, reward=SPEC).success == 0.0
    with pytest.raises(
        CallbackError, match=r"policy broken raised ValueError: no idea \(.*test_own\.py:\d+\) \(in 2 of 2 episodes\)"
    ):
        agentrl.evaluate(broken, Pick, n=2, reward=SPEC)
    for answer, said in [
        ({"tool_call": [{"id": "a"}]}, "tool_call: no key of a message; did you mean 'tool_calls'"),
        ({"text": "7"}, "content: expected text"),
        ({"role": "user", "content": "7"}, "its role is 'user', expected 'assistant'"),
        (agentrl.Message("user", "7"), "its role is 'user', expected 'assistant'"),
    ]:
        with pytest.raises(CallbackError, match=f"policy odd_one: it returned no message: .*{said}"):  # and not an empty answer
            agentrl.evaluate(give(lambda messages, tools, answer=answer: answer, "odd_one"), Pick, n=1, reward=SPEC)
    with pytest.raises(ConfigError, match="env is missing"):
        agentrl.evaluate(guess)
    with pytest.raises(ConfigError, match="n = 0, k = 1: expected at least 1"):
        agentrl.evaluate(guess, Pick, n=0, reward=SPEC)
    unnamed = lambda messages, tools: "7"  # noqa: E731 - the name comes from `give`
    assert agentrl.give(unnamed, "sevens") == "given:sevens" and agentrl.evaluate(unnamed, Pick, n=1, reward=SPEC).episodes
    episodes = agentrl.rollout(look_and_say, {"id": give(Pick), "params": {"most": 0}, "reward": SPEC}, n=2)
    assert [episode.reward for episode in episodes] == [1.0, 1.0] and episodes[0].task.split == "train"


@pytest.mark.parametrize(
    ("returned", "value"),
    [(np.float32(0.5), 0.5), (np.int64(1), 1.0), (np.bool_(True), 1.0), (True, 1.0), (Fraction(1, 4), 0.25),
     ((np.float64(0.5), "e"), 0.5)],
)  # fmt: skip
def test_a_reward_function_may_return_any_kind_of_number(returned: Any, value: float) -> None:
    def worth(episode: agentrl.Trajectory) -> Any:
        return returned

    found = agentrl.rollout(look_and_say, Pick, n=1, reward=worth)
    assert [episode.reward for episode in found] == [value] and type(found[0].reward) is float


def scaled(episode: agentrl.Trajectory, *, factor: float = 0.5, **more: Any) -> float:
    return factor * len(episode.messages) / 4


def test_a_reward_function_may_have_options_after_the_episode() -> None:
    """Each episode ended unscored: it was called with a view and arguments, as one of two parameters."""
    assert [one.reward for one in agentrl.rollout(look_and_say, Pick, n=1, reward=scaled)] == [0.5]
    assert [one.reward for one in agentrl.rollout(look_and_say, Pick, n=1, reward=partial(scaled, factor=0.25))] == [0.25]


def fails(episode: agentrl.Trajectory) -> Any:
    return {}["no"]


class Kept(Pick):
    """Keeps its tasks, so that the episodes of one share it."""

    make_task = cache(Pick.make_task)


def takes(episode: agentrl.Trajectory) -> float:
    return float(episode.messages.pop().content == episode.task.gold.pop("answer"))  # type: ignore[attr-defined]


def test_a_reward_function_may_change_what_it_is_given() -> None:
    found = agentrl.rollout(look_and_say, Kept, n=1, k=2, reward=takes)
    assert [(one.reward, len(one.messages), list(one.task.gold)) for one in found] == [(1.0, 4, ["answer"])] * 2


@pytest.mark.parametrize("returned", ["True", "0.5", float("nan"), 2.0, np.array([0.1, 0.2]), (1, 2, 3)])
def test_a_reward_function_that_is_broken_says_so(returned: Any) -> None:
    def says(episode: agentrl.Trajectory) -> Any:
        return returned

    line = says.__code__.co_firstlineno
    with pytest.raises(CallbackError, match=rf"reward says returned .*test_own\.py:{line}\) \(in 2 of 2 episodes\)"):
        agentrl.evaluate(look_and_say, Pick, n=2, reward=says)
    raised = fails.__code__.co_firstlineno + 1
    with pytest.raises(CallbackError, match=rf"reward fails raised KeyError: 'no' \(.*test_own\.py:{raised}\)"):
        agentrl.rollout(look_and_say, Pick, n=1, reward=fails)
    env = agentrl.make(Pick, reward=fails)
    env.reset(seed=1)
    info = [env.step(turn) for turn in env.gold_turns(env.task)][-1][4]
    assert f"test_own.py:{raised}" in info["unscored"]


def test_a_report_says_why_some_episodes_are_unscored() -> None:
    def some(episode: agentrl.Trajectory) -> float:
        return 1.0 if episode.task.seed % 2 else fails(episode)

    found = agentrl.evaluate(look_and_say, Pick, n=4, reward=some)
    assert found.reward == 1.0 and "2 episodes are unscored" in repr(found) and "KeyError: 'no'" in repr(found)


@pytest.mark.parametrize(("call", "said"), [
    (lambda: agentrl.evaluate(guess, Pick, reward=SPEC, overrides=["steps=2"]), "evaluate: overrides = ['steps=2'] is a list"),
    (lambda: agentrl.rollout(guess, Pick, params="most=3"), "rollout: params = 'most=3' is a str; expected a dict or None"),
    (lambda: agentrl.evaluate(guess, Pick, n="3"), "evaluate: n = '3' is a str; expected a whole number or None"),
    (lambda: agentrl.evaluate(3, Pick), "evaluate: model = 3 is a int; expected a text or a path or a function"),
    (lambda: agentrl.train(["quickstart"]), "train: config = ['quickstart'] is a list"),
    (lambda: agentrl.train("quickstart", on_step=3), "train: on_step = 3 is a int; expected a function or None"),
    (lambda: agentrl.train("quickstart", callbacks=[fails]), "expected a list (each a Callback)"),  # type: ignore[list-item]
    (lambda: agentrl.session("quickstart", folder=3), "session: folder = 3 is a int; expected a text or a path or None"),
    (lambda: agentrl.load_run(3), "load_run: path = 3 is a int; expected a text or a path"),
    (lambda: agentrl.give(3, "three"), "give: value = 3; expected a class, a function"),
    (lambda: agentrl.give(fails, "f", needs="proximal"), "give: needs = 'proximal' is a str; expected a list"),
    (lambda: agentrl.make(3), "env = 3: expected an environment's id, its class"),
    (lambda: agentrl.make(Pick, reward=3), "reward = 3: expected a spec's name or path"),
    (lambda: agentrl.evaluate(guess, Pick()), "Give the class Pick itself, its parameters as params={...}"),
    (lambda: agentrl.evaluate(guess, agentrl.make(Pick, reward=SPEC)), "Give the class Pick itself"),
    (lambda: agentrl.train({"name": "x", "env": Pick()}), "Give the class Pick itself"),
])  # fmt: skip
def test_an_argument_of_a_wrong_type_is_named(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert said in str(error.value)


async def test_it_works_where_an_event_loop_runs() -> None:
    assert agentrl.evaluate(guess, Pick, n=1, reward=SPEC).success == 0.0
    assert (await agentrl.evaluate.aio(look_and_say, Pick, n=1, reward=SPEC)).success == 1.0


def numbered(number: int) -> tuple[Any, Any, Any]:
    """A policy, an environment and a reward function, of the same names for each number."""

    def policy(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        return f"{number} {messages[0]['content']}"

    def worth(episode: agentrl.Trajectory) -> float:
        return number / 10

    class Numbered(Pick):
        def prompt(self, task: Any) -> list[agentrl.Message]:
            return [agentrl.Message("user", f"env {number}")]

    return policy, Numbered, worth


async def test_each_call_plays_its_own_objects_though_all_have_the_same_names() -> None:
    """All three played the policy, the environment and the reward of the last one."""
    calls = (agentrl.evaluate.aio(policy, env, reward=worth, n=2) for policy, env, worth in map(numbered, range(3)))
    found = [(report.reward, report.episodes[-1].messages[-1].content) for report in await asyncio.gather(*calls)]
    assert found == [(0.0, "0 env 0"), (0.1, "1 env 1"), (0.2, "2 env 2")]


def test_two_objects_of_one_name_in_one_config_are_refused() -> None:
    """Both entries were the second class."""
    one, other = (numbered(number)[1] for number in (1, 2))
    with pytest.raises(ConfigError, match=r"'Numbered': it names two objects of this call, .*\. Rename one"):
        agentrl.train({"name": "x", "env": [one, other]})
    agentrl.give(other, "other_name")
    assert [env.called for env in config_of({"name": "x", "env": [one, other]}).envs] == ["Numbered", "other_name"]


def test_ctrl_c_reaches_a_blocking_call_inside_of_asyncio_run() -> None:
    """asyncio.run's own handler would only cancel the task that waits here, which nothing could then interrupt."""
    ended: list[str] = []
    handlers: list[Any] = []

    async def work() -> None:
        try:
            await asyncio.sleep(2)
            ended.append("slept")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def main() -> None:
        handlers.append(signal.getsignal(signal.SIGINT))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            run_blocking(work())
        finally:
            handlers.append(signal.getsignal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert ended == ["cancelled"] and handlers[0] == handlers[1]


async def test_a_call_that_is_cancelled_before_its_work_begins_is_cancelled() -> None:
    """The loop of the work is busy; it was only waited for, to its end."""
    background().loop.call_soon_threadsafe(time.sleep, 0.3)
    call = asyncio.create_task(Both(asyncio.sleep).aio(20))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 5)


async def _exit(code: int) -> None:
    sys.exit(code)


def test_an_exit_inside_of_the_work_reaches_the_caller() -> None:
    """sys.exit in a callback, and rich when a pipe is closed, leave the loop; a caller that waits must not hang."""
    done: list[Any] = []

    def call() -> None:
        try:
            run_blocking(_exit(3))
        except SystemExit as left:
            done.append(left.code)
        done.append(run_blocking(asyncio.sleep(0, 1)))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(30)
    assert done == [3, 1]


def test_a_table_becomes_a_config_with_names_for_what_is_python(tmp_path: Path) -> None:
    config = config_of({"base": "quickstart", "env": Pick, "env.params": {"most": 3}, "algorithm": {"loss": share_of_low_ids}}, {
        "rollout.groups": 3, "sft": None, "env.reward": SPEC, "out": tmp_path,
    })  # fmt: skip
    assert (config.envs[0].id, config.envs[0].called, config.envs[0].params) == ("given:Pick", "Pick", {"most": 3})
    assert (config.envs[0].reward, config.algorithm.loss.name) == ("given:exact", "given:share_of_low_ids")
    assert (config.rollout.groups, config.sft, config.out) == (3, None, str(tmp_path))
    assert config_of("quickstart", {"optim": {"lr": 0.5}}).optim.lr == 0.5
    with pytest.raises(ConfigError, match=r"rollout.group: unknown key; did you mean 'rollout.groups'"):
        config_of({"env": Pick, "rollout": {"group": 3}})


def test_what_is_sent_by_value_is_there_in_another_process() -> None:
    """A class of a cell (`__main__`), and its reward, in a process that has no such file."""
    code = (
        "import sys, agentrl\nfrom agentrl.utils.search_path import pack_given, used_names\n"
        "from agentrl.env import Message, Task, ToolEnv\n"
        "class Cell(ToolEnv):\n"
        "    def reward(episode):\n        return len(episode.messages) > LEAST\n"
        "    def make_task(self, rng_seed, split): return Task(f't{rng_seed}', rng_seed, split)\n"
        "    def prompt(self, task): return [Message('user', 'hi')]\n"
        "LEAST = 1\n"
        "agentrl.make(Cell).reset(seed=0)\n"
        "sys.stdout.buffer.write(pack_given(used_names({'env': 'given:Cell'})))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert out.returncode == 0, out.stderr.decode()
    unpack(out.stdout)
    env = agentrl.make("given:Cell")
    env.reset(seed=0)
    assert env.step("hello")[1] == 1.0 and env.unwrapped.id == "given/Cell-v0"  # type: ignore[attr-defined]


def held() -> Any:
    return LOCK


LOCK = threading.Lock()  # cannot be pickled


def test_what_cannot_be_sent_is_refused_with_the_way_out() -> None:
    held.__module__ = "__main__"  # as in a notebook: by value
    with pytest.raises(ConfigError, match=r"'given:held' cannot be sent .*rollout.workers = 0"):
        pack_given([give(held)])
    config = config_of(table(**{"env.reward": held, "rollout.workers": 1, "cluster.backend": "ray"}))
    with pytest.raises(ConfigError, match=r"'given:held' cannot be sent"):
        check_workers(RunStart(config))
    check_workers(RunStart(config.model_copy(update={"rollout": config.rollout.model_copy(update={"workers": 0})})))


def test_a_config_of_what_is_python_is_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(table())
    contents = contents_of(config, "train").digests
    names = ["the source of given:Pick", "the source of given:share_of_low_ids"]
    assert all(contents[name].startswith("sha256:") for name in names) and set(names) <= set(contents_of(config, "train").code)
    for name in [*agentrl.utils.search_path._TABLE]:
        monkeypatch.delitem(agentrl.utils.search_path._TABLE, name)
    with pytest.raises(ConfigError, match=r"env.reward: 'given:share_of_low_ids' was defined in Python, .* agentrl.give\(IT\)"):
        contents_of(config, "train")


@proof
def test_a_run_of_what_is_python_continues_only_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = agentrl.train(table(steps=1, out=str(tmp_path), **{"checkpoint.every": 1}))
    config = load_config(run.path / "config.toml")
    assert (config.envs[0].id, config.envs[0].reward) == ("given:Pick", "given:share_of_low_ids")
    assert "the source of given:Pick" in json.loads((run.path / "provenance.json").read_text())["contents"]
    code = f"from agentrl.cli.main import main\nimport sys\nsys.exit(main(['train', '--resume', {str(run.path)!r}, 'steps=2']))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 2 and "was defined in Python" in out.stderr and "agentrl.give(IT)" in out.stderr
    found = agentrl.evaluate(run.path)  # as the run evaluated its last weights: its tasks, limits, reward and temperature
    assert found.reward == pytest.approx(run.metrics[-1]["reward"], abs=1e-12) and len(found.episodes) == 2
    assert agentrl.evaluate(run.path, checkpoint="0").reward == pytest.approx(run.metrics[0]["reward"], abs=1e-12)
    again = agentrl.train(resume=run.path, steps=2)
    assert [row["step"] for row in again.metrics if row["phase"] == "train"] == [1, 2]
    give(lambda_free_factory, "Pick")  # another class under its name: said, as a changed file is
    agentrl.train(resume=run.path, steps=3)
    assert "the source of given:Pick have changed" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"learned with other values: rollout.groups was 2, is 3"):
        agentrl.train(resume=run.path, rollout={"groups": 3})
    give(Pick)


def test_a_config_that_goes_through_again_stays_as_it_is() -> None:
    """None where there is a limit by default is no limit, and what is set replaces its alternatives as everywhere."""
    config = config_of({"base": "quickstart", "reward": {"judge": {"calls": False}}})
    assert config.reward.judge.calls is None and config_of(config) == config
    other = config_of(config, {"model.path": "x"})
    assert (other.model.path, other.model.init, other.reward.judge.calls) == ("x", None, None)


async def test_a_run_that_is_cancelled_ends_after_its_step_with_a_checkpoint(tmp_path: Path) -> None:
    """As by Ctrl-C, beside an event loop: the first cancel finishes the step."""
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_step(row: Any, session: Any) -> None:
        loop.call_soon_threadsafe(begun.set)

    run = asyncio.create_task(agentrl.train.aio(table(steps=500, out=str(tmp_path)), on_step=on_step))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    found = agentrl.load_run(tmp_path / "tiny")
    assert found.summary is not None and found.summary["status"] == "interrupted"
    assert 1 <= found.summary["steps"] < 500 and (found.path / "checkpoints" / f"step_{found.summary['steps']:06d}").is_dir()


SCRIPT = Path(__file__).with_name("main_script.py")


@proof
@pytest.mark.timeout(300)
def test_a_script_with_a_worker_and_with_two_actors_is_the_script_in_one_process(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env)
    assert out.returncode == 0, out.stderr[-3000:]
    found = json.loads(out.stdout.splitlines()[-1])
    one = found["one"]
    for ray in (found["workers"], found["ranks"]):
        assert one["rewards"] == ray["rewards"] and len(set(one["rewards"])) > 2
        assert one["loss"]["mine"] == ray["loss"]["mine"] == 200.0 and ray["twice"]["mine"] == 1.0
        assert ray["loss"]["loss"] == pytest.approx(one["loss"]["loss"], rel=1e-4, abs=1e-6)
        assert ray["twice"]["loss"] == pytest.approx(one["loss"]["loss"] / 2, rel=1e-4, abs=1e-6)
        assert ray["step"]["grad_norm"] == pytest.approx(one["step"]["grad_norm"], rel=1e-4)
        assert one["version"] == ray["version"] == 1
