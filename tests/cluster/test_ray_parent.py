"""`agentrl train` with Ray is two processes: what the first makes of how the second ends, and of signals."""

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agentrl.cluster import ray_parent
from agentrl.run.interrupt import SAME_SIGNAL_S, Interrupt
from tests.conftest import proof
from tests.waits import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the driver has no parent")

# A driver that does what its words say, instead of training: one word for each time that it is started.
DRIVER = """
import os, signal, sys, time
from pathlib import Path
from agentrl.cli import main, train
from agentrl.cluster.ray_parent import report_to_parent

words, run = sys.argv[1].split(","), Path(sys.argv[2])

def drive(args, config, before, restarts):
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text('[env]\\nid = "key_value"\\n[cluster]\\nmax_restarts = 2\\n')
    times = len((run / "log").read_text().splitlines()) if (run / "log").exists() else 0
    with (run / "log").open("a") as log:
        log.write(f"{'resumed' if before else 'new'} {restarts} {os.getpid()}\\n")
    word = words[times]
    if word == "early":
        os._exit(1)
    report_to_parent(folder=str(run), restarts=restarts, max_restarts=2, then=f"continue with: agentrl train --resume {run}")
    if word == "no ray":
        os._exit(1)
    if word == "own error":
        report_to_parent(error="AgentrlError: the gate is shut")
    report_to_parent(ray="its GCS (pid 7) or its raylet (pid 8)")
    if word in ("ray", "own error"):
        os._exit(1)
    if word == "stopped":
        report_to_parent(ray="")
        os._exit(1)
    if word == "late":  # after what is begun has ended
        report_to_parent(over=True)
        os._exit(1)
    if word == "waits":
        got = []
        signal.signal(signal.SIGTERM, lambda *_: got.append("TERM"))
        signal.signal(signal.SIGINT, lambda *_: got.append("INT"))
        (run / "ready").touch()
        until = time.monotonic() + 60
        while not got and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        (run / "got").write_text(" ".join(got))
        return 130
    if word == "stops":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.1)
        os._exit(1)
    return int(word) if word.isdigit() else os.kill(os.getpid(), getattr(signal, word)) or time.sleep(9)

train.TrainCommand.begin = lambda self: drive(self.args, self.config, None, self.restarts)
train.TrainCommand.resume = lambda self, check: drive(self.args, self.config, self.before, self.restarts)
sys.argv[1:] = ["train", sys.argv[3], "cluster.max_restarts=2"]
sys.exit(main.main())
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('[env]\nid = "key_value"\n')
    return path


def command(config: Path, words: str) -> list[str]:
    return [sys.executable, "-c", DRIVER, words, str(config.parent / "run"), str(config)]


def ended(config: Path, words: str) -> tuple[int, list[str], list[str]]:
    """The exit code, the lines that were said, and how each driver was started, without its pid."""
    done = subprocess.run(command(config, words), capture_output=True, text=True, timeout=60)
    log = (config.parent / "run" / "log").read_text().splitlines()
    return done.returncode, (done.stdout + done.stderr).splitlines(), [line.rpartition(" ")[0] for line in log]


HOW = "continue with: agentrl train --resume {run}"
BY_RAY = (
    r"Ray has ended the driver \(pid \d+\) from within, as it does when it has lost its GCS \(pid 7\) or its raylet \(pid 8\)"
)
AGAIN = [f"{BY_RAY}; restarting from the newest checkpoint \\({number} of 2\\)" for number in (1, 2)]


@pytest.mark.parametrize(("words", "code", "drivers", "said"), [
    pytest.param("130", 130, 1, [], id="ends by itself"),
    pytest.param("early", 1, 1, [], id="before it has told anything"),
    pytest.param("late", 1, 1, [], id="after what is begun has ended"),
    *(
        pytest.param(word, 1, 1, [f"(?!.*Ray).*has ended silently; {HOW}"], id=f"without a word, {word}")
        for word in ("no ray", "stopped")  # its end after it has stopped Ray itself is not Ray's
    ),
    pytest.param("own error,0", 1, 1, ["agentrl: AgentrlError: the gate is shut", f".*{BY_RAY}.*"], id="its own error first"),
    pytest.param("ray,ray,0", 0, 3, AGAIN, id="goes on within the limit"),
    pytest.param(
        "ray,ray,ray", 1, 3, [*AGAIN, f"agentrl: WorkerDiedError: {BY_RAY}; {HOW}"], marks=proof, id="not beyond the limit"
    ),
    pytest.param("stops", 130, 1, [f"interrupted; {HOW}"], id="a stop that was requested"),
    pytest.param("SIGKILL", -signal.SIGKILL, 1, [f".*was ended by SIGKILL; {HOW}"], id="a signal"),
])  # fmt: skip
def test_what_is_made_of_the_end_of_a_driver(config: Path, words: str, code: int, drivers: int, said: list[str]) -> None:
    found, lines, started = ended(config, words)
    assert (found, started) == (code, ["new 0", "resumed 1", "resumed 2"][:drivers])
    if words == "stops":
        del lines[:-1]
    assert len(lines) == len(said), lines
    for line, pattern in zip(lines, said, strict=True):
        assert re.fullmatch(pattern.format(run=re.escape(str(config.parent / "run"))), line), line


@contextmanager
def waiting(config: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command(config, "waits"), **options)  # type: ignore[call-overload]
    try:
        assert until((config.parent / "run" / "ready").exists, 60)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("name", "to", "got"), [("INT", "one", {1}), ("TERM", "group", {1, 2})])
def test_a_signal_is_passed_on(config: Path, name: str, to: str, got: set[int]) -> None:
    with waiting(config, start_new_session=True) as process:
        (os.kill if to == "one" else os.killpg)(process.pid, getattr(signal, f"SIG{name}"))
        assert process.wait(30) == 130
    seen = (config.parent / "run" / "got").read_text().split()
    assert set(seen) == {name} and len(seen) in got


def test_ctrl_c_on_a_terminal_comes_once(config: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command(config, "waits"))
    assert until((config.parent / "run" / "ready").exists, 60)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)
    assert (config.parent / "run" / "got").read_text() == "INT"


def test_a_driver_dies_with_its_parent(config: Path) -> None:
    with waiting(config) as process:
        [driver] = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        psutil.wait_procs([driver], timeout=10)
        assert not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("parent", [True, False])
async def test_one_signal_to_the_whole_group_is_one_and_a_later_one_another(
    monkeypatch: pytest.MonkeyPatch, parent: bool
) -> None:
    """Without a parent that passes it on, the second is another however soon it comes."""
    monkeypatch.setattr(ray_parent, "_to_parent", 0 if parent else None)
    said: list[str] = []
    interrupt = Interrupt(said.append)
    interrupt.in_step = True

    async def run() -> None:
        interrupt.install()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(SAME_SIGNAL_S + 0.05)
        assert parent and interrupt.requested
        assert said == ["interrupted: finishing the step and writing a checkpoint (Ctrl-C again gives up the step)"]
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)


# The other commands, with a driver that Ray ends as often as its word says and that tells what it was asked for.
OTHER = """
import os, sys
from agentrl.cli import eval, main, train
from agentrl.cluster.ray_parent import report_to_parent

ends, run = int(sys.argv[1]), sys.argv[2]

def drive(args, restarts, **more):
    print("asked", getattr(args, "resume", None), getattr(args, "success", None), restarts, more, flush=True)
    report_to_parent(folder=run, restarts=restarts, max_restarts=0 if hasattr(args, "replay") else 2, then="so it goes on")
    report_to_parent(ray="its GCS (pid 7) or its raylet (pid 8)")
    if restarts < ends:
        os._exit(1)
    return 0

train._run_sft = train._resume = eval._evaluate = eval._roll_out = drive
sys.argv[1:] = sys.argv[3:]
sys.exit(main.main())
"""


def other(ends: int, *words: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", OTHER, str(ends), "runs/x", *words], capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_training_on_data_goes_on_too() -> None:
    code, said = other(2, "sft", "--data", "rows.jsonl", "--success", "model.path=m")
    asked = ["asked None True 0 {}", "asked runs/x None 1 {}", "asked runs/x None 2 {}"]
    assert code == 0 and [line for line in said if line.startswith("asked")] == asked
    code, said = other(3, "sft", "--data", "rows.jsonl", "model.path=m")
    assert code == 1 and said[-1].endswith("(pid 8); so it goes on")


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_episodes_that_ray_ended_are_continued_by_the_same_command(command: str) -> None:
    code, said = other(1, command, "key_value", "--model", "m")
    assert code == 1 and len(said) == 2, said
    assert said[-1].startswith("agentrl: WorkerDiedError: Ray has ended the driver (pid ")
    assert said[-1].endswith("(pid 8); so it goes on")


ALONE = """
import importlib.metadata, os, sys
importlib.metadata.entry_points = lambda **wanted: ()  # a command that an installed package brings may load torch
from agentrl.cli import arguments
from agentrl.cli.main import main

def end():
    print(len(os.listdir("/proc/self/task")), {"numpy", "torch", "ray"} & set(sys.modules))
    sys.exit(0)

arguments.end_of_driver = end
sys.exit(main())
"""


@pytest.mark.parametrize(
    "words", ["train quickstart", "sft quickstart", "eval key_value --model m", "rollout key_value --model m"]
)
def test_a_driver_is_forked_before_there_are_threads(words: str) -> None:
    """Else it is not forked at all."""
    done = subprocess.run([sys.executable, "-c", ALONE, *words.split()], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1 set()\n"
