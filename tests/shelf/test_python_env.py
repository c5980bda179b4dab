"""The python environment: problems, scoring, and a sandbox that is attacked in every way the README names."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from conversation_probes import play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.catalog import find_env, make_env
from agentrl.env import Message, ToolCall
from agentrl.env.check import Subject, check_all
from agentrl.env.sync import run_sync
from agentrl.errors import ConfigError, EnvError, ResourceError
from agentrl.reward import compile_spec, load_spec
from agentrl.shelves import load_module

FOLDER = Path(str(find_env("python").path)).parent
sandbox = load_module(FOLDER / "sandbox.py")
# A long wall: on a busy machine nothing but the tests of the wall itself may meet it.
SHORT = sandbox.Limits(cpu=1, wall=120.0, memory=256 << 20)


def attack(code: str, limits: Any = SHORT, files: dict[str, bytes] | None = None) -> Any:
    """What comes of a program in the sandbox."""
    return asyncio.run(sandbox.run_code(code, files or {}, limits))


def call(code: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("run", {"code": code}),))


# -- tasks and scoring -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_reference_solution_prints_the_answer_and_scores_one(level: int, split: str) -> None:
    env = make_env("python", level=level)
    seen = set()
    for seed in range(4):
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
            assert _printed(task.gold["solution"], task.data["files"]) == str(task.gold["answer"])
    assert not any(left.values())


def _printed(code: str, files: dict[str, str]) -> str:
    import contextlib
    import io

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        os.chdir(folder)
        try:
            for name, text in files.items():
                Path(name).write_text(text)
            exec(code, {"__name__": "__main__"})
        finally:
            os.chdir(before)
    return out.getvalue().strip()


def test_answers_cannot_be_read_off_the_prompt_and_null_policies_score_nothing() -> None:
    env = make_env("python")
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        shown = "\n".join(message.content for message in observation)
        answers: tuple[Message | str, ...] = ("", shown, "0", "1", Message("assistant", "I do not know."))
        for answer in answers:
            env.reset(seed=seed)
            assert play(env, [answer]) == (0.0, True)
    env.reset(seed=0)
    env.step(call("print(1)"))
    assert env.scorer.score(env.trajectory).value == 0.0  # type: ignore[union-attr]


def test_only_the_final_answer_counts_not_what_was_printed() -> None:
    env = make_env("python", level=1)
    env.reset(seed=1)
    gold, answer = env.task.gold["solution"], env.task.gold["answer"]
    assert play(env, [call(gold), ""]) == (0.0, True)
    env.reset(seed=1)
    assert play(env, [f"It is {answer}, no, {answer + 1}."]) == (0.0, True)


def test_the_contract_holds() -> None:
    """Everything `env check` looks at but the 500 fuzzed calls of its default."""
    entry = find_env("python")
    scorer = compile_spec(load_spec(entry.reward_path()))
    subject = Subject(lambda: make_env("python", scorer=scorer), scorer, tasks=2, fuzz=9)
    wrong = [finding for finding in check_all(subject) if finding.ok is False]
    assert not wrong, wrong


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=40) | st.sampled_from(["\0", "\ud800", "(" * 300, "1;" * 2000, "x: = 1", "ab\r\ncd"]))
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


def test_the_teacher_is_right_now_and_then() -> None:
    import random

    env, rewards = make_env("python", level=1), []
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        teacher, reward = env.teacher(env.task, random.Random(seed)), 0.0
        while (message := teacher.act(observation)) is not None:
            observation, reward, _, _, _ = env.step(message)
        rewards.append(reward)
    assert 0.3 < sum(rewards) / len(rewards) < 1.0


@pytest.mark.parametrize(
    "params",
    [
        {"level": 0},
        {"level": [2, 1]},
        {"level": 4},
        {"cpu_s": 0},
        {"wall_s": 0.5},
        {"memory_mb": 10},
        {"file_mb": 0},
    ],
)
def test_knobs_have_ranges(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make_env("python", **params)


def test_a_kernel_that_cannot_hold_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.require_sandbox.cache_clear()
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(ResourceError, match="riscv64"):
        sandbox.require_sandbox(True)
    monkeypatch.undo()
    sandbox.require_sandbox.cache_clear()


def test_a_sandbox_that_does_not_come_up_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infrastructure fault, so the episode is unscored; code cannot fake one: the pipe is closed."""
    fake = "import os\nfor fd in range(3, 60):\n try: os.write(fd, b'!')\n except OSError: pass\nos._exit(97)"
    assert attack(fake).code == 97
    monkeypatch.setattr(sandbox, "JAIL", FOLDER / "env.py")
    with pytest.raises(EnvError, match="did not start"):
        attack("1")


# -- attacks -----------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]


def test_no_network(listener: tuple[str, int]) -> None:
    outcome = attack(f"import socket\nsocket.create_connection({listener!r}, timeout=1)")
    assert outcome.end == "error" and "not permitted" in outcome.output
    for code in ("socket(AF_UNIX)", "socketpair()", "socket(AF_NETLINK, SOCK_RAW)"):
        assert "not permitted" in attack(f"from socket import *\n{code}").output


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n os.fork()",
        "import os\nos.posix_spawn('/bin/sh', ['sh'], {})",
        "import subprocess\nsubprocess.run(['sleep', '100'])",
        "import multiprocessing as m\nm.Process(target=print).start()",
        "import os\nos.execv('/bin/sh', ['sh'])",
        "import os\nos.system('sleep 100') and exit(1)",
    ],
)
def test_no_children_no_other_programs(code: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    outcome = attack(code)
    assert outcome.end == "error"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_threads_work_but_not_without_end() -> None:
    code = "import threading as t\nr = []\nx = [t.Thread(target=r.append, args=(i,)) for i in range(4)]\n"
    assert attack(code + "[i.start() for i in x]; [i.join() for i in x]; print(len(r))").output == "4\n"
    bomb = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()"
    assert "can't start new thread" in attack(bomb).output


def test_no_other_process_is_touched() -> None:
    code = f"import os\nfor sig in (0, 9): os.kill({os.getpid()}, sig)"
    assert "not permitted" in attack(code).output
    assert "not permitted" in attack("import os\nos.killpg(os.getpgid(os.getppid()), 9)").output
    assert attack("import os\nos.setsid()").end == "error"


def test_nothing_outside_the_folder_is_read_or_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("gold")
    secret.chmod(0o640)
    for code in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"import os; os.remove({str(secret)!r})",
        f"import os; os.rename({str(secret)!r}, 'mine')",
        f"import os; os.link({str(secret)!r}, 'mine'); print(open('mine').read())",
        f"import os; os.symlink({str(secret)!r}, 'mine')",
        f"import os; os.truncate({str(secret)!r}, 0)",
        f"import os; print(os.listdir({str(tmp_path)!r}))",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "print(open('/proc/self/environ').read())",
        f"print(open({str(FOLDER / 'problems.py')!r}).read())",
        "open('/dev/shm/x', 'w')",
    ):
        assert attack(code).end == "error", code
    touch = f"import os; os.chmod({str(secret)!r}, 0o777); os.utime({str(secret)!r}, (1, 1))"
    assert attack(touch).end == "ok"
    assert secret.read_text() == "gold" and secret.stat().st_mode & 0o777 == 0o640
    assert secret.stat().st_mtime > 10 and sorted(tmp_path.iterdir()) == [secret]


def test_memory_is_bounded() -> None:
    assert "MemoryError" in attack("x = bytearray(1 << 30)").output
    for size in (1 << 20, 64):
        assert "MemoryError" in attack(f"x = []\nwhile True: x.append(bytes({size}))").output
    assert attack("import os\nos.memfd_create('x')").end == "error"
    assert attack("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))").end == "error"


def test_files_are_bounded_one_by_one_and_together() -> None:
    outcome = attack("open('big', 'wb').write(bytes(8 << 20))")
    assert "File too large" in outcome.output and len(outcome.files["big"]) == 1 << 20
    outcome = attack("i = 0\nwhile True:\n open(f'f{i}', 'wb').write(bytes(1 << 19)); i += 1")
    assert outcome.end == "disk" and sum(map(len, outcome.files.values())) <= SHORT.disk
    many = attack("for i in range(200): open(f'f{i:03}', 'w').write('x')")
    assert len(many.files) == SHORT.files and many.dropped


def test_strange_folders_are_kept_or_dropped_but_always_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = attack("import os\nfor i in range(1500): os.mkdir('d' * 9); os.chdir('d' * 9)")
    assert deep.end in ("disk", "ok") and not deep.files
    odd = "import os\nos.mkdir('in')\nos.umask(0o777)\nopen('in/f', 'w')\nopen(b'\\xff', 'w')\nos.mkdir('.0')"
    outcome = attack(odd)
    assert outcome.files.keys() == {"in/f"} and "?" in outcome.dropped
    assert not list(tmp_path.iterdir())


def test_endless_loops_and_sleeps_end() -> None:
    quick = sandbox.Limits(cpu=1, wall=0.3)
    assert attack("while True: pass").end == "cpu"
    assert attack("import time\ntime.sleep(60)", quick).end == "wall"
    silent = "import os, time\nos.close(1); os.close(2); time.sleep(60)"
    assert attack(silent, quick).end == "wall"


def test_endless_output_is_cut_and_stopped() -> None:
    outcome = attack("while True: print('x' * 1000)")
    assert outcome.end == "output" and len(outcome.output) == SHORT.output and outcome.cut > 0


def test_a_crash_of_the_interpreter_is_an_answer() -> None:
    outcome = attack("import ctypes\nctypes.string_at(0)")
    assert (outcome.end, outcome.code) == ("killed", -11)


def test_leftover_children_die_with_their_group(tmp_path: Path) -> None:
    """A program that may have children (no jail here): none outlives it, and nothing waits for them."""
    script = f"(trap '' HUP TERM; sleep 300) & sleep 300 & echo $! > {tmp_path}/pid; echo started"
    ended = asyncio.run(sandbox.run_group(["/bin/sh", "-c", script], b"", tmp_path, SHORT))
    assert (ended.output, ended.end) == (b"started\n", "ok")
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the child lives on")


def test_cancelling_leaves_no_process_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main() -> None:
        task = asyncio.ensure_future(sandbox.run_code("import time\ntime.sleep(60)", {}, SHORT))
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    asyncio.run(main())
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not list(tmp_path.iterdir())


def test_ordinary_code_works() -> None:
    code = (
        "import math, statistics, itertools, json, re, datetime, decimal, fractions, heapq\n"
        "import shutil, hashlib, csv, zoneinfo, sqlite3, random, uuid\n"
        "open('a', 'w').write('x'); shutil.copy('a', 'b')\n"
        "row = sqlite3.connect(':memory:').execute('select 1').fetchone()\n"
        "print(hashlib.sha256(b'a').hexdigest()[:4], row)\n"
        "{'a', 'b', 'c'}"
    )
    one, two = attack(code), attack(code)
    assert one.end == "ok" and one.output.startswith("ca97 (1,)") and set(one.files) == {"a", "b"}
    assert one.output == two.output  # the order of a set is the same in every run


def test_a_traceback_shows_the_policys_own_lines_only() -> None:
    output = attack("def f():\n    return 1 / 0\nf()").output
    assert "line 2, in f" in output and "ZeroDivisionError" in output and "jail" not in output
    assert attack("x = (").output.count("File") == 1


def test_the_system_call_table_names_every_call_once() -> None:
    jail: ModuleType = load_module(FOLDER / "jail.py")
    for column in (0, 1):
        numbers = [pair[column] for table in (jail.DENIED, jail.IGNORED) for pair in table.values()]
        known = [number for number in numbers if number is not None]
        assert len(known) == len(set(known)) and jail.CLONE[column] not in known
