"""A benchmark's code in processes of another interpreter: answers, faults, ends, and processes that one episode holds."""

import asyncio
import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.contrib.suites.foreign import Foreign, HeldWorld, foreign, python_of
from agentrl.utils.errors import ConfigError, EnvError
from tests.waits import runs, until

SCRIPT = """
import os, sys, time
ARGUMENTS = sys.argv[1:]
COUNT = 0

def told(value):
    print("not an answer")                              # a benchmark may print what it likes
    os.write(1, b"nor this\\n")
    beside = [name for name in ("suite", "foreign") if __import__("importlib").util.find_spec(name)]
    return {"value": value, "arguments": ARGUMENTS, "input": sys.stdin.read(), "beside": beside}

def count():
    global COUNT
    COUNT += 1
    return COUNT

def wrong():
    raise KeyError("no such task")

def leave():
    sys.stderr.write("out of figs\\n")
    os._exit(7)

def slow(seconds):
    time.sleep(seconds)
    return os.getpid()

def holds():
    import subprocess, tempfile
    return [tempfile.mkdtemp(), subprocess.Popen(["sleep", "60"], stdout=None).pid]

def spin():
    os.fork()                                           # both hold the pipe
    while True:
        pass

def writes(text, ends):
    import fcntl
    for fd in range(3, 12):
        try:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                os.write(fd, text.encode())
        except OSError:
            pass
    if ends:
        os._exit(3)

def noise():
    os.write(1, b"n" * 100_000)

def surrogate():
    raise ValueError("\\ud800")

WORLD = []

def start(first):
    WORLD[:] = [first]

def add(item):
    WORLD.append(item)

def show():
    return WORLD

LEFT = [0]

def seen(passed):
    import datetime, types, uuid
    from agentrl_foreign import steady
    if "toybench" not in sys.modules:
        sys.modules["toybench"] = types.SimpleNamespace(datetime=datetime, uuid4=uuid.uuid4)
        LEFT.append(steady("toybench", "2025-01-01T00:00:00", lambda: LEFT[0]))
    toy, LEFT[0] = sys.modules["toybench"], passed
    LEFT[1]()
    return [str(toy.datetime.datetime.now()), str(toy.uuid4()), str(toy.uuid4())]

def sibling():
    from agentrl_foreign import load_sibling
    return load_sibling(__file__, "other").WORD
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Foreign]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    made = foreign(sys.executable, script, ("a b", "ü"), most=1)
    assert foreign(sys.executable, script, ("a b", "ü"), most=1) is made, "environments share the processes"
    yield made
    made.close()


def test_a_script_answers_and_what_it_prints_or_raises_is_no_answer(pool: Foreign) -> None:
    assert pool.ask("told", value={"x": [1, None, "é\n"]}) == {
        "value": {"x": [1, None, "é\n"]}, "arguments": ["a b", "ü"], "input": "", "beside": [],
    }  # fmt: skip
    assert [pool.ask("count"), pool.ask("count")] == [1, 2], "one process, which is kept"
    with pytest.raises(EnvError, match="wrong failed: KeyError: 'no such task'"):
        pool.ask("wrong")
    assert pool.ask("count") == 3
    with pytest.raises(EnvError, match=r"ended with exit code 7 in leave: (?s:.*)out of figs"):
        pool.ask("leave")
    assert pool.ask("count") == 1, "the next call starts another process"


async def test_a_process_is_held_by_one_and_goes_back_also_if_who_waits_for_it_is_cancelled(pool: Foreign) -> None:
    first = await pool.held()
    waiting = asyncio.ensure_future(pool.held())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    pid = first.ask("slow", {"seconds": 0})
    pool.give(first)
    # Without it the pool of one would be empty for good, and this would wait for ever.
    assert await asyncio.wait_for(pool.call("slow", seconds=0), 20) == pid != os.getpid()


def test_a_process_whose_holder_was_dropped_unclosed_comes_back(pool: Foreign) -> None:
    class Holder:
        def __init__(self) -> None:
            self.process, self.itself = pool.take(), self

        def __del__(self) -> None:
            pool.give(self.process)

    Holder()  # in a circle of references, as an environment and its toolbox are
    assert asyncio.run(asyncio.wait_for(pool.call("count"), 20)) == 1


async def test_a_killed_process_fails_who_waits_for_it_and_is_not_given_out_again(pool: Foreign) -> None:
    process = await pool.held()
    asking = asyncio.ensure_future(asyncio.to_thread(process.ask, "slow", {"seconds": 60}))
    await asyncio.sleep(0.05)
    process.kill()
    with pytest.raises(EnvError, match="exit code -9 in slow"):
        await asking
    pool.give(process)
    assert await pool.call("count") == 1


def test_the_interpreter_is_the_given_one_or_that_of_the_source(tmp_path: Path) -> None:
    assert python_of(tmp_path) == sys.executable
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert python_of(tmp_path) == str(own)
    assert python_of(tmp_path, sys.executable) == sys.executable
    with pytest.raises(ConfigError, match=r"params.python = '/no/python': no such file"):
        python_of(tmp_path, "/no/python")


def test_what_is_no_answer_is_a_fault_and_never_answers_the_next_question(pool: Foreign) -> None:
    assert pool.ask("count") == 1
    for text in ("hello\n", "3\n", '{"value": 9, "more": 1}\n'):
        with pytest.raises(EnvError, match="wrote in place of an answer to writes: "):
            pool.ask("writes", text=text, ends=False)
        assert [pool.ask("count"), pool.ask("count")] == [1, 2], "of another process"
    with pytest.raises(EnvError, match="ended with exit code 3 in writes"):
        pool.ask("writes", text='{"value": "hal', ends=True)
    with pytest.raises(EnvError, match=r"surrogate failed: ValueError: \?"):
        pool.ask("surrogate")
    pool.ask("noise")
    assert pool.ask("count") == 1
    (process,) = pool._idle
    assert os.fstat(process._output.fileno()).st_size == 0, "what it printed in earlier calls is not kept"


async def test_a_call_that_hangs_takes_no_process_from_the_next_if_it_is_cancelled(pool: Foreign) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(pool.call("spin"), 0.3)
    assert await asyncio.wait_for(pool.call("count"), 20) == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wait", [0.0, 0.3])  # the awaited call takes its process, or asks it
async def test_a_blocking_call_gets_the_process_of_a_call_that_its_event_loop_awaits(pool: Foreign, wait: float) -> None:
    other = asyncio.ensure_future(pool.call("slow", seconds=0.6))
    await asyncio.sleep(wait)
    assert pool.ask("count") == 1
    await other


def test_a_blocking_call_that_hangs_has_an_end(pool: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.contrib.suites.foreign.ANSWERS_S", 0.3)
    with pytest.raises(EnvError, match=r"the benchmark's process ended with exit code -9 in spin"):
        pool.ask("spin")
    monkeypatch.undo()
    assert pool.ask("count") == 1


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_is_left_of_a_process_that_ends_or_is_killed_from_outside_while_somebody_holds_it(
    pool: Foreign, killed: bool
) -> None:
    """The holder of a killed one gives it back too late: the end of this process does, and of what it started as well."""
    process = pool.take()
    folder, child = cast(list[Any], process.ask("holds", {}))
    assert Path(folder).is_dir() and Path(folder).parent.name.startswith("agentrl-foreign-")
    if killed:
        os.kill(process._process.pid, 9)
        assert until(lambda: not runs(process._process.pid), 15)
    else:
        pool.give(process)
    pool.close()
    assert not Path(folder).parent.exists() and until(lambda: not runs(child), 15)
    if killed:
        pool.give(process)
    assert pool.ask("count") == 1


def test_nothing_is_left_if_the_run_is_killed_in_the_middle_of_a_call(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = (
        "import os, sys, threading, time\nfrom pathlib import Path\nfrom agentrl.contrib.suites.foreign import foreign\n"
        f"process = foreign(sys.executable, Path({str(tmp_path / 'script.py')!r})).take()\n"
        "print(*process.ask('holds', {}), process._process.pid, sep='\\n', flush=True)\n"
        "threading.Thread(target=process.ask, args=('spin', {}), daemon=True).start()\n"
        "time.sleep(0.1)\nos.kill(os.getpid(), 9)\n"
    )
    folder, *pids = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert until(lambda: not any(runs(int(pid)) for pid in pids), 15) and not Path(folder).parent.exists()


def test_scripts_have_a_steady_clock_and_siblings(pool: Foreign, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("WORD = 'beside'")
    first, again, later = (cast(list[str], pool.ask("seen", passed=passed)) for passed in (0, 0, 61))
    assert first == again and first[0] == "2025-01-01 00:00:00" and later[0] == "2025-01-01 00:01:01"
    assert len({*first, *later}) == 6 and pool.ask("sibling") == "beside"


async def test_a_copied_world_is_made_again(pool: Foreign, tmp_path: Path) -> None:
    two = foreign(sys.executable, tmp_path / "script.py", (), 2)
    world = HeldWorld(two, ("start", {"first": 0}))
    await world.start()
    await world.act("add", item=1)
    fork = copy.deepcopy(world)
    await fork.act("add", item=2)
    assert [await world.ask("show"), await fork.ask("show")] == [[0, 1], [0, 1, 2]]
    for one in (world, fork, world, fork):
        one.end()
    two.close()


def test_a_fork_that_lets_go_of_a_world_leaves_its_parents_process_alone(pool: Foreign) -> None:
    world = HeldWorld(pool, ("start", {"first": 0}))
    assert asyncio.run(world.ask("show")) == [0]
    if (child := os.fork()) == 0:
        try:
            world.end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert asyncio.run(world.ask("show")) == [0]
    world.end()
