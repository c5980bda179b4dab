"""A driver that is killed leaves nothing of its Ray, and nothing of another's is touched."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster import ray_cluster, ray_keeper
from agentrl.cluster.ray_cluster import MARK
from tests.cluster.strikes import carrying, line_of
from tests.conftest import proof
from tests.waits import until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="the keeper is Linux's; elsewhere Ray has its own"),
]

DRIVER = """
import time
from agentrl.cluster.ray_cluster import start_ray
from agentrl.config.schema import ClusterConfig

start_ray(ClusterConfig(), object_store_bytes=100 << 20)
print("up", flush=True)
time.sleep(100)
"""


@proof
@pytest.mark.parametrize("moment", ["its agents start", "it is up"])
def test_a_killed_driver_leaves_no_process_of_its_ray(moment: str) -> None:
    own = f"OF_TEST={(tag := uuid.uuid4().hex)}".encode()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, env={**os.environ, "OF_TEST": tag}, start_new_session=True
    )
    assert driver.stdout is not None
    try:
        if moment == "it is up":
            assert driver.stdout.readline() == b"up\n"
        else:
            while not any("agent" in word for pid in carrying(own) for word in line_of(pid).split()[:4] if word.endswith(".py")):
                assert driver.poll() is None
        driver.kill()
        driver.wait()
        time.sleep(2)  # what was being forked shows
        assert until(lambda: not carrying(own), 8), [line_of(pid)[-120:] for pid in carrying(own)]
    finally:
        driver.stdout.close()
        for pid in carrying(own):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of two Rays: of "one", and of "one" with a longer value."""
    begun = [subprocess.Popen(["sleep", "60"], env={MARK: value}) for value in ("one", "one-more")]
    yield begun
    for process in begun:
        process.kill()
        process.wait()


SAYS = """
import os, subprocess, sys
keeper = subprocess.Popen([sys.executable, "-I", *sys.argv[2:], str(os.getpid())], stdin=subprocess.PIPE)
keeper.stdin.write(sys.argv[1].encode())
keeper.stdin.flush()
os._exit(1)
"""


def test_the_keeper_ends_its_own_ray_alone_and_only_when_its_driver_is_dead(sleepers: list[subprocess.Popen[bytes]]) -> None:
    mine, other = sleepers
    keeper = [ray_keeper.__file__, f"{MARK}=one"]
    told = subprocess.Popen([sys.executable, "-I", *keeper, str(os.getpid())], stdin=subprocess.PIPE, env={MARK: "of the driver"})
    told.communicate(b"\n", timeout=10)
    assert (told.returncode, mine.poll(), other.poll()) == (0, None, None)
    subprocess.run([sys.executable, "-I", "-c", SAYS, "", *keeper], timeout=20, check=False)
    mine.wait(10)
    assert (mine.returncode, other.poll()) == (-signal.SIGKILL, None)


@pytest.mark.parametrize(("told", "said"), [
    ("", ""), ("lost; go on with this\n", "lost; go on with this\n"),
    ("lost\nlost; go on with that\n", "lost; go on with that\n"), ("lost\n \n", ""), ("lost\n\n", ""),
])  # fmt: skip
def test_the_keeper_says_what_a_driver_that_ends_without_a_word_had_told_it(told: str, said: str) -> None:
    words = [sys.executable, "-I", "-c", SAYS, told, ray_keeper.__file__, f"{MARK}={uuid.uuid4().hex}"]
    assert subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=20, check=False).stderr == said


@pytest.mark.parametrize("reader", ["gone", "silent"])
def test_what_it_has_to_say_never_keeps_it_from_ending_its_ray(sleepers: list[subprocess.Popen[bytes]], reader: str) -> None:
    mine, _ = sleepers
    ours, theirs = os.pipe()
    if reader == "gone":
        os.close(ours)
    else:
        os.set_blocking(theirs, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(theirs, bytes(1 << 12))
        os.set_blocking(theirs, True)
    words = [sys.executable, "-I", "-c", SAYS, "lost\n", ray_keeper.__file__, f"{MARK}=one"]
    try:
        assert subprocess.run(words, stderr=theirs, timeout=20, check=False).returncode == 1
        assert mine.wait(10) == -signal.SIGKILL
    finally:
        for end in (theirs, *([] if reader == "gone" else [ours])):
            os.close(end)


WORDED = """
import signal, sys, time
import psutil, ray
from agentrl.cluster import ray_cluster as runtime
from agentrl.cluster.ray_parent import silent_exit_message
from agentrl.config.schema import ClusterConfig

with runtime.exit_message(silent_exit_message("continue with:\\n\\nthis")):
    runtime.start_ray(ClusterConfig(), object_store_bytes=100 << 20)
    if sys.argv[1] == "ended by Ray":
        for process in psutil.Process().children(recursive=True):
            if process.name() == "raylet":
                process.kill()
        while True:
            ray.put(bytes(1 << 20))
    elif sys.argv[1] == "killed":
        psutil.Process().kill()
    elif sys.argv[1] == "stopped":
        runtime.stop_ray()
sys.exit(3)
"""


@proof
@pytest.mark.parametrize(("how", "code"), [("ended by Ray", 1), ("killed", -9), ("stopped", 3), ("left", 3)])
def test_a_run_from_python_that_ends_without_a_word_is_told_of(how: str, code: int) -> None:
    """A command has a parent that says it. Who ends by itself says what it has to say, also if it leaves its Ray behind."""
    driver = subprocess.Popen([sys.executable, "-c", WORDED, how], stderr=subprocess.PIPE, text=True, start_new_session=True)
    said = driver.communicate(timeout=100)[1]
    words = (
        f"agentrl: the driver (pid {driver.pid}) has ended silently: it was killed, or Ray ended it from within, as it "
        "does when it has lost its GCS or its raylet; continue with:  this"
    )
    assert driver.returncode == code and said.splitlines().count(words) == (code != 3), said


HOLDER = """
import json, os, subprocess, sys, time
import psutil
from agentrl.engines.vllm.options import Scratch

scratch = Scratch()
code = "import sys; sys.path.insert(0, {path!r}); import held; held.main()"
held = subprocess.Popen([sys.executable, "-c", code], env={{**os.environ, **scratch.environment()}}, stdout=subprocess.PIPE)
print(json.dumps([*scratch.environment().values(), held.stdout.readline().decode().strip(), held.pid]), flush=True)
if sys.argv[1:] == ["close"]:
    for process in [*psutil.Process(held.pid).children(), held]:
        process.kill()
    held.wait()
    scratch.close()
time.sleep(60)
"""
HELD = """
import time
from multiprocessing import get_context


def main():
    from agentrl.engines.vllm.options import settle_scratch

    settle_scratch()
    lock = get_context("spawn").Lock()
    print(lock._semlock.name, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["closed", "driver killed"])
def test_the_folder_and_the_semaphores_of_killed_replicas_go_with_who_started_them(tmp_path: Path, how: str) -> None:
    """As vLLM's: a replica and its resource tracker are killed, so that nothing in it can tidy up."""
    (tmp_path / "held.py").write_text(HELD)
    program, words = HOLDER.format(path=str(tmp_path)), ["close"] * (how == "closed")
    own = f"OF_TEST={(tag := uuid.uuid4().hex)}".encode()
    driver = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, env={**os.environ, "OF_TEST": tag, MARK: tag}
    )
    assert driver.stdout is not None
    try:
        folder, semaphore, _ = json.loads(driver.stdout.readline())
        path = Path("/dev/shm") / f"sem.{semaphore.lstrip('/')}"
        assert semaphore.startswith(f"/{Path(folder).name}-")
        if how == "driver killed":
            assert Path(folder).is_dir() and path.exists()
            ray_keeper.sweep(ray_keeper.SCRATCH.format(driver.pid))
            assert Path(folder).is_dir() and path.exists(), "a living driver's are its own"
            ray_keeper.kill_all(f"{MARK}={tag}".encode())
            driver.wait()
            ray_keeper.sweep(ray_keeper.SCRATCH.format(driver.pid))
        assert until(lambda: not (Path(folder).exists() or path.exists()), 10)
    finally:
        driver.stdout.close()
        for pid in carrying(own):
            os.kill(pid, signal.SIGKILL)
        driver.wait()


def test_the_variables_of_rays_processes_do_not_stay_in_the_drivers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("ray._private.node")  # sets some of its own
    before, within = dict(os.environ), dict[str, str]()

    def fail(*_: Any) -> None:
        within.update(os.environ)
        os.environ["SET_BY_RAY"] = "1"
        raise OSError("no Ray")

    monkeypatch.setattr(ray_cluster, "_init", fail)
    with pytest.raises(OSError, match="no Ray"):
        ray_cluster._start_once(5.0, None)
    assert {ray_cluster.MARK, ray_cluster.NICENESS} <= within.keys() - before.keys()
    assert os.environ.pop("SET_BY_RAY") == "1" and dict(os.environ) == before
